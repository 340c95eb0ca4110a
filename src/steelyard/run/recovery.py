"""Going on after a crash: which state the trainer starts from, and the replay of steps that no checkpoint covers."""

import asyncio
import logging
from typing import NamedTuple

from steelyard.coordinator.records import PendingStep
from steelyard.coordinator.service import Coordinator
from steelyard.coordinator.transitions import VersionState
from steelyard.durable import remove_directory, storage_errors
from steelyard.run.directory import RunDirectory
from steelyard.run.stores import Stores
from steelyard.run.versions import VersionKeeper
from steelyard.trainer.client import TrainerClient
from steelyard.trainer.records import TrainRequest

logger = logging.getLogger(__name__)


class StartingPoint(NamedTuple):
    """``step`` optimizer steps are in the checkpoint at ``checkpoint``; None is the starting policy."""

    step: int
    checkpoint: str | None
    digest: str | None


def starting_point(coordinator: Coordinator, directory: RunDirectory) -> StartingPoint:
    """The newest checkpoint that the journal knows; what is on disk without its event does not count."""
    checkpoints = coordinator.state.checkpoints
    if not checkpoints:
        return StartingPoint(0, None, None)
    step = checkpoints[-1]
    digest = coordinator.state.checkpoint_digests.get(step)
    return StartingPoint(step, str(directory.checkpoints / f"step-{step:06d}"), digest)


async def sweep(coordinator: Coordinator, directory: RunDirectory, stores: Stores) -> None:
    """Remove what a crash left between a write and its event, or between an event and a removal.

    Raises:
        StorageFailed: the disk refuses.
    """
    versions = coordinator.state.versions
    gone = [
        number
        for number in stores.versions.versions()
        if number and number in versions and versions[number].state is VersionState.DELETED
    ]
    await asyncio.to_thread(stores.versions.delete, gone)
    await sweep_unknown(coordinator, directory, stores)


async def sweep_unknown(coordinator: Coordinator, directory: RunDirectory, stores: Stores) -> None:
    """Remove what a trainer that died left between a write and its event. Nothing else may train meanwhile.

    What is on disk without its event did not happen; a replay writes it again, and need not come out alike. Version 0
    is the starting policy itself, which comes out alike, and may by now be the only copy.

    Raises:
        StorageFailed: the disk refuses.
    """
    state = coordinator.state
    stores.versions.sweep()
    strays = [number for number in stores.versions.versions() if number and number not in state.versions]
    await asyncio.to_thread(stores.versions.delete, strays)
    last = state.checkpoints[-1] if state.checkpoints else 0
    for path in sorted(directory.checkpoints.glob("step-*")):
        if int(path.name.removeprefix("step-")) > last:
            logger.info("removing %s, which the journal does not know", path.name)
            with storage_errors(f"the removal of checkpoint {path.name}"):
                await asyncio.to_thread(remove_directory, path)
    for step in await stores.batches.steps():
        if step not in state.kept_batches:
            await stores.batches.delete(step)


class Diverged(NamedTuple):
    """The replay of ``step`` gave weights ``digest``, not those that were published as ``version``."""

    step: int
    version: int
    digest: str


async def replay(
    coordinator: Coordinator, trainer: TrainerClient, versions: VersionKeeper, stores: Stores, from_step: int
) -> Diverged | None:
    """Take the begun steps again from their stored batches.

    Where the weights come out as they were published, the version lives on; a step that died before its publication
    is published now. Returns where they come out otherwise: the caller orphans that version and starts over.
    """
    for pending in await coordinator.pending_steps_after(from_step):
        version = coordinator.next_version() if pending.published_version is None else pending.published_version
        await trainer.train_step(
            TrainRequest(
                path=str(stores.batches.path(pending.step)),
                digest=pending.batch_digest,
                step=pending.step,
                version=version,
            )
        )
        if pending.published_version is None:
            await versions.publish(version, pending.parent_version)
            continue
        digest = (await trainer.state()).weights_digest
        if digest != pending.published_digest:
            return _diverged(pending, version, digest)
    return None


def _diverged(pending: PendingStep, version: int, digest: str) -> Diverged:
    logger.warning(
        "the replay of step %d gave weights %s, published as version %d were %s",
        pending.step,
        digest,
        version,
        pending.published_digest,
    )
    return Diverged(pending.step, version, digest)
