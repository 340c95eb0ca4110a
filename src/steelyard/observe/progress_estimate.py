"""How long a run will still take, said with its uncertainty. Pure: times come in, an estimate goes out."""

import math
from collections.abc import Sequence

import msgspec

from steelyard.observe.statistics import mean, standard_deviation

_WINDOW = 12
_MIN_STEPS = 3
_Z_80 = 1.2815515655446004
_LATE_FACTOR = 3.0


class TimeLeft(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds until the end: expected, and the bounds that hold in about 8 of 10 runs.

    ``without_evaluation``: an evaluation is still to come whose length nobody can know yet; it is not in the
    numbers. ``is_late``: the present step already takes more than 3 times as long as usual, so that the numbers
    say little.
    """

    expected_s: float
    low_s: float
    high_s: float
    without_evaluation: bool = False
    is_late: bool = False


class WorkLeft(msgspec.Struct, frozen=True, kw_only=True):
    (
        """What is still to do. ``evaluation_s`` is the length of one evaluation where one was seen.

    ``since_last_step_s``: time since the last step ended, or, with no steps left, since the last evaluation
    that is not counted in ``num_evaluations`` ended.
    """
        ""
    )

    num_steps: int
    since_last_step_s: float = 0.0
    num_evaluations: int = 0
    evaluation_s: float | None = None


def estimate_time_left(step_times_s: Sequence[float], work: WorkLeft) -> TimeLeft | None:
    """Estimate from the wall times of the steps so far, oldest first; None while there are too few.

    The last 12 steps count and the first step of the run does not (it warms caches up). For r steps to come and n
    observed with mean m and deviation s, the sum of r more has expectation r m and, the mean itself being
    estimated, variance r s^2 + r^2 s^2 / n. What of the present step is over is taken off, down to 0.
    """
    evaluation_s = _evaluations(work)
    without_evaluation = evaluation_s is None
    if work.num_steps <= 0:
        if evaluation_s is None:
            return None
        rest_s = max(evaluation_s - work.since_last_step_s, 0.0)
        return TimeLeft(expected_s=rest_s, low_s=rest_s, high_s=rest_s)
    seen = list(step_times_s[1:])[-_WINDOW:]
    usual_s = mean(seen)
    if usual_s is None or len(seen) < _MIN_STEPS:
        return None
    deviation_s = standard_deviation(seen)
    spread_s = _Z_80 * deviation_s * math.sqrt(work.num_steps + work.num_steps**2 / len(seen))
    steps_s = max(usual_s - work.since_last_step_s, 0.0) + (work.num_steps - 1) * usual_s
    rest_s = evaluation_s or 0.0
    return TimeLeft(
        expected_s=steps_s + rest_s,
        low_s=max(steps_s - spread_s, 0.0) + rest_s,
        high_s=steps_s + spread_s + rest_s,
        without_evaluation=without_evaluation,
        is_late=work.since_last_step_s > _LATE_FACTOR * usual_s,
    )


def _evaluations(work: WorkLeft) -> float | None:
    if work.num_evaluations <= 0:
        return 0.0
    if work.evaluation_s is None:
        return None
    return work.num_evaluations * work.evaluation_s
