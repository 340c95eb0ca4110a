"""What the run's engine needs, looked for before anything starts."""

from pathlib import Path

from steelyard.config import Config
from steelyard.errors import ConfigError
from steelyard.inference.replica_set import RouterSettings
from steelyard.inference.vllm_server import WORKER_FOLDER
from steelyard.run.emulated_model import emulated_times


def router_settings(config: Config) -> RouterSettings:
    """How the router of a run waits and hedges."""
    router = config.inference.router
    return RouterSettings(queue_deadline_s=router.queue_deadline_s, hedge_quantile=router.hedge_quantile)


def check_engine(config: Config) -> None:
    """Check that the engine's environment is there, or the device and the model that it emulates.

    Raises:
        ConfigError: it is not; says how to make it.
    """
    if config.inference.engine == "emulated":
        emulated_times(config.inference.emulated)
    vllm = config.inference.vllm
    if config.inference.engine != "vllm" or vllm.url is not None:
        return
    python = Path(vllm.python)
    if not python.is_file():
        raise ConfigError(
            f"inference.vllm.python must be the Python of an environment with vLLM, got {vllm.python} which does not "
            "exist; `make venv-vllm` makes one in .venv-vllm"
        )
    if not any(python.parent.parent.glob("lib/python*/site-packages/vllm/__init__.py")):
        raise ConfigError(
            f"inference.vllm.python must be the Python of an environment with vLLM, got {vllm.python} whose "
            "environment has no vllm; `make venv-vllm` makes one in .venv-vllm"
        )
    if not (WORKER_FOLDER / "steelyard_vllm_worker.py").is_file():
        raise ConfigError(f"the installed Steelyard must hold {WORKER_FOLDER}, it does not: install it anew")
