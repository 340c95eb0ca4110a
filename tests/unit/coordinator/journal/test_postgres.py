"""What is particular to the journal in a PostgreSQL database; what all kinds promise is in test_journal.py."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psycopg
import pytest

from steelyard.coordinator import events as e
from steelyard.coordinator.journal.base import EMPTY_HEAD, FORMAT_VERSION, DamagedRecord, Journal
from steelyard.coordinator.journal.postgres import PostgresJournal
from steelyard.coordinator.journal.postgres_database import PostgresPlace, connect_for_reading
from steelyard.coordinator.journal.postgres_reader import PostgresJournalReader, RecordsOfWriter
from steelyard.errors import ConfigError, IntegrityError, StorageFailed
from steelyard.testing.journals import PostgresStore, closing, events, replayed, write
from steelyard.testing.postgres import GUARDED, PASSWORD, FailingLine, PostgresServer, postgres_server

LOCK_ROW = b"select 1 from steelyard.journals for update"


def open_at(url: str) -> PostgresJournal:
    return PostgresJournal(PostgresPlace(url=url, name="run-1", deadline_s=30.0), owner="a test")


@contextlib.contextmanager
def row_held(store: PostgresStore) -> Iterator[None]:
    """Appends wait in the server until the block ends."""
    with psycopg.connect(store.url) as connection:
        connection.execute(LOCK_ROW)
        yield


async def begun(store: PostgresStore, journal: Journal, count: int, start: int) -> "asyncio.Task[None]":
    """An append that waits in the server for the row."""
    appending = asyncio.create_task(journal.append(events(start, count)))
    await until_row_is_wanted(store)
    return appending


async def until_row_is_wanted(store: PostgresStore) -> None:
    """The deadline is the test's."""
    async with await psycopg.AsyncConnection.connect(store.url, autocommit=True) as connection:
        while True:
            cursor = await connection.execute("select 1 from pg_stat_activity where wait_event_type = 'Lock'")
            if await cursor.fetchone() is not None:
                return


def test_journals_of_one_database_do_not_see_each_other(postgres_store: PostgresStore) -> None:
    async def run() -> None:
        url = postgres_store.url
        one = PostgresJournal(PostgresPlace(url=url, name="one"), owner="a")
        other = PostgresJournal(PostgresPlace(url=url, name="other"), owner="a")
        async with closing(one), closing(other):
            await one.append(events(0, 3))
            await other.append(events(7, 2))
            await one.append(events(3, 1))
            await one.save_snapshot(4, b"one")
            assert await one.replay() == tuple(events(0, 4))
            assert await other.replay() == tuple(events(7, 2))
            assert await other.snapshots() == ()
        assert len(list(PostgresJournalReader(PostgresPlace(url=url, name="one")).records())) == 4

    asyncio.run(run())


def test_a_journal_that_was_not_begun_is_empty_to_a_reader(postgres: PostgresServer) -> None:
    postgres_store = PostgresStore(postgres, own_database=True)
    for _ in range(2):
        assert postgres_store.reader().head().number == 0
        assert list(postgres_store.reader().records()) == []
        asyncio.run(write(PostgresJournal(PostgresPlace(url=postgres_store.url, name="other"), owner="a"), 1))


def test_many_coordinators_can_make_the_tables_at_once(postgres: PostgresServer) -> None:
    url = postgres.new_database()

    async def begin(name: str) -> None:
        place = PostgresPlace(url=url, name=name, deadline_s=30.0)
        await write(PostgresJournal(place, owner="a"), 1)

    async def run() -> None:
        await asyncio.gather(*(begin(f"run-{index}") for index in range(6)))

    asyncio.run(run())


def test_a_head_that_was_set_back_is_found(postgres_store: PostgresStore) -> None:
    asyncio.run(write(postgres_store.open(), 4))
    postgres_store.edit("update journals set head_number = 0, head_digest = ''")
    with pytest.raises(IntegrityError, match="must end with record 0, ends with 4"):
        replayed(postgres_store.open())


def test_a_database_that_went_back_to_an_older_state_is_refused_and_nothing_is_written(
    postgres_store: PostgresStore,
) -> None:
    """As after a failover to a replica that was behind."""

    async def run() -> None:
        async with closing(postgres_store.open()) as journal:
            await journal.append(events(0, 3))
            digest = [record.digest for record in postgres_store.reader().records()][1]
            postgres_store.edit(
                "delete from records where number = 3",
                f"update journals set head_number = 2, head_digest = '{digest}'",
            )
            with pytest.raises(IntegrityError, match=r"must end with record 3, .* ends with 2, .*older state"):
                await journal.append(events(3, 1))
            with pytest.raises(IntegrityError, match="older state"):
                await journal.append(events(3, 1))

    asyncio.run(run())
    postgres_store.end_lease()
    assert replayed(postgres_store.open()) == tuple(events(0, 2))


def test_a_format_of_the_future_is_refused_with_both_versions_named(postgres_store: PostgresStore) -> None:
    asyncio.run(write(postgres_store.open(), 2))
    postgres_store.edit("update journals set format_version = 7")
    message = f"must have format version {FORMAT_VERSION}, has 7"
    with pytest.raises(IntegrityError, match=message):
        asyncio.run(write(postgres_store.open(), 1))
    with pytest.raises(IntegrityError, match=message):
        postgres_store.reader().head()
    with pytest.raises(IntegrityError, match=message):
        list(postgres_store.reader().records())


def test_a_connection_that_the_server_ends_in_the_middle_of_an_append_fails_it_and_all_later_ones(
    postgres_store: PostgresStore,
) -> None:
    async def run() -> None:
        async with closing(postgres_store.open()) as journal:
            await journal.append(events(0, 2))
            watching = asyncio.create_task(journal.watch())
            with row_held(postgres_store):
                appending = await begun(postgres_store, journal, 5, 2)
                await end_backends(postgres_store)
                with pytest.raises(
                    StorageFailed,
                    match=r"5 events could not be written, or the answer was lost .*administrator command",
                ):
                    await appending
            with pytest.raises(StorageFailed, match="administrator command"):
                await watching
            with pytest.raises(StorageFailed, match="administrator command"):
                await journal.append(events(2, 5))

    asyncio.run(run())
    postgres_store.end_lease()
    assert replayed(postgres_store.open()) == tuple(events(0, 2))


async def end_backends(store: PostgresStore) -> None:
    """As an administrator does who wants the journal's connections gone."""
    async with await psycopg.AsyncConnection.connect(store.url, autocommit=True) as connection:
        await connection.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity where application_name = 'steelyard journal'"
        )


@contextlib.asynccontextmanager
async def failing_line(store: PostgresStore, tmp_path: Path) -> AsyncIterator[FailingLine]:
    line = FailingLine(store.server.socket, tmp_path)
    await line.start()
    try:
        yield line
    finally:
        await line.stop()


def test_a_commit_whose_answer_is_lost_fails_and_is_never_written_again(
    postgres_store: PostgresStore, tmp_path: Path
) -> None:
    async def run() -> None:
        async with failing_line(postgres_store, tmp_path) as line:
            place = postgres_store.place(postgres_store.server.url(postgres_store.database, socket_directory=tmp_path))
            async with closing(postgres_store.open(place=place)) as journal:
                await journal.append(events(0, 2))
                line.lose_answer()
                with pytest.raises(StorageFailed, match="3 events could not be written, or the answer was lost"):
                    await journal.append(events(2, 3))
                assert line.num_lost == 1
                assert postgres_store.reader().head().number == 5, "what was not acknowledged may be there"
                with pytest.raises(StorageFailed):
                    await journal.append(events(2, 3))

    asyncio.run(run())
    postgres_store.end_lease()
    assert replayed(postgres_store.open()) == tuple(events(0, 5))


def test_a_server_that_does_not_answer_any_more_is_given_up_at_a_deadline(
    postgres_store: PostgresStore, tmp_path: Path
) -> None:
    async def run() -> None:
        async with failing_line(postgres_store, tmp_path) as line:
            url = postgres_store.server.url(postgres_store.database, socket_directory=tmp_path)
            async with closing(postgres_store.open(place=postgres_store.place(url, deadline_s=1.0))) as journal:
                await journal.append(events(0, 2))
                line.go_mute()
                with pytest.raises(StorageFailed, match="no answer within 1 s"):
                    await journal.append(events(2, 3))
                assert "_write" not in {getattr(task.get_coro(), "__name__", "") for task in asyncio.all_tasks()}

    asyncio.run(run())
    postgres_store.end_lease()
    assert replayed(postgres_store.open()) in (tuple(events(0, 2)), tuple(events(0, 5)))


def test_a_writer_that_appends_nothing_ends_when_it_is_cut_off_from_its_database(
    postgres_store: PostgresStore, tmp_path: Path
) -> None:
    async def run() -> None:
        async with failing_line(postgres_store, tmp_path) as line:
            url = postgres_store.server.url(postgres_store.database, socket_directory=tmp_path)
            place = postgres_store.place(url)
            async with closing(postgres_store.open(place=place, lease_s=3.0)) as journal:
                await journal.append(events(0, 2))
                line.go_mute()
                with pytest.raises(StorageFailed, match="the lease could not be renewed, or the answer was lost"):
                    await journal.watch()

    asyncio.run(run())


def test_a_replay_gives_a_server_up_that_does_not_answer_any_more(
    postgres_store: PostgresStore, tmp_path: Path
) -> None:
    async def run() -> None:
        async with failing_line(postgres_store, tmp_path) as line, closing(postgres_store.open()) as journal:
            await journal.append(events(0, 2))
            url = postgres_store.server.url(postgres_store.database, socket_directory=tmp_path)
            place = postgres_store.place(url, deadline_s=1.0)
            records = await asyncio.to_thread(RecordsOfWriter.open, place, 1, 1, EMPTY_HEAD)
            line.go_mute()
            with pytest.raises(StorageFailed, match="no answer within 1 s"):
                await asyncio.to_thread(records.page, 0)
            records.close()

    asyncio.run(run())


def test_an_append_that_the_server_cannot_do_in_time_is_undone_and_said_to_be(postgres_store: PostgresStore) -> None:
    async def run() -> None:
        async with closing(postgres_store.open(place=postgres_store.place(deadline_s=1.0))) as journal:
            await journal.append(events(0, 2))
            with row_held(postgres_store):
                with pytest.raises(StorageFailed, match="3 events could not be written: canceling statement"):
                    await journal.append(events(2, 3))
                assert postgres_store.reader().head().number == 2
            await journal.append(events(2, 3))

    asyncio.run(run())
    assert replayed(postgres_store.open()) == tuple(events(0, 5))


def test_a_journal_that_is_closed_while_its_lease_is_being_renewed_gives_it_back(postgres_store: PostgresStore) -> None:
    async def run() -> None:
        journal = postgres_store.open(lease_s=6.0)
        await journal.append(events(0, 2))
        with row_held(postgres_store):
            await until_row_is_wanted(postgres_store)
            closing_it = asyncio.create_task(journal.close())
            await asyncio.sleep(0)
        await closing_it
        await write(postgres_store.open(wait_s=0.0), 1, start=2)

    asyncio.run(run())


def test_an_append_that_is_withdrawn_ends_the_writer(postgres_store: PostgresStore) -> None:
    async def run() -> None:
        async with closing(postgres_store.open()) as journal:
            await journal.append(events(0, 2))
            with row_held(postgres_store):
                appending = await begun(postgres_store, journal, 3, 2)
                appending.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await appending
                with pytest.raises(StorageFailed, match="nobody waited for the answer"):
                    await journal.append(events(2, 3))

    asyncio.run(run())


def test_a_crash_of_the_server_loses_nothing_that_was_acknowledged(tmp_path: Path, postgres: PostgresServer) -> None:
    with postgres_server() as server:
        store = PostgresStore(server)

        async def run() -> None:
            async with closing(store.open()) as journal:
                await journal.append(events(0, 300))
                watching = asyncio.create_task(journal.watch())
                server.kill()
                with pytest.raises(StorageFailed):
                    await journal.append(events(300, 1))
                with pytest.raises(StorageFailed):
                    await watching

        asyncio.run(run())
        server.start()
        store.end_lease()
        assert replayed(store.open()) == tuple(events(0, 300))


def test_a_page_that_the_server_cannot_read_is_refused_in_the_middle_and_at_the_end() -> None:
    with postgres_server() as server:
        stores = {place: PostgresStore(server, own_database=True) for place in ("middle", "end")}
        for store in stores.values():
            asyncio.run(write(store.open(), 2000))
        files = {
            place: server.data / store.ask("select pg_relation_filepath('steelyard.records')")
            for place, store in stores.items()
        }
        server.stop()
        for place, path in files.items():
            spoil_page(path, at_end=place == "end")
        server.start()
        with pytest.raises(IntegrityError, match=r"journal record \d+ cannot be read: .*so it is refused"):
            replayed(stores["middle"].open())
        with pytest.raises(IntegrityError, match=r"is damaged behind record 19\d\d and cannot be cut off there"):
            replayed(stores["end"].open())
        for store in stores.values():
            with pytest.raises(DamagedRecord):
                list(store.reader().records())


def spoil_page(path: Path, *, at_end: bool) -> None:
    """Garble one page of 8 KiB, as a bad disk does."""
    data = bytearray(path.read_bytes())
    num_pages = len(data) // 8192
    at = 8192 * (num_pages - 1 if at_end else num_pages // 2)
    data[at + 100 : at + 8000] = random.Random(0).randbytes(7900)
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("database", "message"),
    [
        ("absent", 'the database of journal.url cannot be reached: .*database "absent" does not exist'),
        (GUARDED, "the database of journal.url cannot be reached: .*no password supplied"),
    ],
)
def test_a_database_that_cannot_be_opened_is_a_storage_failure(
    postgres: PostgresServer, database: str, message: str
) -> None:
    url = postgres.url(database)
    with pytest.raises(StorageFailed, match=message):
        replayed(open_at(url))
    with pytest.raises(StorageFailed, match=message):
        PostgresJournalReader(PostgresPlace(url=url, name="run-1")).head()


def test_a_server_that_is_not_there_is_a_storage_failure(tmp_path: Path) -> None:
    url = f"postgresql://steelyard@/postgres?host={tmp_path}"
    with pytest.raises(StorageFailed, match=r"cannot be reached: .*No such file"):
        replayed(open_at(url))
    with pytest.raises(StorageFailed, match=r"cannot be reached: .*No such file"):
        list(PostgresJournalReader(PostgresPlace(url=url, name="run-1")).records())


def test_the_password_comes_from_a_password_file_and_a_wrong_one_is_told_without_showing_it(
    postgres: PostgresServer, tmp_path: Path
) -> None:
    passfile = tmp_path / "passfile"
    passfile.touch(mode=0o600)
    url = f"{postgres.url(GUARDED)}&passfile={passfile}"
    passfile.write_text("*:*:*:*:letmein\n")
    with pytest.raises(StorageFailed, match="password authentication failed") as caught:
        replayed(open_at(url))
    assert "letmein" not in str(caught.value)
    passfile.write_text(f"*:*:*:*:{PASSWORD}\n")
    asyncio.run(write(open_at(url), 2))
    assert replayed(open_at(url)) == tuple(events(0, 2))


def test_a_place_is_shown_without_its_url() -> None:
    assert "opensesame" not in repr(PostgresPlace(url="postgresql://me:opensesame@host/runs", name="run-1"))


def test_a_url_that_is_none_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match=r"journal\.url must be a connection URL of libpq"):
        replayed(open_at("postgresql://host:5432:5433/runs?nonsense=1"))


def test_a_database_of_another_encoding_is_refused(postgres: PostgresServer) -> None:
    postgres.run("postgres", "create database latin encoding 'LATIN1' template template0")
    with pytest.raises(ConfigError, match="must name a database with the encoding UTF8, got LATIN1"):
        replayed(open_at(postgres.url("latin")))


def test_a_server_that_does_not_sync_is_refused(postgres: PostgresServer) -> None:
    url = postgres.shared_database()
    with (
        postgres.option("fsync", "off"),
        pytest.raises(ConfigError, match="must name a server with fsync = on, got off"),
    ):
        replayed(open_at(url))


def test_commits_are_durable_where_the_default_of_the_database_is_that_they_are_not(postgres: PostgresServer) -> None:
    store = PostgresStore(postgres, own_database=True)
    postgres.run("postgres", f"alter database {store.database} set synchronous_commit = off")

    async def run() -> None:
        async with closing(store.open()) as journal:
            assert isinstance(journal, PostgresJournal)
            await journal.append(events(0, 1))
            assert await shown(journal, "synchronous_commit") == "on"
            assert await shown(journal, "transaction_isolation") == "read committed"

    asyncio.run(run())


async def shown(journal: PostgresJournal, setting: str) -> str:
    """A setting of the writer's own session."""
    writer = await journal._open()

    async def ask(connection: "psycopg.AsyncConnection[tuple[str]]") -> str:
        row = await (await connection.execute("select current_setting(%s)", (setting,))).fetchone()
        assert row is not None
        return row[0]

    return await writer.ask(ask, "a setting could not be read")


def test_a_database_that_is_set_to_be_read_only_is_left_so(postgres: PostgresServer) -> None:
    store = PostgresStore(postgres, own_database=True)
    asyncio.run(write(store.open(), 3))
    postgres.run(store.database, f"alter database {store.database} set default_transaction_read_only = on")
    with pytest.raises(StorageFailed, match="read-only transaction"):
        asyncio.run(write(store.open(), 1))


def test_a_full_disk_is_a_storage_failure_and_leaves_what_was_there(
    postgres: PostgresServer, postgres_store: PostgresStore
) -> None:
    big = [e.Running(at_s=float(n), attempt_id=random.Random(n).randbytes(500_000).hex()) for n in range(12)]

    async def run() -> int:
        num_written = 0
        async with closing(postgres_store.open()) as journal:
            with pytest.raises(StorageFailed, match=r"1 events could not be written: .*[Ff]ile too large"):
                for event in big * 4:
                    await journal.append([event])
                    num_written += 1
        return num_written

    with postgres.full_disk(17 << 20):  # the server's own log takes files of 16 MiB
        num_written = asyncio.run(run())
    assert num_written > 0
    assert replayed(postgres_store.open()) == tuple((big * 4)[:num_written])


@pytest.mark.parametrize("rights", ["select", "select, insert, update, delete"])
def test_a_role_that_owns_nothing_can_read_and_write_with_the_rights_that_the_docs_name(
    postgres: PostgresServer, rights: str
) -> None:
    store = PostgresStore(postgres, own_database=True)
    asyncio.run(write(store.open(), 3))
    role = f"guest_of_{store.database}"
    postgres.run(
        store.database,
        f"create role {role} login",
        f"grant usage on schema steelyard to {role}",
        f"grant {rights} on all tables in schema steelyard to {role}",
    )
    guest = store.place(store.url.replace("//steelyard@", f"//{role}@"))
    assert len(list(PostgresJournalReader(guest).records())) == 3
    if rights == "select":
        with pytest.raises(StorageFailed, match="permission denied"):
            asyncio.run(write(store.open(place=guest), 1, start=3))
    else:
        asyncio.run(write(store.open(place=guest), 1, start=3))
        other = PostgresPlace(url=guest.url, name="another", deadline_s=30.0)
        asyncio.run(write(store.open(place=other), 1))


def test_a_reader_cannot_write(postgres_store: PostgresStore) -> None:
    asyncio.run(write(postgres_store.open(), 1))
    with (
        connect_for_reading(postgres_store.place()) as connection,
        pytest.raises(psycopg.errors.ReadOnlySqlTransaction),
    ):
        connection.execute("delete from steelyard.records")
