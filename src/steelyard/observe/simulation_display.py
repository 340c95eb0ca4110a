"""How far a simulation is, for a terminal."""

from types import TracebackType
from typing import Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from steelyard.observe.wording import clean, duration, integer
from steelyard.sim.timeline import Sample


class SimulationDisplay:
    """One line that is drawn over in place, and gone at the end; nothing where ``stream`` is no terminal."""

    def __init__(self, stream: TextIO, name: str, num_steps: int, is_quiet: bool = False) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=12),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[words]}"),
            TimeElapsedColumn(),
            console=Console(file=stream),
            transient=True,
            disable=is_quiet or not stream.isatty(),
        )
        self._task = self._progress.add_task(clean(name), total=num_steps, words="")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def show(self, sample: Sample) -> None:
        """Draw what the simulation says of itself."""
        self._progress.update(self._task, completed=sample.step, words=words_of(sample))


def words_of(sample: Sample) -> str:
    """``3 min 05 s, rollout=4 train=4, 12 live``: virtual time, devices, attempts; short, for 80 columns."""
    return f"{duration(sample.at_s)}, rollout={sample.rollout} train={sample.train}, {integer(sample.num_live)} live"
