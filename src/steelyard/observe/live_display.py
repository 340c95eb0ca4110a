"""The display for a terminal: a picture at the bottom that is drawn over in place, messages scrolling above it.

The picture is drawn by hand and not by ``rich.live``, which counts the lines it drew before and so leaves
remains behind when a terminal gets narrower and wraps them; rich renders the styled text.
"""

import atexit
import io
import os
import threading
from collections import deque
from collections.abc import Callable
from typing import TextIO

from rich.console import Console
from rich.text import Text

from steelyard.clock import Clock
from steelyard.observe.live_frame import frame
from steelyard.observe.progress import Progress, RunPlan
from steelyard.observe.rows import AnyRow, BooksRow, EngineRow, EnvironmentRow, EvaluationRow, StageRow, StepRow
from steelyard.observe.wording import clean, stopwatch

Size = Callable[[], tuple[int, int]]

_REFRESH_S = 0.5
_JOIN_DEADLINE_S = 2.0
_NUM_KEPT_NOTES = 8
_MAX_PENDING_NOTES = 200
_HIDE_CURSOR, _SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"
# Terminals that know it show the whole update at once; the others ignore it.
_BEGIN_UPDATE, _END_UPDATE = "\x1b[?2026h", "\x1b[?2026l"
_CLEAR_SCREEN, _CLEAR_BELOW, _CLEAR_LINE_END = "\x1b[H\x1b[2J", "\x1b[J", "\x1b[K"


class LiveDisplay:
    """Draws at every stage, step, evaluation and note, and twice a second, all from a thread of its own.

    So a terminal that takes no output (Ctrl-S) stops the picture and not the run; messages wait for it, and of more
    than 200 the oldest are left out. A terminal that is gone ends the display, not the run. The cursor is hidden while
    the display is open; :meth:`close` brings it back, and so does the end of the interpreter where nobody closed.

    Args:
        stream: the terminal.
        clock: time for elapsed time and time left.
        plan: what the run is going to do.
        size: columns and rows; by default those of the terminal, asked at each drawing.
        refresh_s: period of the thread; None for no thread, so that only :meth:`refresh` and :meth:`close` draw.
    """

    def __init__(
        self,
        stream: TextIO,
        clock: Clock,
        plan: RunPlan,
        *,
        size: Size | None = None,
        refresh_s: float | None = _REFRESH_S,
    ) -> None:
        self._stream = stream
        self._clock = clock
        self._progress = Progress(plan, clock.now_s())
        self._size = size or (lambda: terminal_size(stream))
        # Only renders: rich also writes to its file by itself, and all writing to the terminal must be in one place.
        self._console = Console(file=io.StringIO(), force_terminal=True, legacy_windows=False, highlight=False)
        # Guards the progress and the pending messages; never held while writing.
        self._lock = threading.Lock()
        self._pending: deque[str] = deque(maxlen=_MAX_PENDING_NOTES)
        self._shown: deque[str] = deque(maxlen=_NUM_KEPT_NOTES)
        self._num_lines = 0
        self._width: int | None = None
        self._is_broken = False
        self._wake, self._stop = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        atexit.register(self.close)
        if refresh_s is not None:
            self._thread = threading.Thread(target=self._keep_fresh, args=(refresh_s,), name="display", daemon=True)
            self._thread.start()

    def stage(self, row: StageRow) -> None:
        """Show the stage."""
        self._take(row)

    def step(self, row: StepRow) -> None:
        """Show the step."""
        self._take(row)

    def engine(self, row: EngineRow) -> None:
        """Shown with the next drawing: these rows come often."""
        self._take(row, is_urgent=False)

    def environment(self, row: EnvironmentRow) -> None:
        """Shown with the next drawing."""
        self._take(row, is_urgent=False)

    def books(self, row: BooksRow) -> None:
        """Shown with the next drawing, and only where a book does not close."""
        self._take(row, is_urgent=False)

    def evaluation(self, row: EvaluationRow) -> None:
        """Show the result beside the one it is to be compared with."""
        self._take(row)

    def note(self, text: str) -> None:
        """Print a message above the picture, where it stays."""
        stamp = f"[{stopwatch(self._clock.now_s() - self._progress.started_at_s)}] "
        lines = clean(text).splitlines() or [""]
        with self._lock:
            self._pending.append(stamp + f"\n{' ' * len(stamp)}".join(lines))
        self._wake.set()

    def refresh(self) -> None:
        """Draw the picture again, as wide as the terminal is now. Only for displays without a thread."""
        self._draw()

    def close(self) -> None:
        """Leave the last picture on the screen and give the cursor back. Closing twice is allowed.

        Waits for the terminal at most 2 s.
        """
        if self._stop.is_set():
            return
        atexit.unregister(self.close)
        self._stop.set()
        self._wake.set()
        if self._thread is None:
            self._finish()
        else:
            self._thread.join(_JOIN_DEADLINE_S)

    def _take(self, row: AnyRow, is_urgent: bool = True) -> None:
        with self._lock:
            self._progress.take(row)
        if is_urgent:
            self._wake.set()

    def _keep_fresh(self, refresh_s: float) -> None:
        while not self._stop.is_set():
            self._draw()
            self._wake.wait(refresh_s)
            self._wake.clear()
        self._finish()

    def _finish(self) -> None:
        with self._lock:
            self._progress.has_ended = True
        self._draw()
        self._write(_SHOW_CURSOR)

    def _draw(self) -> None:
        width, height = self._size()
        with self._lock:
            # One row stays free for the cursor, below the picture.
            lines = frame(self._progress, self._clock.now_s(), width, max(1, height - 1))
            notes = tuple(self._pending)
            self._pending.clear()
        self._shown.extend(notes)
        start = f"\r\x1b[{self._num_lines}A" if self._num_lines else "\r"
        if self._width not in (None, width):
            # How the terminal wrapped what was drawn is unknown, so start on an empty screen.
            start, notes = _CLEAR_SCREEN, tuple(self._shown)
        above = "".join(_CLEAR_BELOW + note + "\n" for note in notes)
        picture = "".join(self._styled(line) + _CLEAR_LINE_END + "\n" for line in lines)
        self._width, self._num_lines = width, len(lines)
        self._write(_BEGIN_UPDATE + _HIDE_CURSOR + start + above + picture + _CLEAR_BELOW + _END_UPDATE)

    def _styled(self, line: Text) -> str:
        with self._console.capture() as capture:
            self._console.print(line, end="", soft_wrap=True)
        return capture.get()

    def _write(self, text: str) -> None:
        if self._is_broken:
            return
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):
            # The terminal is gone: the run goes on without its display.
            self._is_broken = True


def terminal_size(stream: TextIO) -> tuple[int, int]:
    """Columns and rows of the terminal behind ``stream``; 80 x 24 where it does not say."""
    try:
        size = os.get_terminal_size(stream.fileno())
    except (OSError, ValueError):
        return 80, 24
    return size.columns or 80, size.lines or 24
