"""A process that owns sandboxes and is meant to be killed.

``python -m steelyard.testing.sandbox_owner KIND DIRECTORY`` starts a program that runs for a long time in a
sandbox of each of two attempts, prints a line, and waits.
"""

import asyncio
import sys
from pathlib import Path

from steelyard.config import SandboxConfig
from steelyard.sandbox.base import Starter
from steelyard.sandbox.bubblewrap import Command
from steelyard.sandbox.process import ProcessStarter
from steelyard.sandbox.registry import Registry
from steelyard.sandbox.starters import Nursery, SingleStarter
from steelyard.types import SandboxCall

_PROGRAM = b"import os, time\nos.fork()\nopen('begun', 'w').close()\ntime.sleep(600)"


def make_starter(kind: str, config: SandboxConfig, directory: Path) -> Starter:
    """A starter by name: ``nursery``, ``single`` or ``process``."""
    registry = Registry(directory)
    if kind == "process":
        return ProcessStarter(config, registry)
    return (Nursery if kind == "nursery" else SingleStarter)(config, Command(config), registry)


async def own(kind: str, directory: Path) -> None:
    """Start the sandboxes and their programs, say so, and wait for the end."""
    starter = make_starter(kind, SandboxConfig(), directory)
    running = []
    for label in ("att_owned_1", "att_owned_2"):
        sandbox = await starter.start()
        await sandbox.set_label(label)
        running.append(asyncio.create_task(sandbox.run(SandboxCall(program=_PROGRAM, deadline_s=600.0))))
    sys.stdout.write("begun\n")
    sys.stdout.flush()
    await asyncio.gather(*running)


if __name__ == "__main__":
    asyncio.run(own(sys.argv[1], Path(sys.argv[2])))
