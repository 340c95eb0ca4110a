"""The database of PostgreSQL journals: its tables, and connections that answer within a deadline or end.

All journals of a database share three tables in the schema ``steelyard`` and are told apart by a number. An operator
can read them while runs go on::

    psql "$URL" -c "select name, owner, epoch, expires_at, head_number from steelyard.journals"

A question to the server has two deadlines: one of the server, after which the statement is undone for certain; and a
later one of ours, after which the socket is shut, for a server that does not even say so. Then whether a write was
done is not known.
"""

import asyncio
import contextlib
import math
import socket
import threading
from collections.abc import Coroutine, Iterator
from typing import Any, LiteralString, TypeVar

import psycopg
from psycopg.rows import TupleRow

from steelyard.errors import ConfigError, StorageFailed
from steelyard.types import Record

Connection = psycopg.Connection[TupleRow]
AsyncConnection = psycopg.AsyncConnection[TupleRow]
_T = TypeVar("_T")

OUR_DEADLINE = 1.25
"""Our deadline is so many times the server's, so that its answer comes first where it can."""
_END_S = 1.0
"""A connection whose socket is shut ends its question at once; nobody waits for that longer than this."""
_TABLES_LOCK = 0x737465656C79
"""Number of the advisory lock under which the tables are made: ``create if not exists`` alone can collide."""

_TABLES: tuple[LiteralString, ...] = (
    "create schema if not exists steelyard",
    # The row is written anew by each commit; a page with room keeps that from growing the table.
    """create table if not exists steelyard.journals (
        id integer generated always as identity primary key,
        name text not null unique,
        format_version integer not null,
        head_number bigint not null default 0,
        head_digest text not null default '',
        epoch bigint not null default 0,
        owner text not null default '',
        expires_at timestamptz not null default 'epoch'
    ) with (fillfactor = 20)""",
    """create table if not exists steelyard.records (
        journal_id integer not null,
        number bigint not null,
        payload text not null,
        digest text not null,
        primary key (journal_id, number)
    )""",
    """create table if not exists steelyard.snapshots (
        journal_id integer not null,
        number bigint not null,
        part integer not null,
        data bytea not null,
        primary key (journal_id, number, part)
    )""",
    # They are packed already.
    "alter table steelyard.snapshots alter column data set storage external",
)

_SETTINGS: LiteralString = """select
    set_config('statement_timeout', %(timeout)s, false),
    set_config('lock_timeout', %(timeout)s, false),
    set_config('idle_in_transaction_session_timeout', %(timeout)s, false),
    set_config('default_transaction_isolation', 'read committed', false),
    set_config('default_transaction_read_only',
        coalesce(%(read_only)s::text, current_setting('default_transaction_read_only')), false),
    set_config('synchronous_commit', case current_setting('synchronous_commit')
        when 'remote_apply' then 'remote_apply' else 'on' end, false),
    current_setting('fsync'), current_setting('server_encoding')"""


class PostgresPlace(Record, frozen=True, kw_only=True):
    """Where a journal is.

    ``url`` is libpq's connection URL. ``name`` tells the journals of a database apart. ``deadline_s`` is how long the
    server may take for one answer.
    """

    url: str
    name: str
    deadline_s: float = 30.0

    def __repr__(self) -> str:
        # A URL can hold a password.
        return f"PostgresPlace(name={self.name!r})"

    @property
    def label(self) -> str:
        """For messages."""
        return f"journal {self.name}"


async def connect(place: PostgresPlace) -> AsyncConnection:
    """A connection for writing; its commits return when they are durable.

    Raises:
        ConfigError: the URL is none, or the server does not keep what it has committed.
        StorageFailed: the server cannot be reached, or refuses.
    """
    with _connecting(place):
        async with asyncio.timeout(place.deadline_s):
            connection = await psycopg.AsyncConnection.connect(place.url, autocommit=True, **_parameters(place))
    try:
        with storage_failures(place.label):
            asking = connection.execute(_SETTINGS, _settings(place, is_read_only=False))
            cursor = await answered(connection, asking, place.deadline_s)
            _check_server(await cursor.fetchone())
    except BaseException:
        await connection.close()
        raise
    return connection


def connect_for_reading(place: PostgresPlace) -> Connection:
    """A blocking connection that can change nothing.

    Raises:
        ConfigError: the URL is none, or the server does not keep what it has committed.
        StorageFailed: the server cannot be reached, or refuses.
    """
    return _connect_blocking(place, is_read_only=True)


def connect_for_mending(place: PostgresPlace) -> Connection:
    """A blocking connection that can write; raises as ``connect_for_reading``."""
    return _connect_blocking(place, is_read_only=False)


def _connect_blocking(place: PostgresPlace, *, is_read_only: bool) -> Connection:
    with _connecting(place):
        connection = psycopg.connect(place.url, autocommit=True, **_parameters(place))
    try:
        with storage_failures(place.label), answering(connection, place.deadline_s):
            _check_server(connection.execute(_SETTINGS, _settings(place, is_read_only=is_read_only)).fetchone())
    except BaseException:
        connection.close()
        raise
    return connection


def _parameters(place: PostgresPlace) -> dict[str, Any]:
    seconds = max(2, math.ceil(place.deadline_s))  # libpq takes less than 2 for 2
    return {"connect_timeout": seconds, "client_encoding": "utf8", "application_name": "steelyard journal"}


def _settings(place: PostgresPlace, *, is_read_only: bool) -> dict[str, str | None]:
    milliseconds = max(1, math.ceil(1000 * place.deadline_s))
    return {"timeout": f"{milliseconds}ms", "read_only": "on" if is_read_only else None}


def _check_server(row: TupleRow | None) -> None:
    *_, fsync, encoding = row or ("", "")
    if fsync != "on":
        raise ConfigError(f"journal.url must name a server with fsync = on, got {fsync}: what it commits can be lost")
    if encoding != "UTF8":
        raise ConfigError(f"journal.url must name a database with the encoding UTF8, got {encoding}")


@contextlib.contextmanager
def _connecting(place: PostgresPlace) -> Iterator[None]:
    try:
        yield
    except psycopg.ProgrammingError as error:
        raise ConfigError(f"journal.url must be a connection URL of libpq, got one with a fault: {error}") from None
    except (psycopg.Error, TimeoutError) as error:
        why = one_line(error) or f"no answer within {place.deadline_s:g} s"
        raise StorageFailed(f"{place.label}: the database of journal.url cannot be reached: {why}") from error


async def make_tables(connection: AsyncConnection) -> None:
    """Make the tables where they are missing.

    Raises:
        psycopg.Error: the server refuses.
    """
    cursor = await connection.execute("select to_regclass('steelyard.snapshots') is not null")
    row = await cursor.fetchone()
    if row is not None and row[0]:
        return  # whoever writes here needs no right to make tables
    async with connection.transaction():
        await connection.execute("select pg_advisory_xact_lock(%s)", (_TABLES_LOCK,))
        for statement in _TABLES:
            await connection.execute(statement)


@contextlib.contextmanager
def storage_failures(what: str) -> Iterator[None]:
    """Turn a refusal of the server into one error.

    Raises:
        StorageFailed: the block raised an error of psycopg.
    """
    try:
        yield
    except psycopg.Error as error:
        raise StorageFailed(f"{what}: {one_line(error)}") from error


def one_line(error: BaseException) -> str:
    """What an error says, on one line."""
    return " ".join(str(error).split())


def is_damage(error: psycopg.Error) -> bool:
    """Whether the server says that what it has stored is damaged.

    Codes: https://www.postgresql.org/docs/current/errcodes-appendix.html, class XX.
    """
    return (error.sqlstate or "").startswith("XX")


async def answered(connection: AsyncConnection, asking: Coroutine[Any, Any, _T], deadline_s: float) -> _T:
    """What ``asking`` returns on ``connection``; hangs up where there is no answer, or nobody waits for it any more.

    psycopg's own cancellation asks the server and waits for it without end, so it is not used.

    Raises:
        psycopg.Error: the server refuses, the connection was lost, or there was no answer in time.
    """
    task = asyncio.create_task(asking)
    is_late = False
    try:
        _, late = await asyncio.wait({task}, timeout=deadline_s * OUR_DEADLINE)
        is_late = bool(late)
    finally:
        if not task.done():
            hang_up(connection)
            await asyncio.wait({task}, timeout=_END_S)
            await connection.close()
        if task.done() and not task.cancelled():
            task.exception()  # where we were cancelled, nobody else asks for it
    if is_late:
        raise psycopg.OperationalError(f"no answer within {deadline_s:g} s")
    return task.result()


@contextlib.contextmanager
def answering(connection: Connection, deadline_s: float) -> Iterator[None]:
    """The same for a blocking connection: hangs up where the block has no answer in time.

    Raises:
        psycopg.OperationalError: there was none.
    """
    is_late = threading.Event()

    def give_up() -> None:
        is_late.set()
        hang_up(connection)

    timer = threading.Timer(deadline_s * OUR_DEADLINE, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    except psycopg.OperationalError as error:
        if is_late.is_set():
            raise psycopg.OperationalError(f"no answer within {deadline_s:g} s") from error
        raise
    finally:
        timer.cancel()


def hang_up(connection: Connection | AsyncConnection) -> None:
    """Shut the connection's socket, which ends whatever waits for it, in any thread or task."""
    with contextlib.suppress(psycopg.Error, OSError), socket.socket(fileno=socket.dup(connection.fileno())) as doomed:
        doomed.shutdown(socket.SHUT_RDWR)
