"""A scorer process: ``python -m steelyard.run.scorer_process OPTIONS.json``.

The environment's grader with sandboxes of its own. Killed and replaced by the pool where an answer freezes it.
"""

import asyncio
from pathlib import Path
from typing import Any

from steelyard.config import SandboxConfig
from steelyard.environments.base import Services
from steelyard.environments.registry import make_environment
from steelyard.processes.faults import fault_hook
from steelyard.run.children import ChildOptions, run_child
from steelyard.sandbox.function_calls import run_function_calls
from steelyard.sandbox.opening import open_pool
from steelyard.scoring.process import serve_grader


class ScorerOptions(ChildOptions, frozen=True, kw_only=True):
    """Which environment grades, in which sandboxes; ``registry_dir`` is where those are noted for the sweep."""

    environment: str
    environment_options: dict[str, Any]
    sandbox: SandboxConfig
    registry_dir: str


async def serve(options: ScorerOptions, stop: asyncio.Event) -> None:
    """Serve a grader until ``stop`` is set."""
    services = Services(run_function=run_function_calls, call_deadline_s=options.sandbox.call_deadline_s)
    environment = make_environment(options.environment, options.environment_options, services)
    pool = await open_pool(options.sandbox, Path(options.registry_dir))
    fault = fault_hook(options.fault, options.name)
    serving = asyncio.create_task(serve_grader(Path(options.socket_path), environment.grader(), pool, fault))
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (serving, stopping):
            task.cancel()
        await asyncio.gather(serving, stopping, return_exceptions=True)
        await pool.close()


if __name__ == "__main__":
    run_child(ScorerOptions, serve)
