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
from steelyard.packed_floats import encode_packed
from steelyard.traces.durable_writer import storage_failed
from steelyard.traces.ledger import append_whole
from steelyard.traces.sealed import check_attempt_id, trace_path
from steelyard.types import Turn, VersionSpan

_FRAME = struct.Struct("<IQ")
_MAX_DESCRIPTORS = 4096
_MAX_SPARE = 256
_TURN_ENCODER = msgspec.msgpack.Encoder(enc_hook=encode_packed)
_TURN_DECODER = msgspec.msgpack.Decoder(Turn)


class TurnOutline(msgspec.Struct, frozen=True, kw_only=True):
    """What sealing must know of a turn."""

    turn_index: int
    segment_index: int
    num_tokens: int
    version_spans: tuple[VersionSpan, ...]


def outline_of(turn: Turn) -> TurnOutline:
    """The outline of a turn."""
    return TurnOutline(
        turn_index=turn.turn_index,
        segment_index=turn.segment_index,
        num_tokens=len(turn.token_ids),
        version_spans=turn.version_spans,
    )


class _OpenFile:
    """A file that stays open, and its size, which nobody else changes.

    ``outlines``: of the turns in it, in order; None where this process did not write all of them.
    """

    __slots__ = ("descriptor", "num_bytes", "outlines", "path")

    def __init__(self, path: str, descriptor: int, num_bytes: int) -> None:
        self.path = path
        self.descriptor = descriptor
        self.num_bytes = num_bytes
        self.outlines: list[TurnOutline] | None = None if num_bytes else []

    def delete(self) -> None:
        os.close(self.descriptor)
        Path(self.path).unlink(missing_ok=True)


class OpenTraces:
    """The open traces in one directory, which this process alone writes.

    The files that were written last stay open. The file of a trace that is removed stays too, empty and under its old
    name, until a new trace takes it over: to make and to delete a file costs some file systems more than all else.

    Args:
        max_open_files: by default a quarter of what the process may open, at most 4096.
    """

    def __init__(self, directory: Path, max_open_files: int | None = None) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._files: OrderedDict[str, _OpenFile] = OrderedDict()
        self._spare: dict[str, _OpenFile] = {}
        allowed = min(_MAX_DESCRIPTORS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)
        self._max_files = max(1, allowed if max_open_files is None else max_open_files)
        self._frame = bytearray()

    def append(self, turn: Turn) -> int:
        """Append one turn; returns the size in bytes before, for ``retract``.

        Raises:
            StorageFailed: the disk refused; the open trace is as before.
        """
        file = self._file(turn.attempt_id)
        num_bytes_before = file.num_bytes
        frame = encode_frame(turn, self._frame)
        append_whole(file.descriptor, file.path, frame, num_bytes_before)
        file.num_bytes += len(frame)
        if file.outlines is not None:
            file.outlines.append(outline_of(turn))
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
        if attempt_id in self._files:
            self._files[attempt_id].num_bytes = num_bytes
            self._files[attempt_id].outlines = None

    def turns(self, attempt_id: str) -> tuple[Turn, ...]:
        """The turns in order, without a torn last frame; empty where there is no open trace.

        Raises:
            IntegrityError: a frame before the last one is damaged.
        """
        return read_frames(self._path(attempt_id), self._read(attempt_id))

    def payloads(self, attempt_id: str) -> tuple[tuple[memoryview, ...], tuple[TurnOutline, ...]]:
        """The msgpack bytes of the turns, and their outlines; as :meth:`turns`, but nothing is decoded that is known.

        Raises:
            IntegrityError: a frame before the last one is damaged.
        """
        payloads = tuple(read_payloads(self._path(attempt_id), self._read(attempt_id)))
        file = self._files.get(attempt_id)
        if file is not None and file.outlines is not None and len(file.outlines) == len(payloads):
            return payloads, tuple(file.outlines)
        return payloads, tuple(outline_of(_TURN_DECODER.decode(payload)) for payload in payloads)

    def remove(self, attempt_id: str) -> None:
        """Empty an open trace, if there is one; from here on there is none."""
        file = self._files.pop(attempt_id, None)
        if file is None:
            if self._path(attempt_id) not in self._spare:
                trace_path(self._directory, attempt_id).unlink(missing_ok=True)
            return
        if len(self._spare) < min(_MAX_SPARE, self._max_files // 2):
            try:
                os.ftruncate(file.descriptor, 0)
            except OSError:
                pass  # deleting it may still go well
            else:
                file.num_bytes = 0
                file.outlines = []
                self._spare[file.path] = file
                return
        file.delete()

    def let_go(self, attempt_ids: Iterable[str]) -> None:
        """Close the files of attempts that get no more turns."""
        for attempt_id in attempt_ids:
            file = self._files.pop(attempt_id, None)
            if file is not None:
                os.close(file.descriptor)

    def paths(self) -> Iterator[Path]:
        """The files, in no order, without those that wait to be taken over."""
        return (path for path in self._directory.iterdir() if str(path) not in self._spare)

    def attempts(self) -> Iterator[str]:
        """Attempts that have a turn, or a part of one."""
        return (entry.name for entry in os.scandir(self._directory) if entry.stat().st_size)

    def close(self) -> None:
        """Close all files."""
        self.let_go(tuple(self._files))
        while self._spare:
            self._spare.popitem()[1].delete()

    def _path(self, attempt_id: str) -> str:
        return f"{self._directory}/{check_attempt_id(attempt_id)}"

    def _read(self, attempt_id: str) -> bytes:
        file = self._files.get(attempt_id)
        if file is not None:
            data = os.pread(file.descriptor, file.num_bytes, 0)
            if len(data) == file.num_bytes:
                return data
        path = self._path(attempt_id)
        return Path(path).read_bytes() if os.access(path, os.F_OK) else b""

    def _file(self, attempt_id: str) -> _OpenFile:
        file = self._files.get(attempt_id)
        if file is not None:
            self._files.move_to_end(attempt_id)
            return file
        path = self._path(attempt_id)
        try:
            file = self._taken_over(path) or self._opened(path)
        except OSError as error:
            raise storage_failed(path, error) from error
        self._files[attempt_id] = file
        return file

    def _taken_over(self, path: str) -> _OpenFile | None:
        """An empty file under its new name; None where there is none, or where ``path`` is another's."""
        if path in self._spare:
            return self._spare.pop(path)
        if not self._spare or os.access(path, os.F_OK):
            return None
        file = self._spare.popitem()[1]
        try:
            os.rename(file.path, path)  # noqa: PTH104 (of the time of a call, pathlib takes more than the disk)
        except OSError:  # whoever took it away did not take its name to be ours
            os.close(file.descriptor)
            return None
        file.path = path
        return file

    def _opened(self, path: str) -> _OpenFile:
        if self._spare and len(self._files) + len(self._spare) >= self._max_files:
            self._spare.popitem()[1].delete()
        elif len(self._files) >= self._max_files:
            os.close(self._files.popitem(last=False)[1].descriptor)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        return _OpenFile(path, descriptor, os.fstat(descriptor).st_size)


def encode_frame(turn: Turn, into: bytearray | None = None) -> bytearray:
    """One turn as it stands in an open trace.

    Args:
        into: is used for it, whatever is in it; None takes a new one.
    """
    frame = bytearray() if into is None else into
    _TURN_ENCODER.encode_into(turn, frame, _FRAME.size)
    with memoryview(frame) as view, view[_FRAME.size :] as payload:
        _FRAME.pack_into(frame, 0, len(payload), xxhash.xxh3_64_intdigest(payload))
    return frame


def read_payloads(path: Path | str, data: bytes) -> Iterator[memoryview]:
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


def read_frames(path: Path | str, data: bytes) -> tuple[Turn, ...]:
    """The turns of an open trace. Raises as :func:`read_payloads`."""
    return tuple(_TURN_DECODER.decode(payload) for payload in read_payloads(path, data))
