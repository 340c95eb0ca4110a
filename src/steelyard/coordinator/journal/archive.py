"""The archive of a journal: records that recovery needs no more, in compressed files beside it.

A segment holds a fixed number of records, the first one those from 1 on. It keeps the digest of the record before its
first and that of its last; the digests in between follow from the payloads. So a segment is held to the chain at both
ends, and ``audit`` reads an archived journal as it reads any other.
"""

import logging
import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from steelyard.coordinator.journal.base import (
    EMPTY_HEAD,
    FORMAT_VERSION,
    DamagedRecord,
    FaultPoint,
    Head,
    JournalRecord,
    check_format,
    link,
    no_fault,
)
from steelyard.digests import digest_bytes
from steelyard.durable import storage_errors, sweep_temporary, sync_directory
from steelyard.errors import IntegrityError
from steelyard.types import Record

logger = logging.getLogger(__name__)

ARCHIVE_FAULT_POINTS = (
    "archive.before_write",
    "archive.mid_write",
    "archive.before_rename",
    "archive.written",
    "archive.before_delete",
    "archive.mid_delete",
    "archive.deleted",
)
"""Called around the move of records into the archive; a process that dies at any of them loses none."""

SEGMENT_RECORDS = 16_384
"""Records in one segment: some megabytes as they stand, a tenth of that when compressed."""

_SUFFIX = ".segment"
_ENCODER = msgspec.msgpack.Encoder()
_PAYLOADS = msgspec.msgpack.Decoder(list[bytes])


class Segment(Record, frozen=True, kw_only=True):
    """One file. ``before``: the head before its first record. ``payloads``: zlib over msgpack; ``digest`` over all."""

    format_version: int
    before: Head
    last: Head
    payloads: bytes
    digest: str


class SegmentFile(NamedTuple):
    """A segment by its name: numbers of its first and last record."""

    first: int
    last: int
    path: Path


class ArchiveFiles:
    """The segments in one folder, which holds nothing else. One writer at a time; readers may look at any time.

    Args:
        folder: made when the first segment is written.
    """

    def __init__(self, folder: Path, fault_point: FaultPoint = no_fault) -> None:
        self._folder = folder
        self._fault_point = fault_point
        self._read_last: tuple[Path, list[JournalRecord]] | None = None

    def segments(self) -> list[SegmentFile]:
        """All segments, in order."""
        if not self._folder.is_dir():
            return []
        found = []
        for path in self._folder.iterdir():
            first, _, last = path.stem.partition("-")
            if path.suffix == _SUFFIX and first.isdecimal() and last.isdecimal():
                found.append(SegmentFile(int(first), int(last), path))
        return sorted(found)

    def end(self) -> Head:
        """Number and digest of the last archived record; ``EMPTY_HEAD`` where there is none.

        Raises:
            DamagedRecord: the last segment cannot be read.
        """
        segments = self.segments()
        return _load(segments[-1]).last if segments else EMPTY_HEAD

    def page_after(self, number: int) -> list[JournalRecord]:
        """The archived records above ``number``, up to the end of a segment; empty where there are none.

        Raises:
            DamagedRecord: the segment cannot be read; names its first record.
        """
        for segment in self.segments():
            if segment.last > number:
                return [record for record in self._records(segment) if record.number > number]
        return []

    def readable_page(self, after: int) -> list[JournalRecord]:
        """As ``page_after``, but a segment that cannot be read is left out, with a warning."""
        for segment in self.segments():
            try:
                if segment.last > after:
                    return self.page_after(max(after, segment.first - 1))
            except DamagedRecord as damage:
                logger.warning("%s", damage)
        return []

    def write(self, before: Head, records: Sequence[JournalRecord]) -> None:
        """Store a segment, wholly or not at all.

        Args:
            before: the head before the first of ``records``, which were checked against it.

        Raises:
            StorageFailed: the disk refused; nothing was stored.
        """
        self._fault_point("archive.before_write")
        last = Head(number=records[-1].number, digest=records[-1].digest)
        payloads = zlib.compress(_ENCODER.encode([record.payload for record in records]))
        digest = _digest(FORMAT_VERSION, before, last, payloads)
        segment = Segment(format_version=FORMAT_VERSION, before=before, last=last, payloads=payloads, digest=digest)
        final = self._folder / f"{records[0].number:012d}-{last.number:012d}{_SUFFIX}"
        temporary = self._folder / f".tmp-{final.name}"
        with storage_errors(str(final)):
            self._folder.mkdir(exist_ok=True)
            sync_directory(self._folder.parent)
            sweep_temporary(self._folder)
            self._write_file(temporary, _ENCODER.encode(segment))
            self._fault_point("archive.before_rename")
            temporary.replace(final)
            sync_directory(self._folder)
        self._fault_point("archive.written")

    def _write_file(self, path: Path, data: bytes) -> None:
        """In two halves, so that a test can die with one of them written."""
        middle = len(data) // 2
        with path.open("xb") as file:
            file.write(data[:middle])
            file.flush()
            self._fault_point("archive.mid_write")
            file.write(memoryview(data)[middle:])
            file.flush()
            os.fsync(file.fileno())

    def _records(self, segment: SegmentFile) -> list[JournalRecord]:
        """The records of a segment; those read last are remembered, since they are asked for in pages."""
        if self._read_last is None or self._read_last[0] != segment.path:
            self._read_last = (segment.path, _records(_load(segment)))
        return self._read_last[1]


def archive_folder(path: Path) -> Path:
    """Where the archive of the journal at ``path`` lies."""
    return path.with_name(f"{path.name}.archive")


def _load(file: SegmentFile) -> Segment:
    try:
        segment = msgspec.msgpack.decode(file.path.read_bytes(), type=Segment)
        check_format(segment.format_version, str(file.path))
    except (OSError, msgspec.MsgspecError, IntegrityError) as error:
        raise DamagedRecord(file.first, f"{file.path}: the segment cannot be read: {error}") from error
    expected = _digest(segment.format_version, segment.before, segment.last, segment.payloads)
    if segment.digest != expected:
        message = f"{file.path}: the segment must have digest {expected}, has {segment.digest}"
        raise DamagedRecord(file.first, message)
    return segment


def _records(segment: Segment) -> list[JournalRecord]:
    number, digest = segment.before.number, segment.before.digest
    records = []
    for payload in _PAYLOADS.decode(zlib.decompress(segment.payloads)):
        number += 1
        digest = link(digest, number, payload)
        records.append(JournalRecord(number=number, payload=payload, digest=digest))
    if records and digest != segment.last.digest:
        # What was stored, not what follows: whoever reads is to see that they differ.
        records[-1] = JournalRecord(number=number, payload=records[-1].payload, digest=segment.last.digest)
    return records


def _digest(format_version: int, before: Head, last: Head, payloads: bytes) -> str:
    return digest_bytes(_ENCODER.encode((format_version, before, last, digest_bytes(payloads))))
