"""One line for each event, without control codes: for logs, pipes and CI."""

from typing import TextIO

from steelyard.clock import Clock
from steelyard.observe.books import open_books
from steelyard.observe.mismatch import mismatch_alarm
from steelyard.observe.progress import Progress, RunPlan
from steelyard.observe.rows import BooksRow, EngineRow, EnvironmentRow, EvaluationRow, StageRow, StepRow
from steelyard.observe.statistics import wilson_interval
from steelyard.observe.text_writer import TextWriter
from steelyard.observe.time_use import PART_NAMES, PARTS
from steelyard.observe.wording import (
    clean,
    decimals,
    duration,
    integer,
    percent,
    split_name,
    stopwatch,
    time_left,
    words,
)

_MIN_STEP_INTERVAL_S = 5.0
_SILENCE_S = 30.0


class PlainDisplay:
    """Prints stages, evaluations and notes at once, steps at most every 5 s (the first and the last always).

    After 30 s without a line the next engine row makes one, so that a log shows that the run is alive. A stream
    that breaks or that nobody reads hurts the display, not the run.
    """

    def __init__(self, stream: TextIO, clock: Clock, plan: RunPlan) -> None:
        self._writer = TextWriter(stream)
        self._clock = clock
        self._progress = Progress(plan, clock.now_s())
        self._last_line_s = clock.now_s()
        self._last_step_line_s: float | None = None
        self._open_books: list[str] = []
        self._is_mismatched = False

    def stage(self, row: StageRow) -> None:
        """Say that a stage began."""
        self._progress.take(row)
        detail = f": {row.detail}" if row.detail else ""
        self._print(f"{words(row.name)}{detail}")

    def step(self, row: StepRow) -> None:
        """Say how a step went, if it is due; and at once when an alarm goes on or off."""
        self._progress.take(row)
        now_s = self._clock.now_s()
        is_due = self._last_step_line_s is None or now_s - self._last_step_line_s >= _MIN_STEP_INTERVAL_S
        if is_due or row.step + 1 >= row.max_steps:
            self._last_step_line_s = now_s
            self._print(self._step_line(row, now_s))
        alarm = mismatch_alarm(row)
        if bool(alarm) != self._is_mismatched:
            self._is_mismatched = bool(alarm)
            self._print(alarm or f"engine {row.engine} and trainer agree again")

    def engine(self, row: EngineRow) -> None:
        """Count the row; after a long silence say that the run is alive."""
        self._progress.take(row)
        if self._clock.now_s() - self._last_line_s < _SILENCE_S:
            return
        engines = self._progress.newest_engines
        running, waiting = sum(e.num_running for e in engines), sum(e.num_waiting for e in engines)
        rate = integer(self._progress.decode_tokens_per_s)
        step = f" after step {self._progress.num_steps_done}" if self._progress.steps else ""
        stage = words(self._progress.stage)
        self._print(f"still in {stage}{step}: {rate} tokens/s, {running} running, {waiting} waiting")

    def environment(self, row: EnvironmentRow) -> None:
        """Count the row."""
        self._progress.take(row)

    def books(self, row: BooksRow) -> None:
        """Say which book does not close, whenever that changes."""
        self._progress.take(row)
        problems = open_books(row)
        if problems != self._open_books:
            self._open_books = problems
            self._print("; ".join(problems) or "the books close again")

    def evaluation(self, row: EvaluationRow) -> None:
        """Say how an evaluation went, with its interval and its causes of failure."""
        self._progress.take(row)
        interval = wilson_interval(row.num_success, row.num_tasks)
        bounds = ""
        if interval is not None:
            bounds = f", {decimals(interval.estimate)} ({decimals(interval.low)} to {decimals(interval.high)})"
        causes = ", ".join(f"{words(cause)} {n}" for cause, n in sorted(row.causes.items(), key=lambda c: -c[1]) if n)
        self._print(
            f"evaluation {row.label}, {split_name(row.split)}, {row.mode}: success {row.num_success} of {row.num_tasks}"
            + bounds
            + (f"; failures: {causes}" if causes else "")
        )

    def note(self, text: str) -> None:
        """Print a message; further lines of it are indented."""
        self._print(text)

    def close(self) -> None:
        """Write what is pending, at most 2 s. The stream stays open."""
        self._writer.close()

    def _step_line(self, row: StepRow, now_s: float) -> str:
        parts = [
            f"success {decimals(row.success_frac)}",
            f"reward {decimals(row.reward_mean)}",
            f"lag {decimals(row.lag_mean, 1)}",
        ]
        if self._progress.decode_tokens_per_s is not None:
            parts.append(f"{integer(self._progress.decode_tokens_per_s)} tokens/s")
        parts.append(f"{duration(row.wall_s)} a step{self._main_part()}")
        if row.step + 1 < row.max_steps:
            parts.append(time_left(self._progress.time_left(now_s)))
        return f"step {row.step + 1}/{row.max_steps}: {', '.join(parts)}"

    def _main_part(self) -> str:
        use = self._progress.time_use()
        if use is None:
            return ""
        part = max(PARTS, key=use.frac)
        return f" ({percent(use.frac(part))} {PART_NAMES[part]})"

    def _print(self, text: str) -> None:
        now_s = self._clock.now_s()
        self._last_line_s = now_s
        stamp = f"[{stopwatch(now_s - self._progress.started_at_s)}] "
        lines = clean(text).splitlines() or [""]
        whole = stamp + f"\n{' ' * len(stamp)}".join(lines) + "\n"
        self._writer.write(whole)
