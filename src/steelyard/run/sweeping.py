"""Orphans: what was stored and never handed in. Which these are is decided here, from journal and state alone.

::

    journal     attempts and artifacts of every ARTIFACT_READY: they stay for ever
    state       attempts that are with a worker: whatever is theirs stays
    the rest    goes, once it is older than any upload can be under way

A trace carries the name of its attempt, so that it can be told whose it is. An artifact carries its digest, and equal
answers share one: the same bytes may be an orphan of one attempt and be on their way from another, between being stored
and being reported. So artifacts are swept only while no attempt is with a worker.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, NamedTuple

from steelyard.config import Config
from steelyard.coordinator import events as e
from steelyard.coordinator.entities import State
from steelyard.coordinator.journal.base import JournalReader, checked_events, decode
from steelyard.coordinator.state import apply
from steelyard.errors import InputError
from steelyard.processes.supervision import task_group
from steelyard.run.directory import RunDirectory
from steelyard.run.journals import open_journal_reader
from steelyard.run.stores import Stores
from steelyard.traces.durable_writer import no_fault
from steelyard.traces.objects import ObjectStore
from steelyard.traces.store import ARCHIVE_PREFIX

logger = logging.getLogger(__name__)

_DELETIONS_AT_A_TIME = 16
_OWNER_KEY = "owner"
"""Holds the id of the run whose blobs these are."""


class Stored(NamedTuple):
    """Something in a store under the name of its attempt or its digest, and when it was last written."""

    name: str
    modified_at_s: float


class Referenced(NamedTuple):
    """What the journal refers to: attempts that handed in, and the digests of the artifacts that they handed in."""

    attempt_ids: frozenset[str]
    artifact_digests: frozenset[str]


class Swept(NamedTuple):
    """What a sweep removed: attempts of which something was stored, and digests of artifacts."""

    attempt_ids: tuple[str, ...]
    artifact_digests: tuple[str, ...]


def referenced(events: Iterable[e.AnyEvent]) -> Referenced:
    """What ``events`` refer to; whatever happened afterwards, it is evidence."""
    reports = [event.report for event in events if isinstance(event, e.ArtifactReady)]
    return Referenced(
        frozenset(report.attempt_id for report in reports), frozenset(report.artifact_digest for report in reports)
    )


def orphaned_attempts(
    stored: Iterable[Stored], known: Referenced, live: frozenset[str], before_s: float
) -> tuple[str, ...]:
    """Attempts whose trace is an orphan, in the order of ``stored``.

    Args:
        stored: attempts with a trace.
        live: attempts that are with a worker.
        before_s: only what was written before is touched.
    """
    return tuple(
        item.name
        for item in stored
        if item.name not in known.attempt_ids and item.name not in live and item.modified_at_s < before_s
    )


def orphaned_artifacts(
    stored: Iterable[Stored], known: Referenced, live: frozenset[str], before_s: float
) -> tuple[str, ...]:
    """Digests of artifacts that are orphans, in the order of ``stored``; none while an attempt is live.

    Args:
        stored: digests of artifacts.
        live, before_s: as of ``orphaned_attempts``.
    """
    if live:
        return ()
    return tuple(
        item.name for item in stored if item.name not in known.artifact_digests and item.modified_at_s < before_s
    )


async def sweep_blobs(
    journal: JournalReader, live: frozenset[str], stores: Stores, *, now_s: float, min_age_s: float
) -> Swept:
    """Remove orphans: traces, open or sealed, and artifacts.

    To be called by the one writer of the journal, while it hands out no leases.

    Args:
        journal: holds all that was committed.
        live: attempts that are with a worker.
        min_age_s: artifacts and archived traces that are younger are left for the next sweep: an upload may take as
            long, and another process may be about to report it.

    Raises:
        IntegrityError: a record of the journal is no event.
        InputError: the place outside the run directory is another run's, whose blobs would all be orphans here.
        StorageFailed: a store refused, or did not answer in time.
    """
    run_id, known = await asyncio.to_thread(_referenced, journal)
    if run_id is None:
        return Swept((), ())  # nothing began, so that nothing can be told to be left over
    if stores.objects is not None:
        await _claim(stores.objects, run_id)
    before_s = now_s - min_age_s
    blobs = [Stored(blob.digest, blob.modified_at_s) for blob in await stores.artifacts.list()]
    artifacts = orphaned_artifacts(blobs, known, live, before_s)
    await _all(artifacts, stores.artifacts.delete)
    keep = known.attempt_ids | live if stores.objects is None else live
    attempts = set(await stores.traces.sweep(keep, 0.0, now_s))  # nobody else writes these files
    if stores.objects is not None:
        archived = [
            Stored(info.key.removeprefix(ARCHIVE_PREFIX), info.modified_at_s)
            for info in await stores.objects.list(ARCHIVE_PREFIX)
        ]
        orphans = orphaned_attempts(archived, known, live, before_s)
        await _all([ARCHIVE_PREFIX + attempt_id for attempt_id in orphans], stores.objects.delete)
        attempts = (attempts - known.attempt_ids) | set(orphans)
    swept = Swept(tuple(sorted(attempts)), artifacts)
    if swept.attempt_ids or swept.artifact_digests:
        logger.info(
            "removed what %d attempts recorded that never handed it in, and %d artifacts that nobody refers to",
            len(swept.attempt_ids),
            len(swept.artifact_digests),
        )
    return swept


async def sweep_run(directory: RunDirectory, config: Config, now_s: float, min_age_s: float | None) -> Swept:
    """Sweep a run that nobody works on; the caller holds its lock.

    Attempts that a crash left with a worker count as live here: only a resume ends them.

    Args:
        min_age_s: None is ``blobs.max_upload_s``.

    Raises:
        IntegrityError: the journal is damaged.
        StorageFailed: a store refused, or did not answer in time.
    """
    journal = open_journal_reader(config, directory)
    live = await asyncio.to_thread(_live, journal)
    stores = Stores.open(directory, no_fault, config.blobs)
    try:
        wanted_s = config.blobs.max_upload_s if min_age_s is None else min_age_s
        return await sweep_blobs(journal, live, stores, now_s=now_s, min_age_s=wanted_s)
    finally:
        await stores.close()


def _live(journal: JournalReader) -> frozenset[str]:
    state = State()
    for event in checked_events(journal.records(), journal.head()):
        apply(state, event)
    return held_attempts(state)


def held_attempts(state: State) -> frozenset[str]:
    """Attempts that are with a worker."""
    return frozenset(rollout.attempt_id for rollout in state.held() if rollout.attempt_id is not None)


async def _all(keys: Sequence[str], delete: Callable[[str], Coroutine[Any, Any, None]]) -> None:
    for start in range(0, len(keys), _DELETIONS_AT_A_TIME):
        async with task_group() as group:
            for key in keys[start : start + _DELETIONS_AT_A_TIME]:
                group.create_task(delete(key))


async def _claim(objects: ObjectStore, run_id: str) -> None:
    """Say whose the place is, where nobody has said so yet.

    Raises:
        InputError: it is another run's.
    """
    if not await objects.exists(_OWNER_KEY):
        await objects.put(_OWNER_KEY, run_id.encode())
    owner = (await objects.get(_OWNER_KEY)).decode(errors="replace")
    if owner != run_id:
        raise InputError(f"blobs.url must be a place of this run ({run_id}), got {objects.url} of run {owner[:80]}")


def _referenced(journal: JournalReader) -> tuple[str | None, Referenced]:
    """The run, None before it has begun, and what it refers to."""
    events = (decode(record.payload) for record in journal.records())
    first = next(events, None)
    run_id = first.run_id if isinstance(first, e.RunStarted) else None
    return run_id, referenced(events)
