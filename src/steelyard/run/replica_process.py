"""A replica process: ``python -m steelyard.run.replica_process OPTIONS.json``."""

import asyncio
from pathlib import Path

from steelyard.clock import SystemClock
from steelyard.ids import RandomIds
from steelyard.inference.engine_core import EngineCore, EngineSettings
from steelyard.inference.local_engine import LocalEngine, prepare_process
from steelyard.inference.service import serve_engine
from steelyard.processes.faults import fault_hook
from steelyard.run.children import run_child
from steelyard.run.replica_options import ReplicaOptions
from steelyard.weights.loader import VersionLoader


async def serve(options: ReplicaOptions, stop: asyncio.Event) -> None:
    """Serve a local engine until ``stop`` is set."""
    prepare_process(num_threads=1)
    clock = SystemClock()
    loader = VersionLoader()
    settings = EngineSettings(
        max_running=options.max_running,
        row_tokens=options.row_tokens,
        kv_tokens=options.kv_tokens,
        prefill_chunk_tokens=options.prefill_chunk_tokens,
        max_versions=options.max_versions,
        probe_tolerance=options.probe_tolerance,
    )
    core = EngineCore(settings, loader, replica_id=options.name, clock=clock, ids=RandomIds())
    engine = LocalEngine(core, loader, clock)
    try:
        await serve_engine(engine, Path(options.socket_path), stop, fault_hook(options.fault, options.name))
    finally:
        await engine.close()


if __name__ == "__main__":
    run_child(ReplicaOptions, serve)
