"""Simulated storage: what is written survives a kill, only what is synced survives a power cut.

The journal file is a list of frames, one a batch: length, checksum, records. A batch is there whole or not at all: a
torn frame at the end is cut off, a damaged one before the end is refused.
"""

import asyncio
import contextvars
import random
import struct
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Generic, TypeVar

import msgspec
import xxhash

from steelyard.coordinator.events import AnyEvent
from steelyard.coordinator.journal.base import (
    EMPTY_HEAD,
    KEPT_SNAPSHOTS,
    Head,
    JournalRecord,
    chain,
    checked_events,
    never_lost,
)
from steelyard.errors import IntegrityError, StorageFailed
from steelyard.testing.faultsim.loop import OWNER, VirtualLoop

_FRAME = struct.Struct("<IQ")  # bytes of the payload, xxh3-64 of the payload
_RECORDS = msgspec.msgpack.Decoder(tuple[JournalRecord, ...])

K = TypeVar("K")


class Disk:
    """What all files of one machine share: how long a sync takes and how often it fails, and the power.

    ``sync_fail_frac``: the fraction of syncs that fail. ``mean_sync_s``: exponential around this mean.
    """

    def __init__(self, loop: VirtualLoop, draw: random.Random) -> None:
        self.sync_fail_frac = 0.0
        self.mean_sync_s = 0.002
        self.draw = draw
        self._loop = loop
        self._losers: list[Callable[[], None]] = []
        self._num_power_cuts = 0
        self._outside = contextvars.copy_context()
        self._outside.run(OWNER.set, None)

    def on_power_cut(self, lose: Callable[[], None]) -> None:
        """Have ``lose`` called when the power goes."""
        self._losers.append(lose)

    def cut_power(self) -> None:
        """All files lose what was not synced; syncs under way fail."""
        self._num_power_cuts += 1
        for lose in self._losers:
            lose()

    async def sync(self, make_durable: Callable[[], None]) -> None:
        """Call ``make_durable`` after a while, even if whoever waits for it is killed meanwhile.

        Raises:
            StorageFailed: the disk refused.
        """
        done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        will_fail = self.draw.random() < self.sync_fail_frac
        power = self._num_power_cuts

        def finish() -> None:
            is_good = not will_fail and power == self._num_power_cuts
            if is_good:
                make_durable()
            if not done.done():
                done.set_result(is_good)

        self._loop.call_later(self.draw.expovariate(1.0 / self.mean_sync_s), finish, context=self._outside)
        if not await done:
            raise StorageFailed("the disk refused to sync")


class File:
    """One file that is appended to, and the snapshots beside it, each written whole."""

    def __init__(self, disk: Disk) -> None:
        self.durable = b""
        self.written = b""
        self.snapshots: dict[int, bytes] = {}
        self._disk = disk
        disk.on_power_cut(self._lose)

    def append(self, data: bytes) -> None:
        """Write at the end, into the page cache."""
        self.written += data

    def cut(self, num_bytes: int) -> None:
        """Shorten the file to ``num_bytes``."""
        self.written = self.written[:num_bytes]
        self.durable = self.durable[:num_bytes]

    async def sync(self) -> None:
        """Make durable what is written now.

        Raises:
            StorageFailed: the disk refused.
        """
        num_bytes = len(self.written)
        await self._disk.sync(lambda: self._keep(num_bytes))

    async def save_snapshot(self, number: int, data: bytes) -> None:
        """Keep a snapshot and the newest ones before it; at once and for good when this returns.

        Raises:
            StorageFailed: the disk refused; what was there before is there still.
        """

        def keep() -> None:
            kept = {**self.snapshots, number: data}
            self.snapshots = {n: kept[n] for n in sorted(kept)[-KEPT_SNAPSHOTS:]}

        await self._disk.sync(keep)

    def sync_now(self) -> None:
        """As ``sync``, blocking: no time passes.

        Raises:
            StorageFailed: the disk refused.
        """
        if self.durable != self.written and self._disk.draw.random() < self._disk.sync_fail_frac:
            raise StorageFailed("the disk refused to sync")
        self.durable = self.written

    def _keep(self, num_bytes: int) -> None:
        self.durable = self.written[: max(num_bytes, len(self.durable))]

    def _lose(self) -> None:
        """Of what was not synced, some of the beginning may have reached the disk."""
        unsynced = self.written[len(self.durable) :]
        self.durable += unsynced[: self._disk.draw.randint(0, len(unsynced))]
        self.written = self.durable


class DiskJournal:
    """A journal in one :class:`File`, to be opened anew by each life of the coordinator."""

    def __init__(self, file: File) -> None:
        self._file = file
        self._head = EMPTY_HEAD

    async def append(self, events: Sequence[AnyEvent]) -> None:
        """See :class:`steelyard.coordinator.journal.base.Journal`."""
        num_bytes, head = len(self._file.written), self._head
        self.write(events)
        try:
            await self._file.sync()
        except StorageFailed:
            self._file.cut(num_bytes)
            self._head = head
            raise

    def write(self, events: Sequence[AnyEvent]) -> None:
        """Write ``events`` as one batch into the page cache."""
        records, self._head = chain(self._head, events)
        self._file.append(encode_frame(records))

    async def replay(self) -> tuple[AnyEvent, ...]:
        """See :class:`steelyard.coordinator.journal.base.Journal`."""
        records, num_bytes = read_frames(self._file.written)
        self._file.cut(num_bytes)
        self._head = _head_of(records)
        return tuple(checked_events(records, self._head))

    async def replay_from(self, head: Head) -> AsyncIterator[Sequence[AnyEvent]]:
        """See :class:`steelyard.coordinator.journal.base.Journal`; the whole chain is checked each time."""
        yield (await self.replay())[head.number :]

    async def head_at(self, number: int) -> Head | None:
        """See :class:`steelyard.coordinator.journal.base.Journal`."""
        records, _ = read_frames(self._file.written)
        return _head_of(records[:number]) if number <= len(records) else None

    async def save_snapshot(self, number: int, data: bytes) -> None:
        """See :class:`steelyard.coordinator.journal.base.Journal`."""
        await self._file.save_snapshot(number, data)

    async def snapshots(self) -> tuple[int, ...]:
        """See :class:`steelyard.coordinator.journal.base.Journal`."""
        return tuple(sorted(self._file.snapshots, reverse=True))

    async def read_snapshot(self, number: int) -> bytes:
        """See :class:`steelyard.coordinator.journal.base.Journal`."""
        if number not in self._file.snapshots:
            raise IntegrityError(f"there must be a snapshot {number}, and is none")
        return self._file.snapshots[number]

    async def watch(self) -> None:
        """Nobody else can take it."""
        await never_lost()

    async def close(self) -> None:
        """Nothing to release."""


class DiskJournalReader:
    """Read access to the records of a journal file."""

    def __init__(self, file: File) -> None:
        self._records, _ = read_frames(file.written)

    def records(self) -> Sequence[JournalRecord]:
        return self._records

    def head(self) -> Head:
        return _head_of(self._records)


def _head_of(records: Sequence[JournalRecord]) -> Head:
    return Head(number=records[-1].number, digest=records[-1].digest) if records else EMPTY_HEAD


def encode_frame(records: Sequence[JournalRecord]) -> bytes:
    """One batch as it stands in the file."""
    payload = msgspec.msgpack.encode(records)
    return _FRAME.pack(len(payload), xxhash.xxh3_64_intdigest(payload)) + payload


def read_frames(data: bytes) -> tuple[list[JournalRecord], int]:
    """The records of all whole batches, and how many bytes those take.

    Raises:
        IntegrityError: a damaged batch that others follow.
    """
    records: list[JournalRecord] = []
    offset = 0
    while offset + _FRAME.size <= len(data):
        length, checksum = _FRAME.unpack_from(data, offset)
        end = offset + _FRAME.size + length
        payload = data[offset + _FRAME.size : end]
        if end > len(data):
            break
        if xxhash.xxh3_64_intdigest(payload) != checksum:
            raise IntegrityError(f"the journal is damaged at byte {offset}")
        records.extend(_RECORDS.decode(payload))
        offset = end
    return records, offset


class Blobs(Generic[K]):
    """Blobs by key, written whole. ``put`` returns when the blob is durable."""

    def __init__(self, disk: Disk) -> None:
        self.durable: dict[K, bytes] = {}
        self.written: dict[K, bytes] = {}
        self._disk = disk
        disk.on_power_cut(self._lose)

    async def put(self, key: K, data: bytes) -> None:
        """Store ``data`` under ``key``.

        Raises:
            StorageFailed: the disk refused; what was there before is there still.
        """
        await self._disk.sync(lambda: self._keep(key, data))

    def read(self, key: K) -> bytes:
        """What is stored.

        Raises:
            IntegrityError: nothing is.
        """
        if key not in self.written:
            raise IntegrityError(f"{key} must be stored, and is not")
        return self.written[key]

    def delete(self, key: K) -> None:
        """Forget ``key``, at once and for good. Idempotent."""
        self.durable.pop(key, None)
        self.written.pop(key, None)

    def put_carelessly(self, key: K, data: bytes) -> None:
        """Store into the page cache only: there to be read, and lost with the power."""
        self.written[key] = data

    def _keep(self, key: K, data: bytes) -> None:
        self.durable[key] = self.written[key] = data

    def _lose(self) -> None:
        self.written = dict(self.durable)
