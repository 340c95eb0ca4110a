"""Advantages: the formula, who takes part, and what does not change them."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.assembly.advantage import AdvantageCounts, group_advantages
from steelyard.errors import IntegrityError
from steelyard.testing.training_data import make_score
from steelyard.types import Outcome

values_lists = st.lists(st.floats(-10, 10).map(lambda v: round(v, 4)), min_size=2, max_size=9)


def test_advantages_are_centred_and_divided_by_the_population_deviation() -> None:
    group = group_advantages(
        [make_score("att_a", 0.0), make_score("att_b", 1.0), make_score("att_c", 1.0)], normalise_by_std=True
    )
    deviation = math.sqrt(2) / 3
    assert group.attempt_ids == ("att_a", "att_b", "att_c")
    assert group.advantages == pytest.approx((-2 / 3 / deviation, 1 / 3 / deviation, 1 / 3 / deviation))
    assert not group.no_signal


def test_without_normalisation_only_the_mean_is_taken_off() -> None:
    group = group_advantages([make_score("att_a", 0.0), make_score("att_b", 1.0)], normalise_by_std=False)
    assert group.advantages == (-0.5, 0.5)


@pytest.mark.parametrize("values", [(1.0, 1.0, 1.0), (0.1 + 0.2, 0.3), (7.0,), (0.0, -0.0)])
def test_equal_values_give_exactly_zero_and_count_as_no_signal(values: tuple[float, ...]) -> None:
    group = group_advantages([make_score(f"att_{i}", v) for i, v in enumerate(values)], normalise_by_std=True)
    assert group.advantages == (0.0,) * len(values)
    assert group.no_signal


def test_a_member_that_is_not_scored_changes_no_advantage() -> None:
    scored = [make_score("att_a", 0.0), make_score("att_b", 1.0)]
    failed = [make_score(f"att_{outcome}", None, outcome) for outcome in Outcome if outcome is not Outcome.SCORED]
    with_failures = group_advantages([*failed, *scored], normalise_by_std=True)
    assert with_failures == group_advantages(scored, normalise_by_std=True)


def test_a_group_with_no_scored_member_has_no_advantages() -> None:
    group = group_advantages([make_score("att_a", None, Outcome.INFRA_FAILED)], normalise_by_std=True)
    assert group.advantages == ()


@pytest.mark.parametrize("value", [None, math.nan, math.inf])
def test_a_scored_member_without_a_finite_value_is_an_error_that_names_the_attempt(value: float | None) -> None:
    with pytest.raises(IntegrityError, match="att_b must be finite"):
        group_advantages([make_score("att_a", 1.0), make_score("att_b", value)], normalise_by_std=True)


def test_an_attempt_that_comes_twice_is_refused() -> None:
    with pytest.raises(IntegrityError, match="one score per attempt"):
        group_advantages([make_score("att_a", 1.0), make_score("att_a", 0.0)], normalise_by_std=True)


@given(values_lists, st.randoms())
def test_the_order_of_the_members_changes_no_bit(values: list[float], rng: random.Random) -> None:
    scores = [make_score(f"att_{i}", value) for i, value in enumerate(values)]
    shuffled = scores[:]
    rng.shuffle(shuffled)
    straight = group_advantages(scores, normalise_by_std=True)
    mixed = group_advantages(shuffled, normalise_by_std=True)
    assert dict(zip(straight.attempt_ids, straight.advantages, strict=True)) == dict(
        zip(mixed.attempt_ids, mixed.advantages, strict=True)
    )


@given(values_lists)
def test_normalised_advantages_have_mean_zero_and_unit_deviation(values: list[float]) -> None:
    group = group_advantages([make_score(f"att_{i}", v) for i, v in enumerate(values)], normalise_by_std=True)
    assert math.fsum(group.advantages) == pytest.approx(0.0, abs=1e-6)
    mean_square = math.fsum(a * a for a in group.advantages) / len(values)
    assert mean_square == pytest.approx(0.0 if group.no_signal else 1.0)


def test_counts_add_up_over_groups() -> None:
    counts = AdvantageCounts()
    counts.add(group_advantages([make_score("att_a", 1.0), make_score("att_b", 1.0)], normalise_by_std=True), 3)
    counts.add(group_advantages([make_score("att_c", 1.0), make_score("att_d", 0.0)], normalise_by_std=True), 2)
    assert counts == AdvantageCounts(num_groups=2, num_no_signal=1, num_scored=4, num_unscored=1)


def test_in_the_negative_control_advantages_change_hands_within_the_group_and_none_is_lost() -> None:
    scores = [make_score(f"att_{index}", float(index)) for index in range(8)]
    owned = group_advantages(scores, normalise_by_std=True)
    permuted = group_advantages(scores, normalise_by_std=True, permutation_seed=3)
    assert permuted.attempt_ids == owned.attempt_ids
    assert sorted(permuted.advantages) == sorted(owned.advantages)
    assert permuted.advantages != owned.advantages
    assert group_advantages(scores, normalise_by_std=True, permutation_seed=3) == permuted
    assert group_advantages(scores, normalise_by_std=True, permutation_seed=4) != permuted
