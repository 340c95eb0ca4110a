import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.digests import digest_bytes
from steelyard.errors import IntegrityError, Refused, StorageFailed
from steelyard.testing.traces import make_turn
from steelyard.traces.durable_writer import WRITE_POINTS
from steelyard.traces.local_objects import LocalObjects
from steelyard.traces.open_traces import encode_frame, outline_of, read_frames
from steelyard.traces.store import TraceStore, read_archived, tokens_by_version
from steelyard.types import EndReason, ToolRecord, Trace, VersionSpan

TOOLS = (ToolRecord(tool_call_id="call_1", turn_index=0, name="submit", outcome="ok", latency_s=0.01),)


def test_a_sealed_trace_holds_the_turns_as_appended_and_its_digest_is_over_its_bytes(tmp_path: Path) -> None:
    turns = tuple(make_turn("att_a", index) for index in range(3))

    async def scenario() -> None:
        store = TraceStore(tmp_path)
        for turn in turns:
            store.append(turn)
        sealed = await store.seal("att_a", EndReason.SUBMITTED, TOOLS, 4)
        trace, digest = await store.read("att_a")
        assert trace == Trace(attempt_id="att_a", turns=turns, end_reason=EndReason.SUBMITTED, tools=TOOLS)
        assert digest == sealed.digest == digest_bytes(msgspec.msgpack.encode(trace))
        assert (sealed.num_turns, sealed.num_tokens) == (3, sum(len(turn.token_ids) for turn in turns))
        assert (store.open_attempts(), store.sealed_attempts()) == ((), ("att_a",))
        await store.close()

    asyncio.run(scenario())


def test_versions_of_a_sealed_trace_are_weighted_by_tokens(tmp_path: Path) -> None:
    spans = (VersionSpan(start=0, version=4), VersionSpan(start=3, version=6))
    turn = msgspec.structs.replace(make_turn("att_a", 0, num_tokens=4), version_spans=spans)
    assert tokens_by_version(outline_of(turn)) == ((4, 3), (6, 1))

    async def scenario() -> None:
        store = TraceStore(tmp_path)
        store.append(turn)
        sealed = await store.seal("att_a", EndReason.SUBMITTED, (), 9)
        assert (sealed.oldest_version, sealed.newest_version, sealed.mean_version) == (4, 6, 4.5)
        await store.close()

    asyncio.run(scenario())


def test_an_attempt_that_sampled_nothing_is_sealed_at_its_bound_version(tmp_path: Path) -> None:
    async def scenario() -> None:
        store = TraceStore(tmp_path)
        sealed = await store.seal("att_a", EndReason.CONTEXT_FULL, (), 7)
        assert (sealed.num_turns, sealed.num_tokens, sealed.num_segments) == (0, 0, 0)
        assert (sealed.oldest_version, sealed.newest_version, sealed.mean_version) == (7, 7, 7.0)
        await store.close()

    asyncio.run(scenario())


def test_sealing_again_gives_the_same_answer_and_another_ending_is_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        store = TraceStore(tmp_path)
        store.append(make_turn("att_a", 0))
        sealed = await store.seal("att_a", EndReason.SUBMITTED, (), 0)
        assert await store.seal("att_a", EndReason.SUBMITTED, (), 0) == sealed
        with pytest.raises(Refused, match="sealed as submitted"):
            await store.seal("att_a", EndReason.LENGTH, (), 0)
        await store.close()

    asyncio.run(scenario())


def test_a_missing_turn_stops_the_sealing(tmp_path: Path) -> None:
    async def scenario() -> None:
        store = TraceStore(tmp_path)
        store.append(make_turn("att_a", 0))
        store.append(make_turn("att_a", 2))
        with pytest.raises(IntegrityError, match=r"turns 0\.\.1, but holds \[0, 2\]"):
            await store.seal("att_a", EndReason.SUBMITTED, (), 0)
        await store.close()

    asyncio.run(scenario())


TURNS = tuple(make_turn("att_a", index) for index in range(3))
FRAMES = tuple(encode_frame(turn) for turn in TURNS)


@given(cut=st.integers(min_value=1, max_value=len(FRAMES[-1])))
def test_a_torn_tail_loses_the_last_turn_and_no_other(cut: int) -> None:
    data = b"".join(FRAMES)
    assert read_frames(Path("open"), data[: len(data) - cut]) == TURNS[:2]


@given(position=st.integers(min_value=0, max_value=sum(map(len, FRAMES)) - 1), flip=st.integers(1, 255))
def test_a_damaged_byte_never_yields_another_turn(position: int, flip: int) -> None:
    data = bytearray(b"".join(FRAMES))
    data[position] ^= flip
    try:
        found = read_frames(Path("open"), bytes(data))
    except IntegrityError:
        return
    assert len(found) < len(TURNS)
    assert found == TURNS[: len(found)]


def test_a_frame_that_is_damaged_before_the_last_one_is_an_error(tmp_path: Path) -> None:
    data = bytearray(b"".join(FRAMES))
    data[len(FRAMES[0]) + 20] ^= 1
    with pytest.raises(IntegrityError, match=f"byte {len(FRAMES[0])}"):
        read_frames(tmp_path, bytes(data))


def test_a_retracted_turn_is_gone_and_the_next_takes_its_place(tmp_path: Path) -> None:
    store = TraceStore(tmp_path)
    assert store.append(TURNS[0]) == 0
    store.retract("att_a", store.append(TURNS[1]))
    assert store.open_turns("att_a") == TURNS[:1]
    store.append(TURNS[1])
    assert store.open_turns("att_a") == TURNS[:2]


def test_reading_what_was_never_sealed_names_the_attempt(tmp_path: Path) -> None:
    with pytest.raises(IntegrityError, match="att_a must have a sealed trace"):
        TraceStore(tmp_path).read_now("att_a")


@pytest.mark.parametrize("attempt_id", ["../att", "", ".hidden", "a/b"])
def test_an_attempt_id_never_leaves_the_directory(tmp_path: Path, attempt_id: str) -> None:
    with pytest.raises(IntegrityError, match="attempt id"):
        TraceStore(tmp_path).open_turns(attempt_id)


def sealed_store(directory: Path, *attempts: str) -> TraceStore:
    store = TraceStore(directory)

    async def scenario() -> None:
        for attempt in attempts:
            store.append(make_turn(attempt, 0))
            await store.seal(attempt, EndReason.SUBMITTED, (), 0)

    asyncio.run(scenario())
    return store


def test_a_changed_byte_of_a_sealed_trace_is_named(tmp_path: Path) -> None:
    store = sealed_store(tmp_path, "att_a")
    path = tmp_path / "sealed" / "att_a"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(IntegrityError, match="trace att_a must have digest"):
        store.read_now("att_a")


def test_a_trace_under_another_attempts_name_is_refused(tmp_path: Path) -> None:
    store = sealed_store(tmp_path, "att_a", "att_b")
    (tmp_path / "sealed" / "att_a").rename(tmp_path / "sealed" / "att_b")
    with pytest.raises(IntegrityError, match=r"att_b must hold that attempt only, but holds \['att_a'\]"):
        store.read_now("att_b")


def test_the_sweep_touches_only_old_files_of_attempts_that_nobody_refers_to(tmp_path: Path) -> None:
    store = sealed_store(tmp_path, "att_kept", "att_old", "att_young")
    store.append(make_turn("att_dead", 0))
    for name in ("sealed/att_kept", "sealed/att_old", "open/att_dead"):
        os.utime(tmp_path / name, (100.0, 100.0))
    now_s = (tmp_path / "sealed" / "att_young").stat().st_mtime
    assert asyncio.run(store.sweep({"att_kept"}, 60.0, now_s)) == ("att_dead", "att_old")
    assert (store.sealed_attempts(), store.open_attempts()) == (("att_kept", "att_young"), ())


class VanishingAttempts(set[str]):
    """Nobody refers to any attempt, and the file that is asked about is gone before it can be looked at."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def __contains__(self, name: object) -> bool:
        (self._folder / str(name)).unlink()
        return False


def test_the_sweep_passes_over_a_file_that_goes_away_meanwhile(tmp_path: Path) -> None:
    store = sealed_store(tmp_path, "att_gone")
    assert asyncio.run(store.sweep(VanishingAttempts(tmp_path / "sealed"), 0.0, 1e12)) == ()
    assert store.sealed_attempts() == ()


def test_a_full_disk_leaves_the_open_trace_to_be_sealed_later(tmp_path: Path) -> None:
    is_full = True

    def disk(reached: str) -> None:
        if is_full and reached == "trace:fsynced":
            raise OSError(28, "No space left on device")

    async def scenario() -> None:
        nonlocal is_full
        store = TraceStore(tmp_path, disk)
        store.append(TURNS[0])
        with pytest.raises(StorageFailed, match="No space left"):
            await store.seal("att_a", EndReason.SUBMITTED, (), 0)
        assert store.open_turns("att_a") == TURNS[:1]
        is_full = False
        assert (await store.seal("att_a", EndReason.SUBMITTED, (), 0)).num_turns == 1
        await store.close()

    asyncio.run(scenario())


_KILLED = """
import asyncio, os, signal, sys
from pathlib import Path
from steelyard.testing.traces import make_turn
from steelyard.traces.durable_writer import WRITE_POINTS
from steelyard.traces.store import TraceStore
from steelyard.types import EndReason

def die(reached):
    if reached == sys.argv[2] and (reached != "trace:appended" or len(store.open_turns("att_a")) == 3):
        os.kill(os.getpid(), signal.SIGKILL)

async def main():
    for index in range(3):
        store.append(make_turn("att_a", index))
    await store.seal("att_a", EndReason.SUBMITTED, (), 0)

store = TraceStore(Path(sys.argv[1]), die)
asyncio.run(main())
"""


@pytest.mark.parametrize("point", ["appended", *WRITE_POINTS])
def test_a_kill_at_any_point_loses_no_appended_turn(tmp_path: Path, point: str) -> None:
    command = [sys.executable, "-c", _KILLED, str(tmp_path), f"trace:{point}"]
    assert subprocess.run(command, check=False, timeout=60).returncode == -signal.SIGKILL

    async def scenario() -> None:
        store = TraceStore(tmp_path)
        assert store.is_sealed("att_a") == (point == "renamed")
        assert store.open_turns("att_a") == TURNS, "the open trace goes only after the sealed one is durable"
        sealed = await store.seal("att_a", EndReason.SUBMITTED, (), 0)
        trace, digest = await store.read("att_a")
        assert (trace.turns, digest) == (TURNS, sealed.digest)
        assert store.open_attempts() == ()
        await store.close()

    asyncio.run(scenario())


# --- with an archive ----------------------------------------------------------------------------------


class Archive(LocalObjects):
    """An archive that can be out of reach."""

    is_away = False

    async def put(self, key: str, data: bytes) -> None:
        if self.is_away:
            raise StorageFailed(f"cannot write s3://bucket/{key}: as planned")
        await super().put(key, data)


def play_archived(
    tmp_path: Path,
    scene: Callable[[TraceStore, Archive], Awaitable[None]],
    before_seal: Callable[[], None] | None = None,
) -> None:
    async def scenario() -> None:
        archive = Archive(tmp_path / "archive")
        store = TraceStore(tmp_path / "traces", before_seal=before_seal, archive=archive)
        await scene(store, archive)
        await store.close()
        await archive.close()

    asyncio.run(scenario())


def test_a_sealed_trace_is_in_the_archive_before_anyone_hears_of_it(tmp_path: Path) -> None:
    async def scene(store: TraceStore, archive: Archive) -> None:
        store.append(TURNS[0])
        sealed = await store.seal("att_a", EndReason.SUBMITTED, (), 0)
        assert [info.key for info in await archive.list()] == ["traces/att_a"]
        assert (await read_archived(archive, "att_a"))[1] == sealed.digest
        assert store.is_sealed("att_a"), "this process knows what it has sealed"
        await store.forget("att_a")
        assert not store.is_sealed("att_a")
        assert await store.read("att_a") == await read_archived(archive, "att_a")

    play_archived(tmp_path, scene)


def test_where_the_archive_fails_the_open_trace_stays_and_sealing_again_mends_it(tmp_path: Path) -> None:
    async def scene(store: TraceStore, archive: Archive) -> None:
        store.append(TURNS[0])
        archive.is_away = True
        with pytest.raises(StorageFailed, match="s3://bucket/traces/att_a"):
            await store.seal("att_a", EndReason.SUBMITTED, (), 0)
        assert store.open_turns("att_a") == TURNS[:1]
        assert await archive.list() == ()
        archive.is_away = False
        sealed = await store.seal("att_a", EndReason.SUBMITTED, (), 0)
        assert store.open_attempts() == ()
        trace, digest = await read_archived(archive, "att_a")
        assert (trace.turns, digest) == (TURNS[:1], sealed.digest)
        archive.is_away = True
        with pytest.raises(StorageFailed):
            await store.seal("att_a", EndReason.SUBMITTED, (), 0)  # whether it is there is the archive's word alone

    play_archived(tmp_path, scene)


def test_a_trace_that_is_forgotten_while_it_is_being_read_is_read_from_the_archive(tmp_path: Path) -> None:
    entered, gate = threading.Event(), threading.Event()
    gate.set()

    def disk_waits() -> None:
        entered.set()
        gate.wait(20)

    async def scene(store: TraceStore, archive: Archive) -> None:
        store.append(TURNS[0])
        sealed = await store.seal("att_a", EndReason.SUBMITTED, (), 0)
        gate.clear()
        entered.clear()
        other = asyncio.create_task(store.seal("att_b", EndReason.SUBMITTED, (), 0))
        await asyncio.to_thread(entered.wait, 20)
        forgetting = asyncio.create_task(store.forget("att_a"))
        reading = asyncio.create_task(store.read("att_a"))
        asyncio.get_running_loop().call_soon(gate.set)  # behind the first steps of both
        assert (await reading)[1] == sealed.digest
        await forgetting
        await other

    play_archived(tmp_path, scene, disk_waits)


def test_without_an_archive_nothing_is_forgotten(tmp_path: Path) -> None:
    store = sealed_store(tmp_path, "att_a")
    asyncio.run(store.forget("att_a"))
    assert store.is_sealed("att_a")


@pytest.mark.parametrize("attempt_id", ["../att", "", ".hidden", "a/b"])
def test_an_attempt_id_never_leaves_the_archive(tmp_path: Path, attempt_id: str) -> None:
    async def scene(store: TraceStore, archive: Archive) -> None:
        with pytest.raises(IntegrityError, match="attempt id"):
            await read_archived(archive, attempt_id)

    play_archived(tmp_path, scene)
