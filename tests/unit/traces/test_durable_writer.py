import asyncio
import os
import threading
from pathlib import Path

import pytest

from steelyard.errors import StorageFailed
from steelyard.traces.durable_writer import DurableWriter


def test_one_refused_file_does_not_fail_its_group(tmp_path: Path) -> None:
    async def scenario() -> list[object]:
        writer = DurableWriter(tmp_path / "tmp", "file")
        (tmp_path / "taken").mkdir()
        (tmp_path / "taken" / "entry").write_bytes(b"")
        outcomes = await asyncio.gather(
            writer.write(tmp_path / "first", b"1"),
            writer.write(tmp_path / "taken", b"2"),
            writer.write(tmp_path / "third", b"3"),
            return_exceptions=True,
        )
        await writer.close()
        return list(outcomes)

    first, second, third = asyncio.run(scenario())
    assert (first, third) == (None, None)
    assert isinstance(second, StorageFailed)
    assert "taken" in str(second)
    assert (tmp_path / "third").read_bytes() == b"3"


def test_writes_that_arrive_during_a_flush_form_one_group(tmp_path: Path) -> None:
    groups: list[int] = []

    async def scenario() -> None:
        writer = DurableWriter(tmp_path / "tmp", "file", before_group=lambda: groups.append(1))
        await asyncio.gather(*(writer.write(tmp_path / str(i), b"x") for i in range(20)))
        await writer.close()

    asyncio.run(scenario())
    assert len(groups) == 1


def test_a_bug_in_the_writer_fails_every_waiting_write_instead_of_hanging_them(tmp_path: Path) -> None:
    def broken() -> None:
        raise RuntimeError("a bug")

    async def scenario() -> None:
        writer = DurableWriter(tmp_path / "tmp", "file", before_group=broken)
        outcomes = await asyncio.gather(
            *(writer.write(tmp_path / str(i), b"x") for i in range(3)), return_exceptions=True
        )
        assert all(isinstance(outcome, StorageFailed) and "a bug" in str(outcome) for outcome in outcomes)
        await writer.close()

    asyncio.run(scenario())


def test_where_what_must_come_before_fails_no_file_has_its_name_and_the_next_group_goes_well(tmp_path: Path) -> None:
    outcomes: list[Exception | None] = [StorageFailed("the ledger's disk refused"), None]

    def before() -> None:
        outcome = outcomes.pop(0)
        if outcome is not None:
            raise outcome

    async def scenario() -> None:
        writer = DurableWriter(tmp_path / "tmp", "file", before_group=before)
        with pytest.raises(StorageFailed, match="the ledger's disk refused"):
            await writer.write(tmp_path / "a", b"x")
        assert [path.name for path in tmp_path.rglob("*")] == ["tmp"]
        await writer.write(tmp_path / "b", b"x")
        await writer.close()

    asyncio.run(scenario())
    assert (tmp_path / "b").read_bytes() == b"x"


def test_a_disk_that_does_not_answer_is_an_error_and_not_a_wait_for_ever(tmp_path: Path) -> None:
    answers = threading.Event()

    def hang() -> None:
        answers.wait(20)

    async def scenario() -> None:
        writer = DurableWriter(tmp_path / "tmp", "file", deadline_s=0.0, before_group=hang)
        with pytest.raises(StorageFailed, match=r"must take .*kept within 0 s"):
            await writer.write(tmp_path / "kept", b"x")
        with pytest.raises(StorageFailed, match="must answer file within 0 s"):
            await writer.call(lambda: None)
        answers.set()

    asyncio.run(scenario())


def test_a_cancelled_caller_does_not_stop_the_write(tmp_path: Path) -> None:
    async def scenario() -> None:
        writer = DurableWriter(tmp_path / "tmp", "file")
        impatient = asyncio.create_task(writer.write(tmp_path / "kept", b"x"))
        await asyncio.sleep(0)
        impatient.cancel()
        await asyncio.gather(impatient, return_exceptions=True)
        await writer.close()

    asyncio.run(scenario())
    assert (tmp_path / "kept").read_bytes() == b"x"


def test_what_another_process_may_be_writing_in_a_shared_folder_is_left_until_it_is_old(tmp_path: Path) -> None:
    for name, age_s in (("old", 120), ("young", 0)):
        (tmp_path / name).write_bytes(b"half")
        then_s = (tmp_path / name).stat().st_mtime - age_s
        os.utime(tmp_path / name, (then_s, then_s))
    DurableWriter(tmp_path, "file", spare_younger_s=60.0)
    assert [path.name for path in tmp_path.iterdir()] == ["young"]
    DurableWriter(tmp_path, "file")
    assert list(tmp_path.iterdir()) == []


def test_two_writers_of_one_folder_do_not_meet(tmp_path: Path) -> None:
    async def scenario() -> None:
        writers = [DurableWriter(tmp_path / "tmp", "file", spare_younger_s=60.0) for _ in range(2)]
        await asyncio.gather(
            *(
                writer.write(tmp_path / f"{n}-{i}", b"%d-%d" % (n, i))
                for i in range(20)
                for n, writer in enumerate(writers)
            )
        )
        for writer in writers:
            await writer.close()

    asyncio.run(scenario())
    files = [path for path in tmp_path.iterdir() if path.is_file()]
    assert len(files) == 40
    assert all(path.read_bytes().decode() == path.name for path in files)
