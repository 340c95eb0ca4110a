"""What is left of a trajectory: calibrated, monotone, deterministic, of bounded memory, and the best view wins."""

import itertools
import math
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.allocation.causal_tree import CausalTree
from steelyard.allocation.remaining_work import BY_TURN, LEVELS, RemainingAmount, Seen, pinball
from steelyard.allocation.workload import ToolResult

Points = list[tuple[Seen, float]]

amounts = st.floats(min_value=0.0, max_value=1e6, allow_nan=False)


def situations_with(turns: st.SearchStrategy[int]) -> st.SearchStrategy[Seen]:
    return st.builds(
        Seen,
        turn=turns,
        done=amounts,
        last_results=st.lists(st.sampled_from(ToolResult), max_size=3).map(tuple),
        num_siblings=st.integers(0, 9),
        sibling_mean=amounts,
    )


situations = situations_with(st.integers(0, 600))
trajectories = st.lists(st.lists(st.tuples(situations_with(st.integers(0, 15)), amounts), max_size=12), max_size=5)


def pieces_of(lengths: list[float]) -> Points:
    total, done, points = sum(lengths), 0.0, Points()
    for turn, length in enumerate(lengths):
        points.append((Seen(turn=turn, done=done), total - done))
        done += length
    return points


def paced(rng: random.Random) -> Points:
    """Ten turns at most; the tokens of a turn are the trajectory's own."""
    pace = math.exp(rng.gauss(5.0, 1.0))
    return pieces_of([pace * rng.uniform(0.8, 1.2) for _ in range(rng.randint(2, 10))])


def test_nothing_is_said_before_the_first_trajectory_has_ended() -> None:
    amount = RemainingAmount()
    assert amount.quantiles(Seen(turn=0, done=0.0)) is None
    amount.learn([])
    assert amount.quantiles(Seen(turn=0, done=0.0)) is None


@settings(max_examples=40, deadline=None)
@given(trajectories, situations)
def test_quantiles_never_fall_and_never_go_below_the_least(learnt: list[Points], seen: Seen) -> None:
    amount = RemainingAmount(least=2.0)
    for points in learnt:
        amount.learn(points)
    found = amount.quantiles(seen)
    if any(learnt):
        assert found is not None and len(found) == len(LEVELS)
        assert all(2.0 <= low <= high * (1 + 1e-9) for low, high in itertools.pairwise(found))
        assert math.isfinite(found[-1])


@settings(max_examples=30, deadline=None)
@given(trajectories, situations)
def test_the_same_history_gives_the_same_quantiles(learnt: list[Points], seen: Seen) -> None:
    first, second = RemainingAmount(), RemainingAmount()
    for points in learnt:
        first.learn(points)
        second.learn(points)
    assert first.quantiles(seen) == second.quantiles(seen)


@settings(max_examples=30, deadline=None)
@given(trajectories)
def test_memory_is_bounded_whatever_comes(learnt: list[Points]) -> None:
    amount = RemainingAmount(max_keys=30)
    for points in learnt:
        amount.learn(points)
        assert amount.num_keys <= 30
        for seen, _ in points:
            assert amount.quantiles(seen) is not None


def test_quantiles_cover_the_share_that_they_say_of_trajectories_not_seen_before() -> None:
    rng, amount, num, covered = random.Random(3), RemainingAmount(), 0, [0] * len(LEVELS)
    for number in range(1200):
        points = paced(rng)
        if number >= 600:
            for seen, left in points:
                num += 1
                for place, quantile in enumerate(amount.quantiles(seen) or ()):
                    covered[place] += left <= quantile
        amount.learn(points)
    for level, count in zip(LEVELS, covered, strict=True):
        assert abs(count / num - level) < 0.05


def test_where_a_trajectory_keeps_its_own_pace_the_turn_index_alone_is_worse() -> None:
    rng, whole, by_turn, losses = random.Random(4), RemainingAmount(), RemainingAmount((BY_TURN,)), [0.0, 0.0]
    for number in range(800):
        points = paced(rng)
        if number >= 400:
            for seen, left in points:
                for place, one in enumerate((whole, by_turn)):
                    losses[place] += pinball(one.quantiles(seen) or (), left)
        whole.learn(points)
        by_turn.learn(points)
    assert losses[0] < 0.7 * losses[1]


def test_lengths_that_doubled_are_believed_once_the_window_is_full_of_them() -> None:
    amount, start = RemainingAmount(), Seen(turn=0, done=0.0)
    for tokens in [100.0] * 1200 + [200.0] * 1200:
        amount.learn([(start, tokens)])
    found = amount.quantiles(start)
    assert found is not None and all(abs(one - 200.0) < 1.0 for one in found)


def test_at_each_turn_long_trajectories_count_as_often_as_short_ones() -> None:
    """Half of them have 40 turns, half 400: from turn 5 on there are 35 or 395 left, in equal shares."""
    amount = RemainingAmount((BY_TURN,))
    for number in range(200):
        amount.learn(pieces_of([1.0] * (400 if number % 2 else 40)))
    found = amount.quantiles(Seen(turn=5, done=5.0))
    assert found is not None and found[1] < 40 and found[3] > 350


def test_siblings_that_have_ended_tell_a_long_task_from_a_short_one() -> None:
    rng, amount = random.Random(5), RemainingAmount()
    for _ in range(400):
        mean = rng.choice([100.0, 10_000.0])
        amount.learn([(Seen(turn=0, done=0.0, num_siblings=3, sibling_mean=mean), mean * rng.uniform(0.9, 1.1))])
    for mean in (100.0, 10_000.0):
        found = amount.quantiles(Seen(turn=0, done=0.0, num_siblings=3, sibling_mean=mean))
        assert found is not None and 0.85 * mean < found[0] <= found[-1] < 1.15 * mean


def test_pinball_at_the_median_is_the_absolute_error() -> None:
    assert math.isclose(pinball([10.0] * len(LEVELS), 13.0), 3.0)
    assert math.isclose(pinball([10.0] * len(LEVELS), 7.0), 3.0)


def test_the_causal_tree_asks_the_deepest_node_that_has_seen_enough() -> None:
    tree, ok, error = CausalTree(min_support=3), ToolResult.OK, ToolResult.ERROR
    assert tree.quantiles([ok]) is None
    for _ in range(3):
        tree.learn([ok, ok], [30.0, 20.0, 10.0])
    tree.learn([error, ok], [900.0, 800.0, 700.0])
    assert set(tree.quantiles([ok]) or ()) == {20.0}
    assert set(tree.quantiles([error]) or ()) <= {30.0, 900.0}


@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(st.sampled_from(ToolResult), min_size=1, max_size=50), max_size=20))
def test_the_causal_tree_is_bounded(histories: list[list[ToolResult]]) -> None:
    tree = CausalTree(max_nodes=40)
    for results in histories:
        tree.learn(results, [float(len(results) - turn) for turn in range(len(results))])
        assert tree.num_nodes <= 40
        assert tree.quantiles(results) is not None
