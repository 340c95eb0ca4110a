"""Writes text to a stream from a thread of its own, so that a reader that stops reading cannot stop the run."""

import queue
import threading
from typing import TextIO

_MAX_PENDING = 1000
_CLOSE_DEADLINE_S = 2.0


class TextWriter:
    """Bounded queue in front of a stream.

    A paused pager or a terminal after Ctrl-S takes nothing; then up to 1000 texts wait and later ones are dropped,
    and the number of those is written once the reader goes on. A stream that breaks swallows all that follows.
    Characters that its encoding does not have become ``?``.
    """

    def __init__(self, stream: TextIO, max_pending: int = _MAX_PENDING) -> None:
        self._stream = stream
        self._encoding = stream.encoding or "utf-8"
        self._pending: queue.Queue[str | None] = queue.Queue(max_pending)
        self._num_dropped = 0
        self._is_closed = False
        self._thread = threading.Thread(target=self._drain, name="text-writer", daemon=True)
        self._thread.start()

    def write(self, text: str) -> None:
        """Hand over ``text``; never waits. Called from one thread only."""
        if self._is_closed:
            return
        if self._num_dropped:
            text = f"({self._num_dropped} messages were dropped: nobody read them)\n{text}"
        try:
            self._pending.put_nowait(text)
            self._num_dropped = 0
        except queue.Full:
            self._num_dropped += 1

    def close(self, deadline_s: float = _CLOSE_DEADLINE_S) -> None:
        """Wait until all is written, at most ``deadline_s`` seconds. The stream stays open."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self._pending.put(None, timeout=deadline_s)
        except queue.Full:
            return
        self._thread.join(deadline_s)

    def _drain(self) -> None:
        is_broken = False
        while (text := self._pending.get()) is not None:
            if is_broken:
                continue
            try:
                self._stream.write(text.encode(self._encoding, "replace").decode(self._encoding))
                self._stream.flush()
            except (OSError, ValueError):
                # A closed pipe or file: the run goes on without its reader.
                is_broken = True
