"""Work as planners see it, drawn: coding agents with long tails."""

from random import Random

from steelyard.allocation.synthetic import LengthSpec, SyntheticSpec, draw_workload
from steelyard.allocation.work_sketch import GroupFacts, facts_of


def agent_groups(number: int, seed: int = 0, step: int = 0, scale: float = 1.0) -> tuple[GroupFacts, ...]:
    """So many groups of 8, ended after ``step`` steps, with answers ``scale`` times as long as usual."""
    spec = SyntheticSpec(
        num_groups=number,
        group_size=8,
        turns=LengthSpec(median=8, sigma=0.6, longest=40),
        generated_tokens=LengthSpec(median=250 * scale, sigma=0.8, longest=8192),
        first_prompt_tokens=LengthSpec(median=2500, sigma=0.4, longest=12000),
        tool_result_tokens=LengthSpec(median=350, sigma=1.0, longest=8000),
        tool_s=LengthSpec(median=0.8, sigma=1.2, longest=60),
        max_context_tokens=40_000,
    )
    groups = draw_workload(spec, "agents", Random(seed)).groups
    return tuple(GroupFacts(step=step, members=tuple(facts_of(one) for one in group.trajectories)) for group in groups)
