"""What a process of a rehearsal of kills is told on its command line."""

from steelyard.coordinator.capability import Role
from steelyard.types import Record

EXIT_DIVERGED = 75
"""Of a trainer whose replay gave other weights: start it again."""


class ProgramOptions(Record, frozen=True, kw_only=True):
    """``notes``: where it writes what was acknowledged to it. ``diverge_frac``: of a trainer's lives."""

    role: Role
    run: str
    urls: tuple[str, ...]
    key: str
    notes: str
    seed: int
    eval_task: str
    diverge_frac: float
