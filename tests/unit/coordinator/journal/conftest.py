"""One fixture for every kind of journal."""

from pathlib import Path

import pytest

from steelyard.testing.journals import JournalStore, MemoryStore, PostgresStore, SqliteStore
from steelyard.testing.postgres import PostgresServer


@pytest.fixture
def postgres_store(postgres: PostgresServer) -> PostgresStore:
    return PostgresStore(postgres)


@pytest.fixture(params=["memory", "sqlite", "postgres"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> JournalStore:
    return make_store(request, tmp_path)


@pytest.fixture(params=["sqlite", "postgres"])
def sql_store(request: pytest.FixtureRequest, tmp_path: Path) -> JournalStore:
    return make_store(request, tmp_path)


def make_store(request: pytest.FixtureRequest, tmp_path: Path) -> JournalStore:
    if request.param == "memory":
        return MemoryStore()
    if request.param == "sqlite":
        return SqliteStore(tmp_path / "journal.sqlite")
    return PostgresStore(request.getfixturevalue("postgres"))
