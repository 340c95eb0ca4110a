"""Workloads: from traces, drawn, and refused."""

import json
import math
import random
import statistics
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.allocation.synthetic import LengthSpec, Phase, SyntheticSpec, draw_workload
from steelyard.allocation.trace_lines import read_traces
from steelyard.allocation.workload import GroupWork, ToolResult, TrajectoryWork, TurnWork, Workload
from steelyard.errors import InputError

TURN: dict[str, Any] = {
    "prompt_tokens_new": 10,
    "generated_tokens": 5,
    "tool": "sql",
    "outcome": "ok",
    "tool_latency_s": 2.0,
}


def line(*turns: dict[str, Any], group: str = "g", task: str = "t") -> bytes:
    return json.dumps({"source": "s", "task_id": task, "group_id": group, "turns": turns}).encode()


def spec(**changes: Any) -> SyntheticSpec:
    settings: dict[str, Any] = {
        "num_groups": 400, "group_size": 4, "turns": LengthSpec(median=6, sigma=0.5),
        "generated_tokens": LengthSpec(median=200, sigma=0.7), "first_prompt_tokens": LengthSpec(median=800),
        "tool_result_tokens": LengthSpec(median=150), "tool_s": LengthSpec(median=1.0, sigma=1.0),
    }  # fmt: skip
    return SyntheticSpec(**{**settings, **changes})


def total(group: GroupWork) -> float:
    return sum(trajectory.generated_tokens for trajectory in group.trajectories)


def test_siblings_of_a_trace_are_joined_in_the_order_of_their_first() -> None:
    workload = read_traces([line(TURN, group="a"), line(TURN, TURN, group="b", task="u"), line(TURN, group="a")], "w")
    assert [(group.task_id, len(group.trajectories)) for group in workload.groups] == [("t", 2), ("u", 1)]
    first, last = workload.groups[1].trajectories[0].turns
    assert (first.tool_s, last.tool_s, first.result) == (2.0, 0.0, ToolResult.OK)


def test_a_call_that_sampled_nothing_joins_the_next() -> None:
    (group,) = read_traces([line({**TURN, "generated_tokens": 0}, {**TURN, "ctx_reset": 1}, TURN)], "w").groups
    (trajectory,) = group.trajectories
    assert [turn.new_prompt_tokens for turn in trajectory.turns] == [20, 10]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"{", "w, line 1 must be a trajectory"),
        (line(), "workload w must have at least one group, got none"),
        (line({**TURN, "prompt_tokens_new": -1}), r"turns\[0\].prompt_tokens_new must be >= 0, got -1"),
        (line({**TURN, "tool_latency_s": None}, TURN), r"turns\[0\].tool_latency_s must be given, or a default"),
        (line({**TURN, "tool_latency_s": -1.0}, TURN), r"turns\[0\].tool_latency_s must be finite and >= 0, got -1"),
        (line({k: v for k, v in TURN.items() if k != "generated_tokens"}), "missing required field `generated_tokens`"),
        (line({**TURN, "outcome": "great"}), "Invalid enum value 'great'"),
    ],
)
def test_a_bad_trace_is_refused_by_line_and_field(text: bytes, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_traces([text], "w")


def test_unlogged_latencies_take_the_default_that_was_given() -> None:
    workload = read_traces([line({**TURN, "tool_latency_s": None}, TURN)], "w", default_tool_s=1.5)
    assert workload.groups[0].trajectories[0].turns[0].tool_s == 1.5


def test_an_empty_workload_is_refused() -> None:
    with pytest.raises(InputError, match="must have at least one group, got none"):
        Workload(name="w", groups=())
    with pytest.raises(InputError, match=r"groups\[0\].trajectories\[0\] must have at least one turn"):
        Workload(name="w", groups=(GroupWork(task_id="t", trajectories=(TrajectoryWork(turns=()),)),))
    turn = TurnWork(new_prompt_tokens=1, generated_tokens=1, tool_s=math.nan)
    with pytest.raises(InputError, match=r"turns\[0\].tool_s must be finite and >= 0, got nan"):
        Workload(name="w", groups=(GroupWork(task_id="t", trajectories=(TrajectoryWork(turns=(turn,)),)),))


def test_contexts_grow_by_prompt_and_reply_and_start_anew_where_the_trace_says_so() -> None:
    turns = tuple(
        TurnWork(new_prompt_tokens=prompt, generated_tokens=5, resets_context=resets)
        for prompt, resets in ((10, False), (3, False), (7, True))
    )
    trajectory = TrajectoryWork(turns=turns)
    assert trajectory.contexts() == (10, 18, 7)
    assert trajectory.longest_context_tokens == 23
    assert trajectory.trained_tokens == 35


@given(st.integers(0, 1000), st.floats(0, 1), st.floats(0, 1), st.floats(0.1, 3))
def test_drawn_contexts_keep_within_their_limit(seed: int, correlation: float, errors: float, goes_on: float) -> None:
    drawn = spec(
        num_groups=5, max_context_tokens=900, correlation=correlation, error_rate=errors, error_continues=goes_on
    )
    workload = draw_workload(drawn, "w", random.Random(seed))
    assert workload == draw_workload(drawn, "w", random.Random(seed))
    assert all(t.longest_context_tokens <= 900 for group in workload.groups for t in group.trajectories)
    assert all(t.turns[-1].tool_s == 0.0 for group in workload.groups for t in group.trajectories)


def test_siblings_resemble_each_other_as_much_as_was_asked_for() -> None:
    def between(correlation: float) -> float:
        one_turn = spec(turns=LengthSpec(median=1), correlation=correlation, num_groups=2000)
        logs = [
            [math.log(trajectory.generated_tokens) for trajectory in group.trajectories]
            for group in draw_workload(one_turn, "w", random.Random(1)).groups
        ]
        within = statistics.fmean(statistics.variance(group) for group in logs)
        return 1.0 - within / statistics.variance([value for group in logs for value in group])

    assert between(0.6) == pytest.approx(0.6, abs=0.05)
    assert between(0.0) == pytest.approx(0.0, abs=0.05)


def test_a_pareto_tail_holds_much_of_the_tokens() -> None:
    heavy = spec(generated_tokens=LengthSpec(median=200, sigma=0.3, tail_frac=0.2, tail_alpha=1.2, longest=1e6))
    lengths = sorted(
        trajectory.generated_tokens
        for group in draw_workload(heavy, "w", random.Random(2)).groups
        for trajectory in group.trajectories
    )
    assert sum(lengths[-len(lengths) // 10 :]) / sum(lengths) > 0.3


def test_failed_calls_make_attempts_longer_or_shorter() -> None:
    def mean_turns(goes_on: float) -> float:
        drawn = draw_workload(spec(error_rate=0.4, error_continues=goes_on), "w", random.Random(3))
        return statistics.fmean(len(t.turns) for group in drawn.groups for t in group.trajectories)

    assert mean_turns(2.0) > 1.1 * mean_turns(1.0)
    assert mean_turns(0.5) < 0.9 * mean_turns(1.0)


def test_phases_step_ramp_and_come_back() -> None:
    step = Phase(first_group=10, num_groups=5, generated_factor=3.0, period_groups=20)
    assert [step.weight(group) for group in (9, 10, 14, 15, 30, 35)] == [0, 1, 1, 0, 1, 0]
    ramp = Phase(first_group=10, num_groups=10, shape="ramp", generated_factor=4.0)
    assert [ramp.weight(group) for group in (5, 10, 15, 20, 99)] == [0, 0, 0.5, 1, 1]
    flat = spec(generated_tokens=LengthSpec(median=200), turns=LengthSpec(median=1), phases=(ramp,), num_groups=30)
    groups = draw_workload(flat, "w", random.Random(4)).groups
    assert [total(groups[index]) / 4 for index in (0, 15, 29)] == [200, 400, 800]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LengthSpec(median=0), "median must be finite and > 0, got 0"),
        (lambda: LengthSpec(median=1, tail_frac=1.5), "tail_frac must be between 0 and 1, got 1.5"),
        (lambda: spec(group_size=0), "group_size must be >= 1, got 0"),
        (lambda: spec(correlation=2.0), "correlation must be between 0 and 1, got 2.0"),
        (lambda: Phase(first_group=0, num_groups=0), "phases.num_groups must be >= 1, got 0"),
        (lambda: Phase(first_group=-1, num_groups=1), "phases.first_group must be >= 0, got -1"),
        (lambda: Phase(first_group=0, num_groups=1, period_groups=0), "phases.period_groups must be >= 1, or null"),
        (lambda: Phase(first_group=0, num_groups=1, tool_factor=0.0), "phases.tool_factor must be finite and > 0"),
        (lambda: draw_workload(spec(), "w", random.Random(1)).regrouped(0), "traces.group_size must be >= 1, got 0"),
        (lambda: spec(error_continues=-1.0), "error_continues must be finite and >= 0, got -1.0"),
    ],
)
def test_absurd_numbers_are_refused_by_name(make: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()
