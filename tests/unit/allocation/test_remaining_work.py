"""What is left of a trajectory: quantiles that do not cross, that cover what they say, in bounded memory."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.allocation.causal_tree import CausalTree
from steelyard.allocation.remaining_work import BY_TURN, LEVELS, VIEWS, RemainingAmount, Seen, View, pinball, points_of
from steelyard.allocation.workload import ToolResult, TrajectoryWork, TurnWork

RESULTS = st.sampled_from(ToolResult)


@st.composite
def trajectories(draw: st.DrawFn) -> TrajectoryWork:
    sizes = draw(st.lists(st.tuples(st.integers(1, 5000), RESULTS), min_size=1, max_size=12))
    return TrajectoryWork(
        turns=tuple(TurnWork(new_prompt_tokens=10, generated_tokens=size, result=result) for size, result in sizes)
    )


SITUATIONS = st.builds(
    Seen,
    turn=st.integers(0, 200),
    done=st.floats(0, 1e6),
    last_results=st.lists(RESULTS, max_size=3).map(tuple),
    num_siblings=st.integers(0, 16),
    sibling_mean=st.floats(0, 1e6),
)


def work_of(*sizes: int) -> TrajectoryWork:
    return TrajectoryWork(turns=tuple(TurnWork(new_prompt_tokens=5, generated_tokens=size) for size in sizes))


@given(st.lists(trajectories(), min_size=1, max_size=30), st.lists(SITUATIONS, min_size=1, max_size=5))
def test_quantiles_do_not_cross_and_are_never_less_than_the_least(
    learnt: list[TrajectoryWork], asked: list[Seen]
) -> None:
    amount = RemainingAmount(least=2.0)
    totals = list[float]()
    for trajectory in learnt:
        amount.learn(points_of(trajectory, totals))
        totals.append(float(trajectory.generated_tokens))
    for seen in asked:
        found = amount.quantiles(seen)
        assert found is not None and len(found) == len(LEVELS)
        assert found[0] >= 2.0 and list(found) == sorted(found)


@given(st.lists(trajectories(), min_size=1, max_size=20))
def test_the_same_trajectories_give_the_same_answers(learnt: list[TrajectoryWork]) -> None:
    one, other = RemainingAmount(), RemainingAmount()
    for trajectory in learnt:
        for amount in (one, other):
            amount.learn(points_of(trajectory))
    seen = Seen(turn=1, done=40.0)
    assert one.quantiles(seen) == other.quantiles(seen)


def test_before_anything_has_ended_nothing_is_said() -> None:
    assert RemainingAmount().quantiles(Seen(turn=0, done=0.0)) is None
    assert CausalTree().quantiles(()) is None


def test_memory_is_bounded_whatever_comes() -> None:
    amount, tree, rng = RemainingAmount(max_keys=50), CausalTree(max_nodes=40), random.Random(0)
    for _ in range(300):
        sizes = [rng.randint(1, 10_000) for _ in range(rng.randint(1, 40))]
        results = [rng.choice(list(ToolResult)) for _ in sizes]
        amount.learn(points_of(work_of(*sizes)))
        tree.learn(results, [float(size) for size in sizes])
    assert amount.num_keys <= 50
    assert tree.num_nodes <= 40


@pytest.mark.parametrize("views", [VIEWS, (BY_TURN,)])
def test_each_quantile_covers_the_share_it_says_of_what_was_not_learnt(
    views: tuple[View, ...],
) -> None:
    rng = random.Random(7)
    amount = RemainingAmount(views=views)
    covered, num = [0] * len(LEVELS), 0
    for index in range(1600):
        trajectory = work_of(*(int(rng.lognormvariate(5.0, 0.8)) + 1 for _ in range(rng.randint(1, 8))))
        points = points_of(trajectory)
        for seen, left in points if index >= 800 else ():
            found = amount.quantiles(seen)
            assert found is not None
            num += 1
            for place, value in enumerate(found):
                covered[place] += left <= value
        amount.learn(points)
    for level, count in zip(LEVELS, covered, strict=True):
        assert abs(count / num - level) < 0.06, (level, count / num)


def test_siblings_that_have_ended_tell_what_the_turn_does_not() -> None:
    rng = random.Random(3)
    ours, by_turn = RemainingAmount(), RemainingAmount(views=(BY_TURN,))
    losses = [0.0, 0.0]
    for index in range(400):
        size = int(rng.lognormvariate(6.0, 1.2)) + 1
        totals = list[float]()
        for _ in range(4):
            trajectory = work_of(*(max(1, int(size * rng.uniform(0.8, 1.2))) for _ in range(3)))
            points = points_of(trajectory, totals)
            totals.append(float(trajectory.generated_tokens))
            if index >= 200:
                for place, amount in enumerate((ours, by_turn)):
                    for seen, left in points:
                        found = amount.quantiles(seen)
                        assert found is not None
                        losses[place] += pinball(found, left)
            ours.learn(points)
            by_turn.learn(points)
    assert losses[0] < 0.6 * losses[1]


def test_what_has_changed_is_learnt_anew() -> None:
    amount = RemainingAmount()
    for _ in range(600):
        amount.learn(points_of(work_of(100)))
    for _ in range(1200):
        amount.learn(points_of(work_of(1000)))
    found = amount.quantiles(Seen(turn=0, done=0.0))
    assert found is not None and found[0] > 900


def test_at_each_turn_the_long_count_as_often_as_the_short() -> None:
    """Half have 40 turns, half 600: from turn 5 on 35 or 595 are left, in equal shares."""
    amount = RemainingAmount(views=(BY_TURN,))
    for index in range(200):
        amount.learn(points_of(work_of(*[1] * (600 if index % 2 else 40))))
    found = amount.quantiles(Seen(turn=5, done=5.0))
    assert found is not None
    assert found[1] < 40 and found[3] > 550


def test_side_by_side_only_those_count_that_are_already_passed() -> None:
    points = points_of(work_of(100, 100, 100), [150.0, 1000.0], only_shorter=True)
    assert [seen.num_siblings for seen, _ in points] == [0, 0, 1]
    assert [left for _, left in points] == [300.0, 200.0, 100.0]
    assert points[2][0].sibling_mean == 150.0


def test_a_node_of_the_tree_that_has_seen_too_few_asks_the_one_above() -> None:
    tree = CausalTree(min_support=3)
    for _ in range(5):
        tree.learn([ToolResult.OK], [10.0, 5.0])
    tree.learn([ToolResult.ERROR], [100.0, 90.0])
    assert tree.mean((ToolResult.OK,)) == 5.0
    assert tree.mean((ToolResult.ERROR,)) == tree.mean(()) == 25.0


def test_the_quantile_loss_is_least_at_the_truth() -> None:
    assert pinball([3.0] * len(LEVELS), 3.0) == 0.0
    assert pinball([2.0] * len(LEVELS), 3.0) > 0.0 < pinball([4.0] * len(LEVELS), 3.0)
