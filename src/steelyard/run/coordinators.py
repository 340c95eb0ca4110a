"""The coordinator of a run, opened from its configuration, and served to others where that is asked for."""

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from steelyard import config_file
from steelyard.clock import Clock
from steelyard.config import Config
from steelyard.coordinator.capability import CapabilityRing, Role
from steelyard.coordinator.core import OpenTraces
from steelyard.coordinator.journal.base import Journal
from steelyard.coordinator.records import CoordinatorSettings
from steelyard.coordinator.server import CoordinatorServer
from steelyard.coordinator.service import Coordinator
from steelyard.digests import digest_bytes
from steelyard.durable import storage_errors
from steelyard.environments.base import Environment
from steelyard.ids import IdSource
from steelyard.metrics import Counters
from steelyard.run.directory import RunDirectory
from steelyard.run.secret import run_secret
from steelyard.tasks.sampler import ShuffledStream

TRAIN_SPLIT = "train"
_ENDLESS = 1 << 30
"""Tasks of an environment that names no number: more than any run draws."""


async def open_coordinator(
    config: Config,
    environment: Environment,
    journal: Journal,
    open_traces: OpenTraces,
    *,
    clock: Clock,
    ids: IdSource,
    counters: Counters,
) -> Coordinator:
    """Start the run of ``config``, or take over what ``journal`` holds of it.

    Raises:
        IntegrityError: the journal is damaged elsewhere than at its end.
        StorageFailed: it cannot be written.
    """
    return await Coordinator.open(
        journal=journal,
        settings=CoordinatorSettings.from_config(config),
        clock=clock,
        ids=ids,
        run_id=ids.new("run"),
        seed=config.run.seed,
        config_digest=digest_bytes(config_file.to_yaml(config).encode()),
        open_traces=open_traces,
        stream=task_stream(environment, config),
        counters=counters,
        jitter=random.Random(config.run.seed),
    )


def task_stream(environment: Environment, config: Config) -> ShuffledStream | None:
    """The training tasks of a run in the order of its seed; None where it only evaluates."""
    if config.train.max_steps == 0:
        return None
    num_tasks = environment.num_tasks(TRAIN_SPLIT) or _ENDLESS
    return ShuffledStream(num_tasks, config.run.seed, lambda index: environment.task_id(TRAIN_SPLIT, index))


@asynccontextmanager
async def serving(
    config: Config,
    directory: RunDirectory,
    coordinator: Coordinator,
    clock: Clock,
    counters: Counters,
    roles: frozenset[Role],
) -> AsyncIterator[str]:
    """Serve a coordinator on the port of the configuration; gives the URL, which is also in ``coordinator.url``.

    Raises:
        InputError: the port is in use, or the secret of the run can be read by others.
        StorageFailed: the disk refuses.
    """
    server = CoordinatorServer(
        coordinator,
        CapabilityRing(run_secret(directory)),
        clock=clock,
        counters=counters,
        host=config.coordinator.host,
        port=config.coordinator.port or 0,
        roles=roles,
    )
    url = await server.start()
    try:
        with storage_errors(str(directory.url)):
            temporary = directory.url.with_suffix(".url.tmp")
            temporary.write_text(url + "\n", encoding="ascii")
            temporary.rename(directory.url)
        yield url
    finally:
        await server.stop()


@asynccontextmanager
async def serving_others(
    config: Config, directory: RunDirectory, coordinator: Coordinator, clock: Clock, counters: Counters
) -> AsyncIterator[str | None]:
    """Let workers and scorers elsewhere join a run that has its own; gives the URL, None where nobody is served.

    Nobody is where ``coordinator.port`` is null. The trainer is this run's own: no other may take its steps.

    Raises:
        InputError: as :func:`serving`.
    """
    if config.coordinator.port is None:
        yield None
        return
    roles = frozenset(Role) - {Role.TRAINER}
    async with serving(config, directory, coordinator, clock, counters, roles) as url:
        yield url
