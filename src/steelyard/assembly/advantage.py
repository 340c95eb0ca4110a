"""Group-relative advantages.

GRPO (arXiv 2402.03300, section 4.1.2, outcome supervision): for the scored members of one group with
values r_1..r_G, A_i = (r_i - mean(r)) / std(r), the same for every sampled token of member i. Without the
division this is the unbiased form of Dr. GRPO (arXiv 2503.20783, section 3.1).
"""

import math
from collections.abc import Sequence

import msgspec

from steelyard.digests import digest_bytes
from steelyard.errors import IntegrityError
from steelyard.types import Outcome, Record, Score

_EQUAL_WITHIN = 1e-9
"""Values closer than this (relative, or absolute below 1) are equal: a division by their spread would
turn rounding of the grader's arithmetic into a full-sized learning signal."""


class GroupAdvantages(Record, frozen=True, kw_only=True):
    """Advantages of one group, in the order of its scores, scored members only.

    ``no_signal`` says that all values were equal: each advantage is then exactly 0.0.
    """

    attempt_ids: tuple[str, ...]
    advantages: tuple[float, ...]
    no_signal: bool


def group_advantages(
    scores: Sequence[Score], *, normalise_by_std: bool, permutation_seed: int | None = None
) -> GroupAdvantages:
    """Advantages of one group; members whose outcome is not ``scored`` take no part in any statistic.

    The sums are exact (``math.fsum``), so the order of the members cannot change a bit of the result.

    Args:
        scores: the final score of each member, at most one per attempt.
        normalise_by_std: divide by the population standard deviation.
        permutation_seed: the negative control: advantages change hands within the group, in an order that depends on
            this seed and the attempts alone. None leaves them with their owners.

    Raises:
        IntegrityError: an attempt comes twice, or a scored member has no finite value.
    """
    scored = [score for score in scores if score.outcome is Outcome.SCORED]
    attempt_ids = tuple(score.attempt_id for score in scored)
    if len(set(attempt_ids)) != len(attempt_ids):
        raise IntegrityError(f"a group must hold one score per attempt, got {sorted(attempt_ids)}")
    values = [_finite_value(score) for score in scored]
    if not values or _all_equal(values):
        return GroupAdvantages(attempt_ids=attempt_ids, advantages=(0.0,) * len(values), no_signal=True)
    mean = math.fsum(values) / len(values)
    centred = [value - mean for value in values]
    scale = math.sqrt(math.fsum(c * c for c in centred) / len(centred)) if normalise_by_std else 1.0
    advantages = tuple(c / scale for c in centred)
    if permutation_seed is not None:
        advantages = _change_hands(attempt_ids, advantages, permutation_seed)
    return GroupAdvantages(attempt_ids=attempt_ids, advantages=advantages, no_signal=False)


def _change_hands(attempt_ids: tuple[str, ...], advantages: tuple[float, ...], seed: int) -> tuple[float, ...]:
    order = sorted(range(len(attempt_ids)), key=lambda i: digest_bytes(f"{seed}/{attempt_ids[i]}".encode()))
    return tuple(advantages[i] for i in order)


def _finite_value(score: Score) -> float:
    if score.value is None or not math.isfinite(score.value):
        raise IntegrityError(
            f"Score.value of attempt {score.attempt_id} must be finite where outcome is scored, got {score.value}"
        )
    return score.value


def _all_equal(values: Sequence[float]) -> bool:
    low, high = min(values), max(values)
    return high - low <= _EQUAL_WITHIN * max(1.0, abs(low), abs(high))


class AdvantageCounts(msgspec.Struct):
    """Running totals over groups, for metrics and the report."""

    num_groups: int = 0
    num_no_signal: int = 0
    num_scored: int = 0
    num_unscored: int = 0

    def add(self, group: GroupAdvantages, num_members: int) -> None:
        """Count one group of ``num_members`` rollouts."""
        self.num_groups += 1
        self.num_no_signal += group.no_signal
        self.num_scored += len(group.attempt_ids)
        self.num_unscored += num_members - len(group.attempt_ids)
