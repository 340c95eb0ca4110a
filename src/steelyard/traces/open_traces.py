"""Open traces: the frames of recorded turns, appended to one file an attempt; they survive a kill of the process.

A frame is the length and the xxh3-64 of its payload, then the payload: the msgpack bytes of a Turn.
"""

import os
import resource
import struct
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
import xxhash

from steelyard.errors import IntegrityError
from steelyard.traces.durable_writer import storage_failed
from steelyard.traces.ledger import append_whole
from steelyard.traces.sealed import check_attempt_id, trace_path
from steelyard.types import Turn, VersionSpan

_FRAME = struct.Struct("<IQ")
_MAX_DESCRIPTORS = 4096
_TURN_ENCODER = msgspec.msgpack.Encoder()
_TURN_DECODER = msgspec.msgpack.Decoder(Turn)


class TurnOutline(msgspec.Struct, frozen=True, kw_only=True):
    """What sealing must know of a turn, without its prompt and its log-probabilities."""

    attempt_id: str
    turn_index: int
    segment_index: int
    token_ids: tuple[int, ...]
    version_spans: tuple[VersionSpan, ...]


_OUTLINE_DECODER = msgspec.msgpack.Decoder(TurnOutline)


class OpenTraces:
    """The open traces in one directory, which this process alone writes.

    The files that were written last stay open.

    Args:
        max_open_files: by default a quarter of what the process may open, at most 4096.
    """

    def __init__(self, directory: Path, max_open_files: int | None = None) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._descriptors: OrderedDict[str, int] = OrderedDict()
        allowed = min(_MAX_DESCRIPTORS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)
        self._max_descriptors = max(1, allowed if max_open_files is None else max_open_files)

    def append(self, turn: Turn) -> int:
        """Append one turn; returns the size in bytes before, for ``retract``.

        Raises:
            StorageFailed: the disk refused; the open trace is as before.
        """
        descriptor = self._descriptor(turn.attempt_id)
        num_bytes_before = os.fstat(descriptor).st_size
        append_whole(descriptor, self._directory / turn.attempt_id, encode_frame(turn), num_bytes_before)
        return num_bytes_before

    def retract(self, attempt_id: str, num_bytes: int) -> None:
        """Cut an open trace back to ``num_bytes``.

        Raises:
            StorageFailed: the disk refused.
        """
        path = trace_path(self._directory, attempt_id)
        try:
            os.truncate(path, num_bytes)
        except OSError as error:
            raise storage_failed(path, error) from error

    def turns(self, attempt_id: str) -> tuple[Turn, ...]:
        """The turns in order, without a torn last frame; empty where there is no open trace.

        Raises:
            IntegrityError: a frame before the last one is damaged.
        """
        path = trace_path(self._directory, attempt_id)
        return read_frames(path, path.read_bytes()) if path.exists() else ()

    def payloads(self, attempt_id: str) -> tuple[tuple[memoryview, ...], tuple[TurnOutline, ...]]:
        """The msgpack bytes of the turns, and their outlines; as :meth:`turns`, but most is not decoded.

        Raises:
            IntegrityError: a frame before the last one is damaged.
        """
        path = trace_path(self._directory, attempt_id)
        payloads = tuple(read_payloads(path, path.read_bytes())) if path.exists() else ()
        return payloads, tuple(_OUTLINE_DECODER.decode(payload) for payload in payloads)

    def remove(self, attempt_id: str) -> None:
        """Delete an open trace, if there is one."""
        self.let_go((attempt_id,))
        trace_path(self._directory, attempt_id).unlink(missing_ok=True)

    def let_go(self, attempt_ids: Iterable[str]) -> None:
        """Close the files of attempts that get no more turns."""
        for attempt_id in attempt_ids:
            descriptor = self._descriptors.pop(attempt_id, None)
            if descriptor is not None:
                os.close(descriptor)

    def paths(self) -> Iterator[Path]:
        """The files, in no order."""
        return self._directory.iterdir()

    def close(self) -> None:
        """Close all files."""
        self.let_go(tuple(self._descriptors))

    def _descriptor(self, attempt_id: str) -> int:
        descriptor = self._descriptors.get(attempt_id)
        if descriptor is not None:
            self._descriptors.move_to_end(attempt_id)
            return descriptor
        path = self._directory / check_attempt_id(attempt_id)
        if len(self._descriptors) >= self._max_descriptors:
            os.close(self._descriptors.popitem(last=False)[1])
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise storage_failed(path, error) from error
        self._descriptors[attempt_id] = descriptor
        return descriptor


def encode_frame(turn: Turn) -> bytes:
    """One turn as it stands in an open trace."""
    payload = _TURN_ENCODER.encode(turn)
    return _FRAME.pack(len(payload), xxhash.xxh3_64_intdigest(payload)) + payload


def read_payloads(path: Path, data: bytes) -> Iterator[memoryview]:
    """The payloads of an open trace; a last frame cut short by a crash is left out.

    Raises:
        IntegrityError: a frame that others follow is damaged.
    """
    view, offset = memoryview(data), 0
    while offset + _FRAME.size <= len(data):
        length, checksum = _FRAME.unpack_from(data, offset)
        payload = view[offset + _FRAME.size : offset + _FRAME.size + length]
        if len(payload) < length:
            return
        if xxhash.xxh3_64_intdigest(payload) != checksum:
            if offset + _FRAME.size + length == len(data):
                return
            raise IntegrityError(f"{path} is damaged at byte {offset}: the frame's bytes do not match its checksum")
        yield payload
        offset += _FRAME.size + length


def read_frames(path: Path, data: bytes) -> tuple[Turn, ...]:
    """The turns of an open trace. Raises as :func:`read_payloads`."""
    return tuple(_TURN_DECODER.decode(payload) for payload in read_payloads(path, data))
