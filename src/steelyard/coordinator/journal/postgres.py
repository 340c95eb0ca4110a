"""A journal in a PostgreSQL database: for a coordinator whose place a standby on another machine can take.

One statement, which is a transaction of its own, appends a group of events: it checks the writer's epoch and the
journal's head and moves the head, which locks the journal's row, and inserts the records. So a writer that stops in
the middle holds no lock, an old writer and a new one are put in an order by that lock, and a group needs one round
trip. See :mod:`steelyard.coordinator.journal.postgres_writer` for lease and epoch.

Snapshots are rows too, for a standby must be able to read them. They are written on a connection of their own.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import LiteralString

import psycopg

from steelyard.coordinator.events import AnyEvent
from steelyard.coordinator.journal.base import (
    EMPTY_HEAD,
    KEPT_SNAPSHOTS,
    FaultPoint,
    Head,
    JournalRecord,
    chain,
    no_fault,
    pass_events,
)
from steelyard.coordinator.journal.postgres_database import (
    AsyncConnection,
    PostgresPlace,
    answered,
    connect,
    is_damage,
    storage_failures,
)
from steelyard.coordinator.journal.postgres_reader import RecordsOfWriter
from steelyard.coordinator.journal.postgres_writer import Writer, take_over
from steelyard.coordinator.journal.replaying import Replay
from steelyard.errors import IntegrityError, StorageFailed

_PART_BYTES = 4 << 20
_WAIT_LEASES = 1.5
"""A dead owner's lease ends within its time, so whoever has waited this much longer waits for a live one."""

# JSON holds no raw line end and a digest none either, so a group travels as two texts, which costs little to pack.
_APPEND: LiteralString = r"""with held as (
        update steelyard.journals set
            head_number = %(new_number)s, head_digest = %(new_digest)s,
            expires_at = clock_timestamp() + make_interval(secs => %(lease_s)s)
        where id = %(id)s and epoch = %(epoch)s and head_number = %(number)s and head_digest = %(digest)s
        returning id
    )
    insert into steelyard.records (journal_id, number, payload, digest)
    select held.id, %(number)s::bigint + line.place, line.payload, line.digest
    from held, unnest(string_to_array(%(payloads)s, E'\n'), string_to_array(%(digests)s, E'\n'))
        with ordinality as line (payload, digest, place)"""
_DIGEST: LiteralString = "select digest from steelyard.records where journal_id = %s and number = %s"
_SNAPSHOTS: LiteralString = "select distinct number from steelyard.snapshots where journal_id = %s order by number desc"
_READ_PART: LiteralString = "select data from steelyard.snapshots where journal_id = %s and number = %s and part = %s"
_IS_OURS: LiteralString = "select 1 from steelyard.journals where id = %s and epoch = %s"
_DROP_SNAPSHOT: LiteralString = "delete from steelyard.snapshots where journal_id = %s and number = %s"
_WRITE_PART: LiteralString = "insert into steelyard.snapshots values (%s, %s, %s, %b)"
_DROP_OLD: LiteralString = """delete from steelyard.snapshots where journal_id = %(id)s and number not in (
    select distinct number from steelyard.snapshots where journal_id = %(id)s order by number desc limit %(kept)s)"""


class PostgresJournal:
    """The journal ``place.name`` of a database. The first call takes its lease, and waits for it.

    The fault points ``journal.mid_append`` and ``journal.before_commit`` come both before the one statement that
    writes; there is nothing between them that a death could leave half done.

    Args:
        owner: who writes, for people: a host and a process, say.
        lease_s: how long after the last renewal a standby may take over.
        wait_s: how long to wait for another owner's lease to end; None waits long enough for a dead one's.

    Every call can raise the errors of :func:`~steelyard.coordinator.journal.postgres_writer.take_over`; and
    ``JournalFenced`` or ``StorageFailed`` once the lease or the connection is lost, for good.
    """

    def __init__(
        self,
        place: PostgresPlace,
        *,
        owner: str,
        lease_s: float = 10.0,
        wait_s: float | None = None,
        fault_point: FaultPoint = no_fault,
    ) -> None:
        self._place = place
        self._owner = owner
        self._lease_s = lease_s
        self._wait_s = _WAIT_LEASES * lease_s if wait_s is None else wait_s
        self._fault_point = fault_point
        self._opening = asyncio.Lock()
        self._writer: Writer | None = None
        self._is_closed = False

    async def append(self, events: Sequence[AnyEvent]) -> None:
        writer = await self._open()
        self._fault_point("journal.before_append")
        pass_events(self._fault_point, events, "before")
        records, head = chain(writer.head, events)
        self._fault_point("journal.mid_append")
        self._fault_point("journal.before_commit")
        if records:
            what = f"{len(records)} events could not be written"
            await writer.ask(lambda connection: self._write(connection, writer, records, head), what)
        self._fault_point("journal.after_commit")
        pass_events(self._fault_point, events, "after")

    async def replay(self) -> tuple[AnyEvent, ...]:
        return tuple([event async for page in self.replay_from(EMPTY_HEAD) for event in page])

    async def replay_from(self, head: Head) -> AsyncIterator[Sequence[AnyEvent]]:
        writer = await self._open()
        records = await asyncio.to_thread(
            RecordsOfWriter.open, self._place, writer.journal_id, writer.epoch, writer.head
        )
        try:
            replay = Replay(records, head)
            while page := await asyncio.to_thread(replay.next_page):
                yield page
        finally:
            writer.head = records.head()
            records.close()

    async def head_at(self, number: int) -> Head | None:
        writer = await self._open()
        if number == 0:
            return EMPTY_HEAD

        async def read(connection: AsyncConnection) -> Head | None:
            try:
                cursor = await connection.execute(_DIGEST, (writer.journal_id, number))
            except psycopg.Error as error:
                if is_damage(error):
                    return None
                raise
            row = await cursor.fetchone()
            return None if row is None else Head(number=number, digest=row[0])

        return await writer.ask(read, f"record {number} could not be read")

    async def save_snapshot(self, number: int, data: bytes) -> None:
        writer = await self._open()
        self._fault_point("snapshot.before_write")
        parts = [data[at : at + _PART_BYTES] for at in range(0, max(len(data), 1), _PART_BYTES)]
        connection = await connect(self._place)
        try:
            with storage_failures(f"{self._place.label}: snapshot {number} could not be written"):
                writing = self._write_snapshot(connection, writer, number, parts)
                # Each of its statements has the server's deadline.
                await answered(connection, writing, self._place.deadline_s * (len(parts) + 4))
        finally:
            await connection.close()
        self._fault_point("snapshot.written")

    async def snapshots(self) -> tuple[int, ...]:
        writer = await self._open()

        async def read(connection: AsyncConnection) -> tuple[int, ...]:
            cursor = await connection.execute(_SNAPSHOTS, (writer.journal_id,))
            return tuple(row[0] for row in await cursor.fetchall())

        return await writer.ask(read, "the snapshots could not be listed")

    async def read_snapshot(self, number: int) -> bytes:
        writer = await self._open()
        parts: list[bytes] = []

        async def read_next(connection: AsyncConnection) -> bytes | None:
            async with connection.cursor(binary=True) as cursor:
                await cursor.execute(_READ_PART, (writer.journal_id, number, len(parts)))
                row = await cursor.fetchone()
                return None if row is None else bytes(row[0])

        try:
            while (part := await writer.ask(read_next, f"snapshot {number} could not be read")) is not None:
                parts.append(part)
        except StorageFailed as error:
            if isinstance(error.__cause__, psycopg.Error) and is_damage(error.__cause__):
                raise IntegrityError(f"{self._place.label}: snapshot {number} cannot be read: {error}") from error
            raise
        if not parts:
            raise IntegrityError(f"{self._place.label}: there is no snapshot {number}")
        return b"".join(parts)

    async def watch(self) -> None:
        writer = await self._open()
        await writer.lost()

    async def close(self) -> None:
        self._is_closed = True
        writer, self._writer = self._writer, None
        if writer is not None:
            await writer.close()

    async def _open(self) -> Writer:
        async with self._opening:
            self._require_open()
            if self._writer is None:
                self._writer = await take_over(
                    self._place, owner=self._owner, lease_s=self._lease_s, wait_s=self._wait_s
                )
                if self._is_closed:  # while it waited
                    await self.close()
                self._require_open()
            return self._writer

    def _require_open(self) -> None:
        if self._is_closed:
            raise StorageFailed(f"{self._place.label} is closed")

    async def _write(
        self, connection: AsyncConnection, writer: Writer, records: Sequence[JournalRecord], head: Head
    ) -> None:
        values = {
            "id": writer.journal_id,
            "epoch": writer.epoch,
            "lease_s": writer.lease_s,
            "number": writer.head.number,
            "digest": writer.head.digest,
            "new_number": head.number,
            "new_digest": head.digest,
            "payloads": b"\n".join([record.payload for record in records]).decode(),
            "digests": "\n".join([record.digest for record in records]),
        }
        cursor = await connection.execute(_APPEND, values, prepare=True)
        if cursor.rowcount != len(records):
            raise await writer.why_refused(connection)
        writer.head = head

    async def _write_snapshot(
        self, connection: AsyncConnection, writer: Writer, number: int, parts: Sequence[bytes]
    ) -> None:
        async with connection.transaction():
            # No lock is held on it meanwhile, which appends would wait for. What an old writer still writes here is
            # a true snapshot of records that it has appended, and nobody believes it against them.
            if await (await connection.execute(_IS_OURS, (writer.journal_id, writer.epoch))).fetchone() is None:
                raise await writer.why_refused(connection)
            await connection.execute(_DROP_SNAPSHOT, (writer.journal_id, number))
            for index, part in enumerate(parts):
                if index == len(parts) // 2:
                    self._fault_point("snapshot.mid_write")
                await connection.execute(_WRITE_PART, (writer.journal_id, number, index, part))
            await connection.execute(_DROP_OLD, {"id": writer.journal_id, "kept": KEPT_SNAPSHOTS})
            self._fault_point("snapshot.before_rename")
