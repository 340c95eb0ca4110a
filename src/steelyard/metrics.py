"""Numbers about a run: one JSON object a line, and counters that only grow."""

import errno
import os
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

from steelyard.errors import StorageFailed


class MetricsFile:
    """Appends rows to ``metrics.jsonl``. Every row has ``at_s`` and ``kind``; the rest is free.

    Rows are for people and plots; nothing is ever decided by reading them back.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file = path.open("a+b", buffering=0)
        except OSError as error:
            raise self._refused(error) from None

    def write(self, at_s: float, kind: str, **values: Any) -> None:
        """Append one row in a single write, so that a kill leaves whole lines.

        Raises:
            StorageFailed: the disk took none or only a part of it; the file is as before.
        """
        line = msgspec.json.encode({"at_s": round(at_s, 3), "kind": kind, **values}) + b"\n"
        num_bytes_before = self._file.seek(0, os.SEEK_END)
        try:
            num_written = self._file.write(line)
        except OSError as error:
            raise self._refused(error) from None
        if num_written != len(line):
            self._file.truncate(num_bytes_before)
            raise self._refused(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))

    def _refused(self, error: OSError) -> StorageFailed:
        return StorageFailed(f"{self._path} must be writable, got: {error.strerror}")

    def close(self) -> None:
        self._file.close()


class Counters:
    """Named counters, for refusals, discards and the like."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def add(self, name: str, amount: int = 1) -> None:
        with self._lock:
            self._counts[name] += amount

    def read(self) -> dict[str, int]:
        """A copy of all counters."""
        with self._lock:
            return dict(self._counts)
