"""What a run has seen of its work: bounded, mergeable, with trends that are none where there is noise only."""

import math
from random import Random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.allocation.drift_forecast import forecast
from steelyard.allocation.work_sketch import TrajectoryFacts, WorkSketch, WorkSketcher, facts_of
from steelyard.allocation.workload import TrajectoryWork, TurnWork
from steelyard.errors import InputError


def trajectory(*turns: tuple[int, int], tool_s: float = 0.0) -> TrajectoryFacts:
    made = tuple(TurnWork(new_prompt_tokens=new, generated_tokens=sampled, tool_s=tool_s) for new, sampled in turns)
    return facts_of(TrajectoryWork(turns=made))


def test_facts_are_those_of_the_turns() -> None:
    facts = trajectory((10, 5), (20, 3), tool_s=2.0)
    assert (facts.num_turns, facts.prompt_tokens, facts.generated_tokens, facts.decoded_tokens) == (2, 30, 8, 6)
    assert (facts.longest_context_tokens, facts.longest_train_tokens, facts.trained_tokens) == (38, 38, 38)
    assert facts.prompt_pairs == 10 * 11 / 2 + 20 * 15 + 20 * 21 / 2
    assert facts.train_pairs == 38 * 39 / 2
    assert facts.tool_s == 4.0


def test_memory_is_bounded_and_the_latest_groups_stay() -> None:
    sketcher = WorkSketcher(max_trajectories=40)
    for number in range(10_000):
        sketcher.add(trajectory((10, 5)), f"g{number // 4}", step=number // 100)
    sketch = sketcher.sketch()
    assert sketch.num_ended == 10_000
    assert [len(group.members) for group in sketch.groups] == [4] * 10
    assert sketch.groups[-1].step == 99


def test_a_group_larger_than_the_bound_stays_whole() -> None:
    sketcher = WorkSketcher(max_trajectories=4)
    for _ in range(8):
        sketcher.add(trajectory((10, 5)), "one", step=0)
    assert [len(group.members) for group in sketcher.sketch().groups] == [8]


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 5000)), min_size=2, max_size=60), st.data())
def test_sketches_of_two_hosts_merge_into_that_of_one(ended: list[tuple[int, int]], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(ended)))
    both, first, second = WorkSketcher(), WorkSketcher(), WorkSketcher()
    for number, (step, tokens) in enumerate(ended):
        for sketcher in (both, first if number < at else second):
            sketcher.add(trajectory((10, tokens)), f"g{number}", step)
    first.merge(second)
    merged, whole = first.sketch(), both.sketch()
    assert merged.num_ended == whole.num_ended
    assert sorted(merged.groups, key=repr) == sorted(whole.groups, key=repr)
    for name, moments in whole.moments.items():
        assert merged.moments[name].mean == pytest.approx(moments.mean, rel=1e-6)
        assert merged.moments[name].weight == pytest.approx(moments.weight, rel=1e-6)
        assert merged.trends[name].slope == pytest.approx(whole.trends[name].slope, rel=1e-3, abs=1e-6)


def seen(growth: float, seed: int) -> WorkSketch:
    rng, sketcher = Random(seed), WorkSketcher(half_life_steps=6.0)
    for step in range(20):
        for member in range(64):
            tokens = max(1, round(500 * math.exp(growth * step + rng.gauss(0.0, 0.5))))
            sketcher.add(trajectory((100, tokens)), f"g{step}.{member // 8}", step)
    return sketcher.sketch()


def test_a_trend_is_found_with_its_error() -> None:
    trend = seen(0.05, seed=1).trends["generated_tokens"]
    assert abs(trend.slope - 0.05) < 4 * trend.error
    assert trend.error < 0.02


def test_errors_of_trends_are_as_large_as_they_say() -> None:
    trends = [seen(0.0, seed).trends["generated_tokens"] for seed in range(40)]
    scores = [trend.slope / trend.error for trend in trends]
    assert 0.6 < math.sqrt(sum(score**2 for score in scores) / len(scores)) < 1.6


def test_a_forecast_carries_a_trend_on_and_shows_how_sure_it_is() -> None:
    points = forecast(seen(0.1, seed=2), horizon_steps=3.0)
    assert sum(point.weight for point in points) == pytest.approx(1.0)
    low, middle, high = sorted(point.growth.generated for point in points)
    assert low < middle < high
    assert middle == pytest.approx(math.exp(0.3), rel=0.1)


def test_nothing_is_forecast_to_more_than_double() -> None:
    assert max(point.growth.generated for point in forecast(seen(0.4, seed=3), horizon_steps=100.0)) <= 2.0


def test_without_a_history_nothing_is_forecast() -> None:
    assert len(forecast(WorkSketch(), horizon_steps=5.0)) == 1


@pytest.mark.parametrize(("field", "value"), [("max_trajectories", 0), ("half_life_steps", 0.0)])
def test_a_sketcher_names_what_cannot_be(field: str, value: float) -> None:
    with pytest.raises(InputError, match=f"{field} must be"):
        WorkSketcher(**{field: value})  # type: ignore[arg-type]


def test_records_go_over_the_wire() -> None:
    sketch = seen(0.0, seed=1)
    assert msgspec.json.decode(msgspec.json.encode(sketch), type=WorkSketch) == sketch
