"""A vLLM server of ours: how it is started in its own environment, watched and ended. Imports no torch.

It listens on a Unix socket in a folder of the run: no port to be taken, and nobody on the network reaches the control
routes that development mode opens.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from steelyard.errors import DeadlineExceeded, InputError, SteelyardError
from steelyard.inference.vllm_api import VllmApi
from steelyard.processes.child import ChildProcess, thread_environment

WORKER_FOLDER = Path(__file__).parent / "vllm_worker"
"""Put onto a server's ``PYTHONPATH``. It holds nothing but what the server's processes import of ours."""
WORKER_EXTENSION = "steelyard_vllm_worker.LoadedParameters"

_CHECK_EVERY_S = 0.2


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """``python``: of vLLM's environment. ``model_dir``: a Hugging Face directory of the run's architecture.

    ``kv_cache_bytes``: of key-value cache. ``extra_args``: given to vLLM as they are, after ours.
    """

    python: str
    model_dir: str
    dtype: str
    max_model_len: int
    max_running: int
    kv_cache_bytes: int
    block_size: int = 32
    extra_args: tuple[str, ...] = ()


def server_arguments(settings: ServerSettings, socket_path: Path) -> list[str]:
    """What vLLM is told.

    ``--generation-config vllm``: else the policy's generation_config.json would change how tokens are sampled.
    ``--logprobs-mode processed_logprobs``: log-probabilities after temperature; without top-p and penalties, which we
    never ask for, they are over the full vocabulary. Those of prompts are at temperature 1 in any mode.
    """
    return [
        *("--model", settings.model_dir),
        *("--served-model-name", "policy"),
        *("--uds", str(socket_path)),
        *("--dtype", settings.dtype),
        *("--max-model-len", str(settings.max_model_len)),
        *("--max-num-seqs", str(settings.max_running)),
        *("--block-size", str(settings.block_size)),
        *("--kv-cache-memory-bytes", str(settings.kv_cache_bytes)),
        *("--logprobs-mode", "processed_logprobs"),
        *("--generation-config", "vllm"),
        *("--worker-extension-cls", WORKER_EXTENSION),
        "--enable-scale-out",
        "--enable-prompt-tokens-details",
        "--enforce-eager",
        "--skip-tokenizer-init",
        "--disable-uvicorn-access-log",
        *settings.extra_args,
    ]


def server_environment(settings: ServerSettings, inherited: Mapping[str, str]) -> dict[str, str]:
    """The server's environment: ours without what would lead its Python to our packages, and with what vLLM wants."""
    kept = {name: value for name, value in inherited.items() if not name.startswith(("PYTHON", "VLLM_", "VIRTUAL_ENV"))}
    return {
        **kept,
        **thread_environment(1),
        "PYTHONPATH": str(WORKER_FOLDER),
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "HF_HUB_OFFLINE": "1",
    }


class VllmServer:
    """One server with its processes. Made by :meth:`start`."""

    def __init__(self, child: ChildProcess) -> None:
        self._child = child

    @classmethod
    async def start(cls, name: str, settings: ServerSettings, socket_path: Path, log_path: Path) -> "VllmServer":
        """Start the processes; see :meth:`wait_until_ready`.

        Raises:
            InputError: there is no such environment.
        """
        if not Path(settings.python).is_file():
            raise InputError(
                f"inference.vllm.python must be the Python of an environment with vLLM, got {settings.python} which "
                "does not exist; `make venv-vllm` makes one in .venv-vllm"
            )
        command = [
            settings.python,
            str(WORKER_FOLDER / "steelyard_vllm_server.py"),
            str(os.getpid()),
            *server_arguments(settings, socket_path),
        ]
        environment = server_environment(settings, os.environ)
        return cls(await ChildProcess.start_program(name, command, environment, log_path=log_path))

    async def wait_until_ready(self, api: VllmApi, deadline_s: float) -> None:
        """Wait until the server answers. Its death ends the wait at once.

        Raises:
            ProcessDied: it ended; carries the end of its log.
            DeadlineExceeded: it neither answered nor ended within ``deadline_s`` seconds.
        """
        answering = asyncio.create_task(_answers(api), name="wait for vllm")
        dying = asyncio.create_task(self._child.watch(), name="watch vllm")
        try:
            done, _ = await asyncio.wait({answering, dying}, timeout=deadline_s, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            if not done:
                log = self._child.log_tail()
                raise DeadlineExceeded(f"vllm to serve (the end of its log: {log})", (self._child.name,), deadline_s)
        finally:
            for task in (answering, dying):
                task.cancel()
            await asyncio.gather(answering, dying, return_exceptions=True)

    async def watch(self) -> None:
        """Wait until the server ends.

        Raises:
            ProcessDied: always, unless cancelled; carries the end of its log.
        """
        await self._child.watch()

    async def stop(self, deadline_s: float) -> None:
        """End it; what has not ended after ``deadline_s`` seconds is killed."""
        await self._child.stop(deadline_s)
        # Where the first process was killed, the others of its group still run.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)


async def _answers(api: VllmApi) -> None:
    while True:
        try:
            await api.check_alive()
        except SteelyardError:
            await asyncio.sleep(_CHECK_EVERY_S)
        else:
            return
