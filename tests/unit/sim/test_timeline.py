"""Samples of a simulation: bounded in number, spread over the whole time."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from steelyard.sim.timeline import Sample, Timeline


def sample(at_s: float) -> Sample:
    return Sample(
        at_s=at_s, step=0, rollout=1, train=1, reward=0, moving=0, num_live=0, rollout_queue=0, train_backlog=0,
        reward_queue=0, rollout_busy_s=0.0, reward_busy_s=0.0, generated_tokens=0,
    )  # fmt: skip


@given(st.lists(st.floats(1e-6, 1e4), min_size=1, max_size=3000))
def test_there_are_never_too_many_and_their_distances_are_alike(gaps_s: list[float]) -> None:
    timeline, at_s = Timeline(), 0.0
    for gap_s in gaps_s:
        at_s += gap_s
        if at_s >= timeline.due_at_s:
            timeline.add(sample(at_s))
    times = [one.at_s for one in timeline.samples]
    assert 1 <= len(times) <= 401
    assert all(before < after for before, after in itertools.pairwise(times))


def test_a_long_run_is_covered_from_its_start_to_its_end() -> None:
    timeline = Timeline()
    for tick in range(200_000):
        if tick * 0.5 >= timeline.due_at_s:
            timeline.add(sample(tick * 0.5))
    times = [one.at_s for one in timeline.samples]
    assert times[0] == 0.0
    assert times[-1] > 0.99 * 100_000
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert max(gaps) <= 4.0 * min(gaps)
    assert len(times) > 150
