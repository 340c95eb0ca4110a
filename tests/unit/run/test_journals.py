"""The journal that a configuration names."""

import asyncio
import contextlib
import sqlite3
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from steelyard import config_file
from steelyard.config import Config
from steelyard.coordinator import events as e
from steelyard.coordinator.entities import State
from steelyard.coordinator.journal.base import Head, Journal, JournalRecord, StateReader
from steelyard.coordinator.recovery import read_state
from steelyard.coordinator.snapshot import take
from steelyard.coordinator.state import apply
from steelyard.errors import ConfigError, InputError, IntegrityError, RunDirectoryError
from steelyard.run.directory import RunDirectory
from steelyard.run.journals import check_journal, open_journal, open_journal_reader, require_new_journal
from steelyard.run.launch import is_finished
from steelyard.testing.histories import History
from steelyard.testing.journals import events, replay, write
from steelyard.testing.postgres import PostgresServer


def config_of(**journal: Any) -> Config:
    return config_file.from_tree({"journal": journal})


@pytest.fixture(params=["sqlite", "postgres"])
def config(request: pytest.FixtureRequest) -> Config:
    if request.param == "sqlite":
        return config_of(kind="sqlite")
    server: PostgresServer = request.getfixturevalue("postgres")
    return config_of(kind="postgres", url=server.new_database(), name="run-1", lease_s=60)


def test_what_is_written_to_the_journal_is_what_its_reader_reads(config: Config, tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    asyncio.run(write(open_journal(config, directory), 3))
    assert asyncio.run(replay(open_journal(config, directory))) == tuple(events(0, 3))
    assert [record.number for record in open_journal_reader(config, directory).records()] == [1, 2, 3]
    assert not is_finished(config, directory)


def test_a_run_is_finished_where_its_last_event_says_so(config: Config, tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)

    async def run() -> None:
        journal = open_journal(config, directory)
        await journal.append(events(0, 3))
        await journal.append([e.RunFinished(at_s=9.0, reason="done")])
        await journal.close()

    asyncio.run(run())
    assert is_finished(config, directory)


class Watched:
    """A reader that notes from where on it was asked for records."""

    def __init__(self, reader: StateReader) -> None:
        self._reader = reader
        self.asked: list[int] = []
        self.head = reader.head
        self.snapshots = reader.snapshots
        self.read_snapshot = reader.read_snapshot
        self.records = reader.records

    def records_after(self, number: int) -> Iterable[JournalRecord]:
        self.asked.append(number)
        return self._reader.records_after(number)


def history() -> list[e.AnyEvent]:
    found: list[e.AnyEvent] = []
    run = History(found.append, groups_per_batch=2, group_size=3)
    run.start()
    for _ in range(3):
        run.step()
    return found


async def write_with_snapshots(journal: Journal, found: list[e.AnyEvent], spoilt: int) -> None:
    """The last ``spoilt`` of the two snapshots are damaged."""
    state = State()
    await journal.append(found)
    for number, event in enumerate(found, start=1):
        apply(state, event)
        if number in (20, 40):
            head = await journal.head_at(number)
            assert head is not None
            data = take(state, head)
            await journal.save_snapshot(number, data[:-1] if number > 40 - 20 * spoilt else data)
    await journal.close()


@pytest.mark.parametrize("spoilt", [0, 1, 2])
def test_how_things_stand_is_read_from_the_newest_good_snapshot_on(config: Config, tmp_path: Path, spoilt: int) -> None:
    directory, found = RunDirectory(tmp_path), history()
    assert len(found) > 60
    asyncio.run(write_with_snapshots(open_journal(config, directory), found, spoilt))
    reader = Watched(open_journal_reader(config, directory))
    state, expected = read_state(reader), State()
    for event in found:
        apply(expected, event)
    head = Head(number=len(found), digest="")
    assert take(state, head) == take(expected, head)
    start = 40 - 20 * spoilt
    assert reader.asked == ([start - 1, start] if start else [0])


def test_how_things_stand_is_not_told_of_a_journal_whose_end_is_missing(tmp_path: Path) -> None:
    config, directory = config_of(kind="sqlite"), RunDirectory(tmp_path)
    asyncio.run(write_with_snapshots(open_journal(config, directory), history(), 0))
    with contextlib.closing(sqlite3.connect(directory.journal)) as connection:
        connection.execute("delete from records where number > 50")
        connection.commit()
    with pytest.raises(IntegrityError, match=r"must end with record \d+, ends with 50"):
        read_state(open_journal_reader(config, directory))


def test_a_run_whose_journal_was_not_begun_is_not_finished(config: Config, tmp_path: Path) -> None:
    assert not is_finished(config, RunDirectory(tmp_path))


def test_the_fault_points_of_a_journal_are_those_of_its_run(config: Config, tmp_path: Path) -> None:
    passed: list[str] = []
    asyncio.run(write(open_journal(config, RunDirectory(tmp_path), passed.append), 1))
    assert "journal.before_commit" in passed


def test_a_new_run_may_not_go_on_with_the_journal_of_another(postgres: PostgresServer, tmp_path: Path) -> None:
    config = config_of(kind="postgres", url=postgres.new_database(), name="run-1")
    directory = RunDirectory(tmp_path)
    require_new_journal(config, directory)
    asyncio.run(write(open_journal(config, directory), 3))
    with pytest.raises(RunDirectoryError, match=r"must be new for a new run, got run-1, .* holds 3 events"):
        require_new_journal(config, directory)
    other = config_of(kind="postgres", url=config.journal.url, name="run-2")
    require_new_journal(other, directory)


def test_a_journal_in_memory_cannot_be_read_by_others(tmp_path: Path) -> None:
    config = config_of(kind="memory")
    journal: Journal = open_journal(config, RunDirectory(tmp_path))
    asyncio.run(write(journal, 1))
    with pytest.raises(InputError, match="must be sqlite or postgres for a run that is to be read, got memory"):
        open_journal_reader(config, RunDirectory(tmp_path))
    assert not is_finished(config, RunDirectory(tmp_path))


def test_a_missing_package_is_named_with_the_way_to_install_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)  # what the interpreter keeps for a module that cannot be found
    config = config_of(kind="postgres", url="postgresql:///runs", name="run-1")
    for refused in (check_journal, lambda c: open_journal(c, RunDirectory(tmp_path))):
        with pytest.raises(ConfigError, match=r"needs psycopg \(pip install 'steelyard\[postgres\]'\)"):
            refused(config)
    check_journal(config_of(kind="sqlite"))
