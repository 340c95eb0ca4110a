"""The journal that a configuration names."""

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from steelyard import config_file
from steelyard.config import Config
from steelyard.coordinator.journal.base import Journal
from steelyard.errors import ConfigError, InputError, RunDirectoryError
from steelyard.run.directory import RunDirectory
from steelyard.run.journals import check_journal, open_journal, open_journal_reader, require_new_journal
from steelyard.run.launch import is_finished
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
