"""What was answered is durable: across a SIGKILL inside a write, and never before its commit."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from steelyard.coordinator import events as e
from steelyard.coordinator.books import prompt_book
from steelyard.coordinator.entities import State
from steelyard.coordinator.journal.base import FAULT_POINTS
from steelyard.coordinator.journal.memory import MemoryJournal
from steelyard.coordinator.state import apply
from steelyard.errors import StorageFailed
from steelyard.testing.journals import PostgresStore, SqliteStore, replayed
from steelyard.testing.manual_clock import settle
from steelyard.testing.run_rig import WORKER, RunRig, make_settings

CHILD = """
import asyncio, os, signal, sys
from pathlib import Path
from steelyard.coordinator.journal.postgres import PostgresJournal
from steelyard.coordinator.journal.postgres_database import PostgresPlace
from steelyard.coordinator.journal.sqlite import SqliteJournal
from steelyard.testing.run_rig import WORKER, RunRig, make_settings

place, point, countdown, name = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]

def fault(name):
    global countdown
    if name == point:
        countdown -= 1
        if countdown == 0:
            os.kill(os.getpid(), signal.SIGKILL)

async def main():
    journal = SqliteJournal(Path(place), fault)
    if place.startswith("postgresql:"):
        journal = PostgresJournal(PostgresPlace(url=place, name=name), owner="a child", fault_point=fault)
    rig = await RunRig(make_settings(), journal=journal).start()
    for step in range(100):
        while leases := await rig.coordinator.lease(WORKER, 3, 0.0):
            for lease in leases:
                print("leased", lease.attempt_id, flush=True)
                await rig.coordinator.artifact_ready(rig.seal(lease))
                print("reported", lease.attempt_id, flush=True)
            await rig.score_all()
        await rig.begin(step)
        print("begun", step, flush=True)
        await rig.publish(step + 1)

asyncio.run(main())
"""


@pytest.mark.parametrize(("point", "countdown"), [(point, 9 + 14 * n) for n, point in enumerate(FAULT_POINTS)])
@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_what_was_answered_before_a_sigkill_inside_a_write_is_in_the_journal(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str, point: str, countdown: int
) -> None:
    path = tmp_path / "journal.sqlite"
    store = PostgresStore(request.getfixturevalue("postgres")) if kind == "postgres" else SqliteStore(path)
    place, name = (store.url, store.name) if isinstance(store, PostgresStore) else (str(path), "")
    child = subprocess.run(
        [sys.executable, "-c", CHILD, place, point, str(countdown), name],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert child.returncode == -signal.SIGKILL, child.stderr
    if isinstance(store, PostgresStore):
        store.end_lease()
    events = replayed(store.open())
    leased = {event.attempt_id for event in events if isinstance(event, e.Leased)}
    reported = {event.report.attempt_id for event in events if isinstance(event, e.ArtifactReady)}
    begun = {str(event.step) for event in events if isinstance(event, e.StepBegun)}
    known = {"leased": leased, "reported": reported, "begun": begun}
    answers = [line.split() for line in child.stdout.splitlines()]
    assert len(answers) > 5
    assert [(kind, name) for kind, name in answers if name not in known[kind]] == []
    state = State()
    for event in events:
        apply(state, event)
    assert prompt_book(state).gap == 0


class GatedJournal(MemoryJournal):
    """Commits only while the gate is open."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self.gate.set()

    async def append(self, events: Sequence[e.AnyEvent]) -> None:
        await self.gate.wait()
        await super().append(events)


def test_no_answer_leaves_before_the_commit_of_what_it_read() -> None:
    async def run() -> None:
        journal = GatedJournal()
        rig = await RunRig(make_settings(), journal=journal).start()
        (held,) = await rig.coordinator.lease(WORKER, 1, 0.0)
        journal.gate.clear()
        calls = [
            asyncio.ensure_future(rig.coordinator.lease(WORKER, 1, 0.0)),
            asyncio.ensure_future(rig.coordinator.heartbeat(WORKER, (held.attempt_id,))),
            asyncio.ensure_future(rig.coordinator.deletable_versions()),
            asyncio.ensure_future(rig.coordinator.books({})),
        ]
        await settle()
        assert not any(call.done() for call in calls), "reads too wait for what they have read"
        hidden = [name for name in rig.coordinator.state.attempts if name != held.attempt_id]
        assert [rig.coordinator.live_lease(name) for name in hidden] == [None]
        assert rig.coordinator.is_alive(held.attempt_id)
        journal.gate.set()
        await asyncio.gather(*calls)
        assert rig.coordinator.is_alive(hidden[0])
        await rig.coordinator.close()

    asyncio.run(run())


class FullDisk(MemoryJournal):
    """Refuses everything once it is full."""

    is_full = False

    async def append(self, events: Sequence[e.AnyEvent]) -> None:
        if self.is_full:
            raise StorageFailed("journal.sqlite: 1 events could not be written: database or disk is full")
        await super().append(events)


def test_a_full_disk_ends_every_wait_with_a_clear_error_and_the_run_resumes_where_it_was() -> None:
    async def run() -> None:
        journal = FullDisk()
        rig = await RunRig(make_settings(), journal=journal).start()
        waiter = asyncio.ensure_future(rig.coordinator.next_batch(0, 1e6))
        await settle()
        num_events = len(journal.stored)
        journal.is_full = True
        with pytest.raises(StorageFailed, match="disk is full"):
            await rig.coordinator.lease(WORKER, 1, 0.0)
        with pytest.raises(StorageFailed, match="disk is full"):
            await waiter
        with pytest.raises(StorageFailed, match="disk is full"):
            await rig.coordinator.heartbeat(WORKER, ())
        await rig.coordinator.close()
        journal.is_full = False
        assert len(journal.stored) == num_events
        await rig.open()
        assert len(await rig.coordinator.lease(WORKER, 100, 0.0)) == 8
        await rig.coordinator.close()

    asyncio.run(run())
