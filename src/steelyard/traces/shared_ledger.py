"""Recorded tokens of attempts whose recorder and coordinator are different processes: one file an attempt.

Both only append, so the file itself says what came first. A line of a recorder is ``<request_id> <number of tokens> .``
and the coordinator ends an attempt with the line ``ended``. What stands behind the first ``ended`` was never recorded:
its recorder sees that when it reads the file back, and hands nothing on. So both sides, and the audit, count the same,
whoever is stopped or killed in between. Appends of one line are whole and ordered on a local file system; over a
network the file system must promise that too.

Lines survive a kill of the process; ``sync`` makes them survive a power cut.
"""

import os
from collections.abc import Iterator
from pathlib import Path

from steelyard.errors import Refused
from steelyard.traces.blobs import storage_failed
from steelyard.traces.sealed import trace_path

_ENDED = b"ended"


class SharedLedger:
    """The files below ``root``, which is made where it is missing.

    Raises:
        StorageFailed: it cannot be made.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        try:
            root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise storage_failed(root, error) from error

    def add(self, attempt_id: str, request_id: str, num_tokens: int) -> None:
        """Record one model call.

        Raises:
            Refused: the attempt was ended before (``late``); nothing is recorded.
            StorageFailed: the line could not be written whole; nothing is recorded.
        """
        path = trace_path(self._root, attempt_id)
        _append(path, f"{request_id} {num_tokens} .".encode("ascii"))
        if request_id not in {name for name, _ in _counted(path)}:
            raise Refused("late", f"attempt {attempt_id} had ended before request {request_id} was recorded")

    def end(self, attempt_id: str) -> int:
        """Nothing is recorded for the attempt from here on; the tokens that were. The same again and again.

        Raises:
            StorageFailed: the disk refused to keep the end.
        """
        path = trace_path(self._root, attempt_id)
        if _ENDED not in _lines(path):
            _append(path, _ENDED)
        self.sync(attempt_id)
        return self.recorded(attempt_id)

    def recorded(self, attempt_id: str) -> int:
        """Tokens recorded for an attempt; 0 for an unknown one."""
        return sum(num_tokens for _, num_tokens in _counted(trace_path(self._root, attempt_id)))

    def by_attempt(self) -> dict[str, int]:
        """Recorded tokens of every attempt that has any."""
        counts = {path.name: self.recorded(path.name) for path in sorted(self._root.iterdir())}
        return {attempt_id: num_tokens for attempt_id, num_tokens in counts.items() if num_tokens}

    def sync(self, attempt_id: str) -> None:
        """Make the lines of an attempt survive a power cut; to be done before its trace is sealed.

        Raises:
            StorageFailed: the disk refused.
        """
        path = trace_path(self._root, attempt_id)
        try:
            for name in (path, self._root):
                descriptor = os.open(name, os.O_RDONLY)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
        except OSError as error:
            raise storage_failed(path, error) from error


def _append(path: Path, line: bytes) -> None:
    """One write of one line. Where the disk takes a part of it, the part is no line, and counts nothing."""
    data = line + b"\n"
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            written = os.write(descriptor, data)
            if written < len(data):
                os.write(descriptor, b"\n")  # so that the next line stands by itself
                raise OSError(28, "the disk took only a part of the record")
        finally:
            os.close(descriptor)
    except OSError as error:
        raise storage_failed(path, error) from error


def _lines(path: Path) -> list[bytes]:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    return data[: data.rfind(b"\n") + 1].split(b"\n")[:-1]


def _counted(path: Path) -> Iterator[tuple[str, int]]:
    """Requests that were recorded before the end, with their tokens; parts of lines are left out."""
    for line in _lines(path):
        if line == _ENDED:
            return
        fields = line.decode("ascii", "replace").split(" ")
        if len(fields) == 3 and fields[0] and fields[1].isdecimal() and fields[2] == ".":
            yield fields[0], int(fields[1])
