"""What follows the end of an attempt or of a grading. One table; DESIGN section 3 says whose fault each ending is.

An ending of ours is never a reward: it is tried again while there is budget, and after that the rollout is cancelled.
A verdict is never tried again, whatever it says: sampling until the verdict is good would train on the luckiest try.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from steelyard.types import Outcome

_MAX_DOUBLINGS = 60
"""Beyond it every wait is longer than any run; keeps the power from overflowing."""


class Ending(enum.StrEnum):
    """How an attempt, or a grading of its artifact, came to its end.

    ``worker_stopped``: the worker was told to stop and said so; ``abandoned``: the worker is known to be gone, or the
    attempt's weights were given up.
    """

    SCORED = "scored"
    INFRA_FAILED = "infra_failed"
    TIMED_OUT = "timed_out"
    LEASE_EXPIRED = "lease_expired"
    TRUNCATED = "truncated"
    WORKER_STOPPED = "worker_stopped"
    ABANDONED = "abandoned"
    GRADER_FAILED = "grader_failed"


class Follow(enum.StrEnum):
    """What follows while there is budget."""

    NOTHING = "nothing"
    NEW_ATTEMPT = "new attempt"
    SAME_ARTIFACT = "score the same artifact again"


@dataclass(frozen=True, slots=True)
class RetryRule:
    """One row. ``outcome`` is the one that is journalled.

    ``is_counted``: uses up ``rollout.max_attempts``, for a grading ``scoring.max_attempts``.
    ``has_backoff``: the next attempt waits, longer each time.
    """

    outcome: Outcome
    follow: Follow
    is_counted: bool
    has_backoff: bool


RETRY_RULES: Mapping[Ending, RetryRule] = {
    Ending.SCORED: RetryRule(Outcome.SCORED, Follow.NOTHING, False, False),
    Ending.INFRA_FAILED: RetryRule(Outcome.INFRA_FAILED, Follow.NEW_ATTEMPT, True, True),
    Ending.TIMED_OUT: RetryRule(Outcome.TIMED_OUT, Follow.NEW_ATTEMPT, True, True),
    Ending.LEASE_EXPIRED: RetryRule(Outcome.TIMED_OUT, Follow.NEW_ATTEMPT, True, True),
    # Text that we cut is our fault, but no outage that passes: waiting would not help, and the budget must end it.
    Ending.TRUNCATED: RetryRule(Outcome.TRUNCATED, Follow.NEW_ATTEMPT, True, False),
    # Whoever stops a worker has not found a fault in the attempt: however often a run is interrupted, it costs nothing.
    Ending.WORKER_STOPPED: RetryRule(Outcome.CANCELLED, Follow.NEW_ATTEMPT, False, False),
    Ending.ABANDONED: RetryRule(Outcome.INFRA_FAILED, Follow.NEW_ATTEMPT, False, False),
    Ending.GRADER_FAILED: RetryRule(Outcome.GRADER_FAILED, Follow.SAME_ARTIFACT, True, False),
}

REPORTED: Mapping[Outcome, Ending] = {
    Outcome.INFRA_FAILED: Ending.INFRA_FAILED,
    Outcome.TIMED_OUT: Ending.TIMED_OUT,
    Outcome.TRUNCATED: Ending.TRUNCATED,
    Outcome.CANCELLED: Ending.WORKER_STOPPED,
}
"""The endings that a worker can report as a failure of its attempt; other outcomes are not its to give."""


def backoff_s(num_failures: int, *, first_s: float, max_s: float, jitter_frac: float, draw: float) -> float:
    """Seconds to wait before the next attempt: exponential, with the last part of the wait left to chance.

    So that attempts which failed together do not come back together; after M. Brooker, "Exponential Backoff And
    Jitter", AWS Architecture Blog, 2015 (its "equal jitter" at ``jitter_frac`` 0.5).

    Args:
        num_failures: of the rollout so far, this one included; at least 1.
        first_s: the longest wait after the first failure; it doubles with each further one.
        max_s: no wait is longer.
        jitter_frac: the part of the wait, 0 to 1, that ``draw`` decides about.
        draw: uniform in [0, 1).
    """
    longest_s = min(max_s, first_s * 2.0 ** min(num_failures - 1, _MAX_DOUBLINGS))
    return longest_s * (1.0 - jitter_frac * draw)
