"""Numbers about a run: one JSON object a line, and counters that only grow."""

import threading
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec


class MetricsFile:
    """Appends rows to ``metrics.jsonl``. Every row has ``at_s`` and ``kind``; the rest is free.

    Rows are for people and plots; nothing is ever decided by reading them back.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)

    def write(self, at_s: float, kind: str, **values: Any) -> None:
        """Append one row in a single write, so that a kill leaves whole lines."""
        self._file.write(msgspec.json.encode({"at_s": round(at_s, 3), "kind": kind, **values}) + b"\n")

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
