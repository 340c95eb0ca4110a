"""Opens the pool that the configuration asks for."""

import logging
from pathlib import Path

from steelyard.config import SandboxConfig
from steelyard.errors import InputError, SandboxLost
from steelyard.sandbox.base import Starter
from steelyard.sandbox.bubblewrap import Command
from steelyard.sandbox.pool import WarmPool
from steelyard.sandbox.process import ProcessStarter
from steelyard.sandbox.registry import Registry
from steelyard.sandbox.starters import Nursery, SingleStarter

logger = logging.getLogger(__name__)


async def open_pool(config: SandboxConfig, directory: Path) -> WarmPool:
    """A pool, swept of what an earlier owner of ``directory`` left, and proven to be able to start sandboxes.

    Args:
        directory: holds notes of the processes that carry sandboxes; one owner at a time.

    Raises:
        InputError: this machine lacks something or forbids it; says what to install or allow.
        SandboxLost: a sandbox could not be started for another reason.
    """
    starter = await choose_starter(config, Registry(directory))
    return WarmPool(starter, config)


async def choose_starter(config: SandboxConfig, registry: Registry, command: Command | None = None) -> Starter:
    """The cheapest starter that works here, seen to work, after a sweep. Raises like :func:`open_pool`.

    Args:
        command: builds the command lines of bubblewrap; by default one for the bubblewrap that is found.
    """
    if config.kind == "process":
        starter: Starter = ProcessStarter(config, registry)
        await starter.sweep()
        await _try(starter)
        return starter
    command = command or Command(config)
    nursery = Nursery(config, command, registry)
    await nursery.sweep()
    try:
        await _try(nursery)
        return nursery
    except (InputError, SandboxLost) as error:
        await nursery.close()
        single = SingleStarter(config, command, registry)
        await _try(single)
        logger.warning("nested user namespaces do not work here, each sandbox is a bubblewrap of its own: %s", error)
        return single


async def _try(starter: Starter) -> None:
    await (await starter.start()).close()
