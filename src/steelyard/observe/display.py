"""The terminal display of a run: live for a terminal, plain lines elsewhere, or nothing."""

from typing import Literal, Protocol, TextIO

from rich.console import Console

from steelyard.clock import Clock
from steelyard.observe.live_display import LiveDisplay
from steelyard.observe.plain_display import PlainDisplay
from steelyard.observe.progress import RunPlan
from steelyard.observe.rows import (
    AnyRow,
    BooksRow,
    EngineRow,
    EnvironmentRow,
    EvaluationRow,
    StageRow,
    StepRow,
)

DisplayKind = Literal["auto", "live", "plain", "quiet"]


class Display(Protocol):
    """Shows rows as they come. No method raises for a stream that broke, and none blocks on the run."""

    def stage(self, row: StageRow) -> None:
        """The run entered a stage."""
        ...

    def step(self, row: StepRow) -> None:
        """An optimizer step is done."""
        ...

    def engine(self, row: EngineRow) -> None:
        """News of a replica."""
        ...

    def environment(self, row: EnvironmentRow) -> None:
        """News of tools and sandboxes."""
        ...

    def books(self, row: BooksRow) -> None:
        """The books so far."""
        ...

    def evaluation(self, row: EvaluationRow) -> None:
        """An evaluation is done."""
        ...

    def note(self, text: str) -> None:
        """A message for the user; it may have several lines."""
        ...

    def close(self) -> None:
        """Give the terminal back. Closing twice is allowed."""
        ...


class QuietDisplay:
    """Shows nothing."""

    def stage(self, row: StageRow) -> None:
        """Nothing."""

    def step(self, row: StepRow) -> None:
        """Nothing."""

    def engine(self, row: EngineRow) -> None:
        """Nothing."""

    def environment(self, row: EnvironmentRow) -> None:
        """Nothing."""

    def books(self, row: BooksRow) -> None:
        """Nothing."""

    def evaluation(self, row: EvaluationRow) -> None:
        """Nothing."""

    def note(self, text: str) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


def make_display(kind: DisplayKind, stream: TextIO, clock: Clock, plan: RunPlan | None = None) -> Display:
    """The display that ``observe.display`` asks for.

    ``auto`` is live on a terminal that can move its cursor and show block characters, else plain.
    """
    plan = plan or RunPlan()
    if kind == "quiet":
        return QuietDisplay()
    if kind == "live" or (kind == "auto" and can_be_live(stream)):
        return LiveDisplay(stream, clock, plan)
    return PlainDisplay(stream, clock, plan)


def can_be_live(stream: TextIO) -> bool:
    """Whether ``stream`` is a terminal with cursor movement and Unicode."""
    if not stream.isatty() or Console(file=stream).is_dumb_terminal:
        return False
    return "utf" in (stream.encoding or "").lower()


def show(display: Display, row: AnyRow) -> None:
    """Hand a row to the method that shows its kind; the router's are for the file and the report."""
    if isinstance(row, StageRow):
        display.stage(row)
    elif isinstance(row, StepRow):
        display.step(row)
    elif isinstance(row, EngineRow):
        display.engine(row)
    elif isinstance(row, EnvironmentRow):
        display.environment(row)
    elif isinstance(row, BooksRow):
        display.books(row)
    elif isinstance(row, EvaluationRow):
        display.evaluation(row)
