"""The writer of a PostgreSQL journal: the lease under which one process at a time may append, and its one connection.

Whoever takes the lease raises the journal's epoch by one, and every write names the epoch that it was taken at, in the
same statement as what it writes. So safety rests on no clock: a writer that was paused, cut off or given up can come
back at any time, and writes nothing. The time of the lease, which is the database's, only says when a standby may take
it; so a clock that jumps can cost a takeover, never an event.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, LiteralString, TypeVar

import msgspec
import psycopg

from steelyard.coordinator.journal.base import FORMAT_VERSION, Head, check_format
from steelyard.coordinator.journal.postgres_database import (
    OUR_DEADLINE,
    AsyncConnection,
    PostgresPlace,
    answered,
    connect,
    make_tables,
    one_line,
    storage_failures,
)
from steelyard.errors import DeadlineExceeded, IntegrityError, JournalFenced, SteelyardError, StorageFailed
from steelyard.types import Record

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

_RENEWALS = 3
"""A lease is renewed so often in its time: one renewal may be late and the next still in time."""
_LOOKS = 10
"""A standby looks so often in the time of a lease, and at least once a second, whether it was given back early."""
_MIN_PAUSE_S, _MAX_PAUSE_S = 0.01, 1.0

_LEASE_END: LiteralString = "clock_timestamp() + make_interval(secs => %(lease_s)s)"
_ENTER: LiteralString = (
    "insert into steelyard.journals (name, format_version) values (%s, %s) on conflict (name) do nothing"
)
_LOOK: LiteralString = """select format_version, owner,
    (extract(epoch from expires_at) - extract(epoch from clock_timestamp()))::float8
    from steelyard.journals where name = %s"""
_TAKE: LiteralString = f"""update steelyard.journals
    set epoch = epoch + 1, owner = %(owner)s, expires_at = {_LEASE_END}
    where name = %(name)s and expires_at <= clock_timestamp()
    returning id, epoch, head_number, head_digest"""
_RENEW: LiteralString = f"""update steelyard.journals set expires_at = {_LEASE_END}
    where id = %(id)s and epoch = %(epoch)s"""
_RELEASE: LiteralString = (
    "update steelyard.journals set expires_at = clock_timestamp() where id = %(id)s and epoch = %(epoch)s"
)
_CHECK: LiteralString = "select epoch, owner, head_number, head_digest from steelyard.journals where id = %s"


class Writer:
    """Holds the lease of a journal and the connection that writes; made by :func:`take_over`.

    *Waits for* the server, with a deadline for each question. *Produces* its answers; once the lease or the connection
    is lost, nothing but that error, also to those who wait in :meth:`lost`. A background task renews the lease.

    Args:
        connection: its owner from now on.
        journal_id, epoch, head: what the lease was taken at.
    """

    def __init__(
        self,
        place: PostgresPlace,
        connection: AsyncConnection,
        *,
        journal_id: int,
        epoch: int,
        head: Head,
        lease_s: float,
    ) -> None:
        self.journal_id = journal_id
        self.epoch = epoch
        self.head = head
        self.lease_s = lease_s
        self._place = place
        self._connection = connection
        self._turn = asyncio.Lock()
        self._failure: SteelyardError | None = None
        self._is_lost = asyncio.Event()
        self._is_closing = asyncio.Event()
        self._renewing = asyncio.create_task(self._renew(), name="journal-lease")

    async def ask(
        self,
        question: Callable[[AsyncConnection], Coroutine[Any, Any, _T]],
        what: str,
        *,
        deadline_s: float | None = None,
    ) -> _T:
        """Put a question to the server when it is its turn; one at a time.

        Args:
            question: asks on the connection that it is given.
            what: for the message of an error, what could not be done.
            deadline_s: for the answer; None is that of the place.

        Raises:
            StorageFailed: the server refused; or the connection was lost, and so is the writer.
            JournalFenced, IntegrityError: raised by ``question``; the writer is lost.
        """
        async with self._turn:
            if self._failure is not None:
                raise self._failure
            try:
                asking = question(self._connection)
                return await answered(self._connection, asking, deadline_s or self._place.deadline_s)
            except psycopg.Error as error:
                if not self._connection.closed:
                    raise StorageFailed(f"{self._place.label}: {what}: {one_line(error)}") from error
                maybe = f"{what}, or the answer was lost with the connection"
                failure = StorageFailed(f"{self._place.label}: {maybe}: {one_line(error)}")
                self._lose(failure)
                raise failure from error
            except (JournalFenced, IntegrityError) as error:
                self._lose(error)
                raise
            except asyncio.CancelledError:
                self._lose(StorageFailed(f"{self._place.label}: {what}: nobody waited for the answer"))
                raise

    async def lost(self) -> None:
        """Wait until the writer is lost, then raise why."""
        await self._is_lost.wait()
        if self._failure is not None:
            raise self._failure

    async def why_refused(self, connection: AsyncConnection) -> SteelyardError:
        """Why the journal's row is not the one that this writer knows.

        Raises:
            psycopg.Error: the server does not say.
        """
        cursor = await connection.execute(_CHECK, (self.journal_id,))
        row = await cursor.fetchone()
        label = self._place.label
        if row is None:
            return IntegrityError(f"{label} was deleted from the database while it was written")
        epoch, owner, number, digest = row
        if epoch != self.epoch:
            return JournalFenced(
                f"{label} was taken over by {owner} at epoch {epoch}; this writer has epoch {self.epoch} and must end"
            )
        return IntegrityError(
            f"{label} must end with record {self.head.number}, digest {self.head.digest}, ends with {number}, digest "
            f"{digest}: the database went back to an older state, or somebody else has written"
        )

    async def close(self) -> None:
        """Give the lease back, where it is still ours, and close the connection."""
        self._is_closing.set()
        # Not cancelled: a renewal under way would take the connection with it. It has a deadline.
        await asyncio.gather(self._renewing, return_exceptions=True)
        try:
            values = {"id": self.journal_id, "epoch": self.epoch}
            await self.ask(lambda connection: connection.execute(_RELEASE, values), "the lease was not given back")
        except SteelyardError as error:
            logger.info("%s", error)
        await self._connection.close()
        self._lose(StorageFailed(f"{self._place.label} is closed"))

    async def _renew(self) -> None:
        values = {"id": self.journal_id, "epoch": self.epoch, "lease_s": self.lease_s}

        async def renew(connection: AsyncConnection) -> None:
            cursor = await connection.execute(_RENEW, values)
            if cursor.rowcount != 1:
                raise await self.why_refused(connection)

        pause_s = self.lease_s / _RENEWALS
        # Without an answer the writer is lost before its lease can be another's: while nothing is appended, it would
        # go on to tell what it knows. While something is, all that it tells waits for that.
        deadline_s = min(self._place.deadline_s, (self.lease_s - pause_s) / OUR_DEADLINE)
        while not await self._closes_within(pause_s):
            try:
                await self.ask(renew, "the lease could not be renewed", deadline_s=deadline_s)
            except SteelyardError as error:
                self._lose(error)
                return

    async def _closes_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._is_closing.wait()
        except TimeoutError:
            return False
        return True

    def _lose(self, failure: SteelyardError) -> None:
        if self._failure is None:
            self._failure = failure
            self._is_lost.set()


async def take_over(place: PostgresPlace, *, owner: str, lease_s: float, wait_s: float) -> Writer:
    """Take the lease of a journal, at once where it is free, else when it ends; a journal that is new is made.

    While it waits, the server may go and come back.

    Args:
        owner: who takes it, for people.
        lease_s: for so long the journal is ours after each renewal.
        wait_s: for so long we wait for another owner.

    Raises:
        ConfigError: the server is not fit.
        IntegrityError: the journal is of another format.
        StorageFailed: the server cannot be reached at first, or refuses.
        DeadlineExceeded: another owner still holds it after ``wait_s``; names that owner.
    """
    loop = asyncio.get_running_loop()
    # Whoever has no answer for the time of the lease may have lost it.
    place = msgspec.structs.replace(place, deadline_s=min(place.deadline_s, lease_s))
    began_s, held = loop.time(), None
    while True:
        try:
            taken = await _try_to_take(place, owner=owner, lease_s=lease_s)
        except StorageFailed as error:
            if held is None:
                raise
            logger.warning("%s", error)
            taken = held
        if isinstance(taken, Writer):
            logger.info("%s is ours at epoch %d, up to record %d", place.label, taken.epoch, taken.head.number)
            return taken
        if held is None or held.owner != taken.owner:
            logger.info("%s is held by %s for another %.1f s; waiting", place.label, taken.owner, taken.left_s)
        held = taken
        waited_s = loop.time() - began_s
        if waited_s >= wait_s:
            raise DeadlineExceeded(f"the lease of {place.label} to end", (held.owner,), waited_s)
        pause_s = min(held.left_s, lease_s / _LOOKS, _MAX_PAUSE_S, wait_s - waited_s)
        await asyncio.sleep(max(pause_s, _MIN_PAUSE_S))


class _Taken(Record, frozen=True, kw_only=True):
    """The lease as it was taken."""

    journal_id: int
    epoch: int
    head: Head


class _Held(Record, frozen=True, kw_only=True):
    """Somebody else's lease."""

    owner: str
    left_s: float


async def _try_to_take(place: PostgresPlace, *, owner: str, lease_s: float) -> Writer | _Held:
    connection = await connect(place)
    try:
        with storage_failures(f"{place.label}: the lease could not be taken"):
            taken = await answered(connection, _take(connection, place, owner, lease_s), place.deadline_s)
    except BaseException:
        await connection.close()
        raise
    if isinstance(taken, _Held):
        await connection.close()
        return taken
    return Writer(place, connection, journal_id=taken.journal_id, epoch=taken.epoch, head=taken.head, lease_s=lease_s)


async def _take(connection: AsyncConnection, place: PostgresPlace, owner: str, lease_s: float) -> _Taken | _Held:
    await make_tables(connection)
    held = await _look(connection, place)
    if held is None:
        await connection.execute(_ENTER, (place.name, FORMAT_VERSION))
    elif held.left_s > 0:
        return held
    cursor = await connection.execute(_TAKE, {"name": place.name, "owner": owner, "lease_s": lease_s})
    row = await cursor.fetchone()
    if row is not None:
        journal_id, epoch, number, digest = row
        return _Taken(journal_id=journal_id, epoch=epoch, head=Head(number=number, digest=digest))
    held = await _look(connection, place)  # another standby was faster
    if held is None:
        raise StorageFailed(f"{place.label} was deleted from the database while it was opened")
    return held


async def _look(connection: AsyncConnection, place: PostgresPlace) -> _Held | None:
    """Who has the lease, or had it last; None for a journal that is new.

    Raises:
        IntegrityError: the journal is of another format.
    """
    cursor = await connection.execute(_LOOK, (place.name,))
    row = await cursor.fetchone()
    if row is None:
        return None
    format_version, owner, left_s = row
    check_format(format_version, place.label)
    return _Held(owner=owner, left_s=max(left_s, 0.0))
