"""The ledger of recorded tokens: one line a model call, appended, never changed.

It is one side of the token books and shares nothing with the other (journal and sealed traces): another
file, another format, another moment of writing. Lines survive a kill of the process; ``sync`` makes them
survive a power cut.
"""

import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from steelyard.errors import IntegrityError
from steelyard.traces.durable_writer import storage_failed


class TokenLedger:
    """Counts recorded tokens per attempt. A line is ``<attempt_id> <request_id> <number of tokens>``.

    Raises:
        IntegrityError: a whole line of an existing file cannot be read.
        StorageFailed: the file cannot be opened for appending.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._counts: Counter[str] = Counter()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise storage_failed(path, error) from error
        self._num_bytes = self._load()
        self._num_synced_bytes = 0

    def add(self, attempt_id: str, request_id: str, num_tokens: int) -> None:
        """Count one recorded model call. From here on its tokens are recorded.

        Raises:
            StorageFailed: the line could not be written; nothing is counted.
        """
        line = f"{attempt_id} {request_id} {num_tokens}\n".encode("ascii")
        append_whole(self._descriptor, self._path, line, self._num_bytes)
        self._num_bytes += len(line)
        self._counts[attempt_id] += num_tokens

    def recorded(self, attempt_id: str) -> int:
        """Tokens recorded for the attempt, since the run began; 0 for an unknown one."""
        return self._counts[attempt_id]

    @property
    def by_attempt(self) -> Mapping[str, int]:
        """Recorded tokens of every attempt that has any."""
        return MappingProxyType(self._counts)

    @property
    def total(self) -> int:
        """All recorded tokens of the run."""
        return self._counts.total()

    def sync(self) -> None:
        """Make all lines survive a power cut; blocks for the disk where one does not yet.

        Raises:
            StorageFailed: the disk refused.
        """
        num_bytes = self._num_bytes
        if num_bytes == self._num_synced_bytes:
            return
        try:
            os.fdatasync(self._descriptor)
        except OSError as error:
            raise storage_failed(self._path, error) from error
        self._num_synced_bytes = num_bytes

    def close(self) -> None:
        """Give the file back."""
        os.close(self._descriptor)

    def _load(self) -> int:
        data = self._path.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            os.ftruncate(self._descriptor, whole)
        self._counts.update(read_lines(self._path, data[:whole]))
        return whole


def read_ledger(path: Path) -> dict[str, int]:
    """Recorded tokens by attempt, from the file of a run that may be going on; an unfinished line is skipped.

    Raises:
        IntegrityError: a whole line cannot be read.
    """
    data = path.read_bytes() if path.exists() else b""
    return dict(read_lines(path, data[: data.rfind(b"\n") + 1]))


def read_lines(path: Path, data: bytes) -> Counter[str]:
    """Sum whole ledger lines by attempt; ``path`` is for the message.

    Raises:
        IntegrityError: names the line that cannot be read.
    """
    counts: Counter[str] = Counter()
    for number, line in enumerate(data.decode("ascii", errors="replace").splitlines(), start=1):
        fields = line.split(" ")
        if len(fields) != 3 or not fields[2].isdigit():
            raise IntegrityError(f"{path} line {number} must be '<attempt> <request> <tokens>', not {line!r}")
        counts[fields[0]] += int(fields[2])
    return counts


def append_whole(descriptor: int, path: Path | str, data: bytes | bytearray, num_bytes_before: int) -> None:
    """Append ``data`` in one write; where the disk takes only a part, take that part back.

    This writes to the page cache and does not wait for the disk, so it is called in the event loop: a hop
    to a thread would cost more than the write.

    Raises:
        StorageFailed: not all of it could be written; the file is as before.
    """
    try:
        written = os.write(descriptor, data)
    except OSError as error:
        raise storage_failed(path, error) from error
    if written < len(data):
        os.ftruncate(descriptor, num_bytes_before)
        raise storage_failed(path, OSError(28, "the disk took only a part of the record"))
