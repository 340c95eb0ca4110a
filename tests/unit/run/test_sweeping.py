"""The sweep takes orphans, and never what is referenced or may yet be: over random histories, and on real stores."""

import asyncio
import random
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.cli.main import EXIT_BAD_INPUT, EXIT_DONE, main
from steelyard.config import BlobsConfig
from steelyard.coordinator import events as e
from steelyard.coordinator.entities import State
from steelyard.coordinator.journal.memory import MemoryJournal
from steelyard.coordinator.journal.sqlite import SqliteJournal
from steelyard.coordinator.state import apply
from steelyard.digests import digest_bytes
from steelyard.errors import InputError
from steelyard.run.directory import RunDirectory, RunLock
from steelyard.run.stores import Stores
from steelyard.run.sweeping import (
    Stored,
    held_attempts,
    orphaned_artifacts,
    orphaned_attempts,
    referenced,
    sweep_blobs,
)
from steelyard.testing.histories import History
from steelyard.testing.run_rig import WORKER, RunRig, make_settings, play
from steelyard.testing.s3_server import S3Server
from steelyard.testing.traces import make_turn
from steelyard.types import EndReason

replace = msgspec.structs.replace

MAX_UPLOAD_S = 0.02
"""Events of a history are a millisecond apart: an upload takes at most so many of them times that."""


def history(seed: int) -> list[e.AnyEvent]:
    """A run of three steps in which many attempts are lost."""
    events: list[e.AnyEvent] = []
    made = History(events.append, seed=seed, groups_per_batch=3, group_size=4, failure_frac=0.4)
    made.start()
    for _ in range(3):
        made.step()
    return events


HISTORIES = [history(seed) for seed in range(8)]


class BlobModel:
    """What is stored while a history goes on, as workers store it.

    Answers are few enough for some attempts to share one. ``artifact_of`` gives the history's attempts these artifacts.
    """

    def __init__(self, events: Iterable[e.AnyEvent], seed: int) -> None:
        self.draw = random.Random(seed)
        self.traces: dict[str, float] = {}
        self.artifacts: dict[str, float] = {}
        self.answers = [digest_bytes(b"answer %d" % number) for number in range(40)]
        self.artifact_of: dict[str, str] = {}
        self.num_deleted = 0
        self.events = [self._with_shared_answers(event) for event in events]
        self._is_stored: set[str] = set()

    def _with_shared_answers(self, event: e.AnyEvent) -> e.AnyEvent:
        if isinstance(event, e.ArtifactReady):
            digest = self.artifact_of[event.report.attempt_id] = self.draw.choice(self.answers)
            return replace(event, report=replace(event.report, artifact_digest=digest))
        if isinstance(event, e.Scored):
            return replace(event, artifact_digest=self.artifact_of[event.score.attempt_id])
        return event

    def store_early(self, event: e.AnyEvent) -> None:
        """Just after ``event``: half of the attempts store at their lease, long before they end."""
        if isinstance(event, e.Leased) and self.draw.random() < 0.5:
            self._put(event.attempt_id, event.at_s)

    def store_late(self, event: e.AnyEvent) -> None:
        """Just before ``event``: an attempt that hands in has stored by then; one that fails may have."""
        match event:
            case e.ArtifactReady():
                self._put(event.report.attempt_id, event.at_s)
            case e.InfraFailed() | e.LeaseExpired() if self.draw.random() < 0.5:
                self._put(event.attempt_id, event.at_s)

    def _put(self, attempt_id: str, at_s: float) -> None:
        if attempt_id not in self._is_stored:
            self._is_stored.add(attempt_id)
            digest = self.artifact_of.setdefault(attempt_id, self.draw.choice(self.answers))
            self.traces[attempt_id] = self.artifacts[digest] = at_s

    def sweep(self, done: list[e.AnyEvent], state: State, now_s: float) -> None:
        """Delete what the rules call an orphan; check that all of it is one, and that nothing old is missed."""
        known, live, before_s = referenced(done), held_attempts(state), now_s - MAX_UPLOAD_S
        attempts = orphaned_attempts([Stored(*item) for item in self.traces.items()], known, live, before_s)
        digests = orphaned_artifacts([Stored(*item) for item in self.artifacts.items()], known, live, before_s)
        for attempt_id in attempts:
            assert self.traces.pop(attempt_id) < before_s
            assert attempt_id not in live
        for digest in digests:
            assert self.artifacts.pop(digest) < before_s
        self.num_deleted += len(attempts) + len(digests)
        for attempt_id, at_s in self.traces.items():
            assert attempt_id in known.attempt_ids or attempt_id in live or at_s >= before_s
        if not live:
            for digest, at_s in self.artifacts.items():
                assert digest in known.artifact_digests or at_s >= before_s

    def check(self, done: Iterable[e.AnyEvent]) -> None:
        """Everything that was ever handed in is stored."""
        for event in done:
            if isinstance(event, e.ArtifactReady):
                assert event.report.attempt_id in self.traces
                assert event.report.artifact_digest in self.artifacts


@given(
    events=st.sampled_from(HISTORIES),
    seed=st.integers(0, 1 << 16),
    sweeps=st.sets(st.integers(0, 2000), max_size=12),
)
def test_whenever_it_comes_a_sweep_takes_orphans_and_nothing_that_is_or_will_be_referenced(
    events: list[e.AnyEvent], seed: int, sweeps: set[int]
) -> None:
    model, state = BlobModel(events, seed), State()
    for number, event in enumerate(model.events):
        model.store_late(event)  # stored, not reported yet: the sweep may come in between
        if number in sweeps:
            model.sweep(model.events[:number], state, event.at_s)
        apply(state, event)
        model.store_early(event)
    model.sweep(model.events, state, state.at_s + 10 * MAX_UPLOAD_S)
    model.check(model.events)


def test_histories_have_orphans_to_be_taken_and_sweeps_while_attempts_are_live() -> None:
    num_deleted = num_live_sweeps = 0
    for events in HISTORIES:
        model, state = BlobModel(events, 0), State()
        for number, event in enumerate(model.events):
            model.store_late(event)
            if number % 10 == 0:
                model.sweep(model.events[:number], state, event.at_s)
                num_live_sweeps += bool(held_attempts(state))
            apply(state, event)
            model.store_early(event)
        num_deleted += model.num_deleted
    assert num_live_sweeps > 100
    assert num_deleted > 100


# --- on real stores -----------------------------------------------------------------------------------


async def fill(rig: RunRig, stores: Stores) -> dict[str, str]:
    """Attempts by what became of them. ``equal`` handed in the same artifact that ``failed`` had stored."""
    leases = await rig.coordinator.lease(WORKER, 4, 0.0)
    done, failed, equal, live = (lease.attempt_id for lease in leases)
    names = {"done": done, "failed": failed, "equal": equal, "live": live, "open": "att_open", "stranger": "att_other"}
    for attempt_id in names.values():
        stores.traces.append(make_turn(attempt_id, 0))
    for name in ("done", "failed", "equal", "live", "stranger"):
        await stores.traces.seal(names[name], EndReason.SUBMITTED, (), 0)
    for data in (b"of nobody", b"equal answers", f"artifact of {done}".encode(), f"artifact of {live}".encode()):
        await stores.artifacts.put(data)
    await rig.coordinator.artifact_ready(rig.seal(leases[0]))
    await rig.lose(leases[1])
    report = rig.seal(leases[2])
    rig.stores.artifacts[digest_bytes(b"equal answers")] = b"equal answers"
    await rig.coordinator.artifact_ready(replace(report, artifact_digest=digest_bytes(b"equal answers")))
    return names


@pytest.fixture(params=["run directory", "folder", "s3"])
def blobs(request: pytest.FixtureRequest, tmp_path: Path) -> BlobsConfig:
    """Where blobs are kept."""
    if request.param == "s3":
        server: S3Server = request.getfixturevalue("s3")
        return replace(server.settings(), url=f"s3://{request.getfixturevalue('bucket')}/run")
    return BlobsConfig(url=f"file://{tmp_path}/blobs") if request.param == "folder" else BlobsConfig()


async def stored_traces(stores: Stores) -> set[str]:
    if stores.objects is None:
        return set(stores.traces.sealed_attempts())
    return {info.key.removeprefix("traces/") for info in await stores.objects.list("traces/")}


def test_what_was_handed_in_stays_and_so_does_all_of_a_live_attempt(tmp_path: Path, blobs: BlobsConfig) -> None:
    directory = RunDirectory(tmp_path / "run")
    directory.make_folders()

    async def scene(rig: RunRig) -> None:
        stores = Stores.open(directory, lambda _: None, blobs)
        names = await fill(rig, stores)
        live = held_attempts(rig.coordinator.state)
        assert names["live"] in live

        async def sweep(live: frozenset[str], later_s: float) -> tuple[set[str], int]:
            swept = await sweep_blobs(
                rig.memory_journal, live, stores, now_s=time.time() + later_s, min_age_s=MAX_UPLOAD_S
            )
            return set(swept.attempt_ids), len(swept.artifact_digests)

        kept = {names["done"], names["equal"]}
        lost = {names["failed"], names["stranger"]}
        assert await sweep(live, 60.0) == ({*lost, "att_open"}, 0)
        assert await stored_traces(stores) == {*kept, names["live"]}
        assert len(await stores.artifacts.list()) == 4, "equal bytes may be on their way from the live attempt"
        await rig.coordinator.abandon("its worker is gone")
        assert await sweep(frozenset(), 60.0) == ({names["live"]}, 2)
        assert await stored_traces(stores) == kept
        assert {blob.digest for blob in await stores.artifacts.list()} == {
            digest_bytes(f"artifact of {names['done']}".encode()),
            digest_bytes(b"equal answers"),
        }
        assert stores.traces.open_attempts() == ()
        assert await sweep(frozenset(), 60.0) == (set(), 0)
        await stores.close()

    play(scene)


def test_what_another_process_may_just_have_put_is_left_for_the_next_sweep(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run")
    directory.make_folders()

    async def scene(rig: RunRig) -> None:
        stores = Stores.open(directory, lambda _: None, BlobsConfig(url=f"file://{tmp_path}/blobs"))
        assert stores.objects is not None
        await stores.artifacts.put(b"of nobody")
        await stores.objects.put("traces/att_other", b"")
        for later_s, num_left in ((0.0, 1), (120.0, 0)):
            await sweep_blobs(rig.memory_journal, frozenset(), stores, now_s=time.time() + later_s, min_age_s=60.0)
            assert len(await stores.artifacts.list()) == num_left
            assert len(await stored_traces(stores)) == num_left
        await stores.close()

    play(scene)


def test_a_place_of_another_run_is_never_swept(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run")
    directory.make_folders()
    other = MemoryJournal()
    begun = e.RunStarted(at_s=0.0, run_id="run_other", seed=0, config_digest="c0", rules=make_settings().rules)

    async def scene(rig: RunRig) -> None:
        stores = Stores.open(directory, lambda _: None, BlobsConfig(url=f"file://{tmp_path}/blobs"))
        await fill(rig, stores)
        await rig.coordinator.abandon("its worker is gone")
        await other.append([begun])
        now_s = time.time() + 60.0
        assert (await sweep_blobs(rig.memory_journal, frozenset(), stores, now_s=now_s, min_age_s=0.0)).attempt_ids
        kept = await stores.artifacts.list()
        with pytest.raises(InputError, match=r"must be a place of this run \(run_other\), got .* of run run_rig"):
            await sweep_blobs(other, frozenset(), stores, now_s=now_s, min_age_s=0.0)
        assert await stores.artifacts.list() == kept
        await stores.close()

    play(scene)


def test_before_a_run_has_begun_nothing_is_left_over(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    directory.make_folders()

    async def scenario() -> None:
        stores = Stores.open(directory, lambda _: None)
        await stores.artifacts.put(b"of nobody")
        journal = MemoryJournal()
        swept = await sweep_blobs(journal, frozenset(), stores, now_s=time.time() + 60.0, min_age_s=0.0)
        assert swept == ((), ())
        assert len(await stores.artifacts.list()) == 1
        await stores.close()

    asyncio.run(scenario())


def test_the_command_refuses_a_run_that_is_going_on_and_an_age_that_is_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = RunDirectory(tmp_path)
    directory.config.write_text("")
    with RunLock(directory):
        assert main(["sweep", str(tmp_path)]) == EXIT_BAD_INPUT
    assert "in use by another run" in capsys.readouterr().err
    for age in ("-1", "nan"):
        assert main(["sweep", str(tmp_path), "--min-age", age]) == EXIT_BAD_INPUT
        assert f"--min-age must be >= 0, got {float(age)}" in capsys.readouterr().err


def test_the_command_sweeps_a_run_whose_blobs_are_in_its_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = RunDirectory(tmp_path)
    directory.make_folders()
    directory.config.write_text("")

    async def scenario() -> set[str]:
        rig = await RunRig(journal=SqliteJournal(directory.journal)).start()
        stores = Stores.open(directory, lambda _: None)
        names = await fill(rig, stores)
        await rig.coordinator.abandon("its worker is gone")
        await rig.coordinator.close()
        await stores.close()
        return {names["done"], names["equal"]}

    kept = asyncio.run(scenario())
    assert main(["sweep", str(tmp_path)]) == EXIT_DONE
    assert main(["sweep", str(tmp_path), "--min-age", "0"]) == EXIT_DONE
    assert capsys.readouterr().out.splitlines() == [
        "deleted 4 traces and 0 artifacts",
        "deleted 0 traces and 2 artifacts",
    ]
    assert {path.name for path in (directory.traces / "sealed").iterdir()} == kept
