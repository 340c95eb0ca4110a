"""Deaths on purpose: kill this process at the n-th passing of a named point.

Writers of durable data call a hook at the points between which a crash must be survivable. In a run the hook does
nothing, unless a :class:`FaultPlan` says otherwise: for rehearsals of recovery, on one's own disks and machines too.
"""

import os
import signal
from collections import Counter
from collections.abc import Callable

from steelyard.types import Record


class FaultPlan(Record, frozen=True, kw_only=True):
    """Kill ``process`` with SIGKILL when it passes ``point`` for the ``occurrence``-th time (from 1).

    ``process`` is ``control``, ``trainer``, ``replica-<n>`` or ``scorer-<n>``. With ``whole_run`` its parent dies
    first, and with the parent all its children.

    Points: in control ``event:<KIND>:before`` and ``event:<KIND>:after`` around the commit of each event of the
    journal, ``journal.*``, ``trace:*``, ``blob:*``, ``batch:*`` inside writes; in every child ``call:<endpoint>`` and
    ``reply:<endpoint>``; in the trainer ``gradients_ready``, ``stepped``, those of
    :mod:`steelyard.trainer.checkpoint`, and with the prefix ``publish:`` those of
    :mod:`steelyard.weights.publisher`; in a helper of the trainer ``micro_batch``, before each of a unit.

    ``then`` is the plan for the process that takes its place; without one that process lives.
    """

    process: str
    point: str
    occurrence: int = 1
    whole_run: bool = False
    then: "FaultPlan | None" = None


def fault_hook(plan: FaultPlan | None, process: str) -> Callable[[str], None]:
    """The hook of ``process`` under ``plan``."""
    if plan is None or plan.process != process:
        return _nothing
    passed: Counter[str] = Counter()

    def hook(point: str) -> None:
        passed[point] += 1
        if point == plan.point and passed[point] == plan.occurrence:
            if plan.whole_run and process != "control":
                os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)

    return hook


def _nothing(point: str) -> None:
    """Nobody dies."""
