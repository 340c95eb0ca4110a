"""The process of all emulated engines: ``python -m steelyard.run.emulated_process OPTIONS.json``. Imports no torch."""

import asyncio
import threading

from steelyard.clock import SystemClock
from steelyard.ids import RandomIds
from steelyard.inference.emulated_core import CoreSettings
from steelyard.inference.emulated_engine import EmulatedEngine, EmulatedSettings
from steelyard.inference.emulated_tokens import LengthModel, TokenIds, plain_token_ids
from steelyard.inference.service import serve_engine
from steelyard.processes.faults import fault_hook
from steelyard.processes.supervision import task_group
from steelyard.run.children import run_child
from steelyard.run.emulated_model import emulated_times
from steelyard.run.emulated_options import EmulatedOptions
from steelyard.types import Manifest
from steelyard.weights.reader import VersionReader

_KEPT_READS = 4


class SharedFiles:
    """Reads each version once for all engines of the process: they share one disk, and would compare the same bytes."""

    def __init__(self) -> None:
        self._reader = VersionReader()
        self._lock = threading.Lock()
        self._read: dict[str, tuple[Manifest, TokenIds]] = {}

    def read(self, version_dir: str) -> tuple[Manifest, TokenIds]:
        """See :meth:`steelyard.inference.emulated_engine.VersionFiles.read`."""
        with self._lock:
            if version_dir not in self._read:
                self._read[version_dir] = (self._reader.read(version_dir), plain_token_ids(version_dir))
                while len(self._read) > _KEPT_READS:
                    del self._read[next(iter(self._read))]
            return self._read[version_dir]


async def serve(options: EmulatedOptions, stop: asyncio.Event) -> None:
    """Serve all engines, each on its socket, until ``stop`` is set."""
    files, clock, ids = SharedFiles(), SystemClock(), RandomIds()
    model = emulated_times(options.emulated)
    settings = EmulatedSettings(
        core=CoreSettings(
            max_running=options.max_running,
            kv_tokens=options.kv_tokens,
            prefill_chunk_tokens=options.prefill_chunk_tokens,
        ),
        lengths=LengthModel(median_tokens=options.emulated.median_output_tokens, sigma=options.emulated.output_sigma),
        max_versions=options.max_versions,
        time_scale=options.emulated.time_scale,
        probe_tolerance=options.probe_tolerance,
    )
    engines = {name: EmulatedEngine(settings, model, files, name, clock, ids) for name in options.replica_names}
    try:
        async with task_group() as group:
            for name, engine in engines.items():
                fault = fault_hook(options.fault, name)
                group.create_task(serve_engine(engine, options.socket_of(name), stop, fault), name=name)
    finally:
        for engine in engines.values():
            engine.close()


if __name__ == "__main__":
    run_child(EmulatedOptions, serve)
