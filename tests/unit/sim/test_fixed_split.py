"""The best fixed split: what is ranked, what is simulated, and that it is the best of them."""

import random
from typing import Any

import pytest

from steelyard.allocation.moving_cost import MovingRates
from steelyard.allocation.policies import FixedPolicy
from steelyard.allocation.roofline import IDEAL
from steelyard.allocation.snapshot import Limits
from steelyard.allocation.synthetic import LengthSpec, SyntheticSpec, draw_workload
from steelyard.errors import InputError
from steelyard.sim.faults import FailureRate, Faults
from steelyard.sim.fixed_split import find_fixed_split, rank_splits, shortened
from steelyard.sim.setup import SimSetup
from steelyard.sim.simulation import Simulation
from steelyard.testing.toy_devices import TOY_MODEL, toy_device

LIMITS = Limits(total=6, min_rollout=1, min_train=2)


def setup(generated: float = 60, steps: int = 10, **changes: Any) -> SimSetup:
    spec = SyntheticSpec(
        num_groups=20,
        group_size=3,
        turns=LengthSpec(median=2, sigma=0.4),
        generated_tokens=LengthSpec(median=generated, sigma=0.5),
        first_prompt_tokens=LengthSpec(median=200, sigma=0.3),
        tool_result_tokens=LengthSpec(median=50, sigma=0.5),
        tool_s=LengthSpec(median=0.01),
        max_context_tokens=4096,
    )
    made: dict[str, Any] = {
        "name": "s", "device": toy_device(4e9), "num_devices": 6, "model": TOY_MODEL, "corrections": IDEAL,
        "num_steps": steps, "groups_per_batch": 2, "max_policy_lag": 1,
        "workload": draw_workload(spec, "w", random.Random(1)),
        "rates": MovingRates(start_s=0.1, release_s=0.05),
    }  # fmt: skip
    return SimSetup(**{**made, **changes})


def test_the_one_that_is_found_is_the_best_of_those_that_were_simulated_whole() -> None:
    made, lines = setup(), list[str]()
    found = find_fixed_split(made, LIMITS, num_short=6, num_full=3, on_run=lines.append)
    assert len(found.short) == 6 and len(found.full) == 3
    assert lines[0].startswith("short run 1 of 6: ") and lines[-1].startswith("whole run 3 of 3: ")
    assert found.split == found.full[0][0]
    assert found.result.makespan_s == min(makespan_s for _, makespan_s in found.full)
    again = Simulation(made, found.split, LIMITS, FixedPolicy(), "fixed").run()
    assert again.makespan_s == found.result.makespan_s


def test_it_is_as_good_as_any_layout_on_small_work() -> None:
    made = setup(steps=4)
    best_s = min(
        Simulation(made, one.split, LIMITS, FixedPolicy(), "fixed").run().makespan_s
        for one in rank_splits(made, LIMITS)
    )
    assert find_fixed_split(made, LIMITS).result.makespan_s <= 1.02 * best_s


def test_every_layout_leaves_no_more_devices_idle_than_it_must() -> None:
    ranked = rank_splits(setup(), LIMITS)
    assert len({one.split for one in ranked}) == len(ranked)
    assert {one.split.rollout_tp for one in ranked} == {1, 2, 4}
    assert all(LIMITS.total - one.split.total < one.split.rollout_tp for one in ranked)
    assert [one.period_s for one in ranked] == sorted(one.period_s for one in ranked)


def test_more_sampling_asks_for_more_devices_to_sample() -> None:
    short, long = (rank_splits(setup(generated), LIMITS)[0].split for generated in (5, 600))
    assert long.rollout >= short.rollout
    assert long.rollout > 1


def test_a_short_run_has_batches_from_all_over_the_work_and_nothing_dies_in_it() -> None:
    whole = setup(faults=Faults(failure_rate=FailureRate(mean_between_s=100.0, returns_after_s=1.0)))
    short = shortened(whole, 0.3)
    assert (short.num_steps, len(short.workload.groups)) == (3, 6)
    batches = [groups.task_id for groups in short.workload.groups[::2]]
    assert batches == ["task_2", "task_8", "task_16"]
    assert short.faults == Faults()


def test_where_nothing_fits_it_says_why() -> None:
    with pytest.raises(InputError, match=r"s: a fixed split must exist: s: limits\.min_train must be >= "):
        rank_splits(setup(device=toy_device(1.2e8)), Limits(total=6, min_rollout=1, min_train=1))
