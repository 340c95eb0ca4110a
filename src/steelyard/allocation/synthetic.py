"""Workloads that are drawn: long tails, siblings that resemble each other, tools that fail, drift and bursts."""

import math
import random
from typing import Literal

import msgspec

from steelyard.allocation.workload import GroupWork, ToolResult, TrajectoryWork, TurnWork, Workload
from steelyard.errors import InputError
from steelyard.types.record import Record


class LengthSpec(Record, frozen=True, kw_only=True):
    """A positive quantity: log-normal around ``median``, and with probability ``tail_frac`` Pareto from there on.

    Attributes:
        sigma: standard deviation of the logarithm.
        tail_alpha: exponent of the tail; the mean is finite above 1.
        longest: draws are cut there.
    """

    median: float
    sigma: float = 0.0
    tail_frac: float = 0.0
    tail_alpha: float = 1.5
    longest: float = 1e9

    def __post_init__(self) -> None:
        for field in ("median", "tail_alpha", "longest"):
            if not 0.0 < getattr(self, field) < math.inf:
                raise InputError(f"{field} must be finite and > 0, got {getattr(self, field)}")
        if not 0.0 <= self.sigma < math.inf:
            raise InputError(f"sigma must be finite and >= 0, got {self.sigma}")
        if not 0.0 <= self.tail_frac <= 1.0:
            raise InputError(f"tail_frac must be between 0 and 1, got {self.tail_frac}")

    def draw(self, rng: random.Random, shared: float, correlation: float) -> float:
        """One value.

        Args:
            shared: a standard normal that siblings have in common.
            correlation: the share of the variance of the logarithm that comes from ``shared``.
        """
        own = rng.gauss(0.0, 1.0)
        normal = math.sqrt(correlation) * shared + math.sqrt(1.0 - correlation) * own
        value = self.median * math.exp(self.sigma * normal)
        if self.tail_frac and rng.random() < self.tail_frac:
            value = max(value, self.median * rng.paretovariate(self.tail_alpha))
        return min(value, self.longest)


class Phase(Record, frozen=True, kw_only=True):
    """From ``first_group`` on, for ``num_groups``, quantities are multiplied; ``period_groups`` repeats it.

    ``shape`` ``step`` changes at once; ``ramp`` grows in equal ratios up to the factor over ``num_groups``, and stays.
    """

    first_group: int
    num_groups: int
    shape: Literal["step", "ramp"] = "step"
    period_groups: int | None = None
    turns_factor: float = 1.0
    generated_factor: float = 1.0
    prompt_factor: float = 1.0
    tool_factor: float = 1.0

    def __post_init__(self) -> None:
        for field, least in (("first_group", 0), ("num_groups", 1)):
            if getattr(self, field) < least:
                raise InputError(f"phases.{field} must be >= {least}, got {getattr(self, field)}")
        if self.period_groups is not None and self.period_groups < 1:
            raise InputError(f"phases.period_groups must be >= 1, or null for once only, got {self.period_groups}")
        for field in ("turns_factor", "generated_factor", "prompt_factor", "tool_factor"):
            if not 0.0 < getattr(self, field) < math.inf:
                raise InputError(f"phases.{field} must be finite and > 0, got {getattr(self, field)}")

    def weight(self, group: int) -> float:
        """How far the phase is in force: 0 not at all, 1 in full."""
        since = group - self.first_group
        if since < 0:
            return 0.0
        if self.period_groups is not None:
            since %= self.period_groups
        if self.shape == "ramp":
            return min(1.0, since / self.num_groups)
        return 1.0 if since < self.num_groups else 0.0


class SyntheticSpec(Record, frozen=True, kw_only=True):
    """What to draw.

    Attributes:
        correlation: share of the variance of log length between tasks; the rest is within a task.
        error_rate: share of tool calls that fail.
        error_continues: by how much more (or less) often an attempt goes on after a failed call than after another.
    """

    num_groups: int
    group_size: int
    turns: LengthSpec
    generated_tokens: LengthSpec
    first_prompt_tokens: LengthSpec
    tool_result_tokens: LengthSpec
    tool_s: LengthSpec
    correlation: float = 0.5
    error_rate: float = 0.0
    error_continues: float = 1.0
    max_context_tokens: int = 131_072
    phases: tuple[Phase, ...] = ()

    def __post_init__(self) -> None:
        for field, least in (("num_groups", 1), ("group_size", 1), ("max_context_tokens", 2)):
            if getattr(self, field) < least:
                raise InputError(f"{field} must be >= {least}, got {getattr(self, field)}")
        for field in ("correlation", "error_rate"):
            if not 0.0 <= getattr(self, field) <= 1.0:
                raise InputError(f"{field} must be between 0 and 1, got {getattr(self, field)}")
        if not 0.0 <= self.error_continues < math.inf:
            raise InputError(f"error_continues must be finite and >= 0, got {self.error_continues}")


def draw_workload(spec: SyntheticSpec, name: str, rng: random.Random) -> Workload:
    """A workload; the same for the same generator state."""
    return Workload(name=name, groups=tuple(_group(spec, index, rng) for index in range(spec.num_groups)))


def _group(spec: SyntheticSpec, index: int, rng: random.Random) -> GroupWork:
    shared = rng.gauss(0.0, 1.0)
    factors = {
        field: math.prod(getattr(phase, field) ** phase.weight(index) for phase in spec.phases)
        for field in ("turns_factor", "generated_factor", "prompt_factor", "tool_factor")
    }
    members = (_trajectory(spec, shared, factors, rng) for _ in range(spec.group_size))
    return GroupWork(task_id=f"task_{index}", trajectories=tuple(members))


def _trajectory(spec: SyntheticSpec, shared: float, factors: dict[str, float], rng: random.Random) -> TrajectoryWork:
    wanted = spec.turns.draw(rng, shared, spec.correlation) * factors["turns_factor"]
    turns = list[TurnWork]()
    context, spent = 0, 0.0
    while spent < wanted or not turns:
        prompt_spec = spec.tool_result_tokens if turns else spec.first_prompt_tokens
        prompt = max(1, round(prompt_spec.draw(rng, shared, spec.correlation) * factors["prompt_factor"]))
        generated = spec.generated_tokens.draw(rng, shared, spec.correlation) * factors["generated_factor"]
        room = spec.max_context_tokens - context
        if turns and room < prompt + 1:
            break
        prompt = min(prompt, max(1, room - 1))
        sampled = max(1, min(round(generated), room - prompt))
        failed = rng.random() < spec.error_rate
        # Outcomes change how long an attempt goes on: after a failed call less, or more, of its turns is used up.
        if failed:
            spent += 1.0 / spec.error_continues if spec.error_continues > 0.0 else wanted
        else:
            spent += 1.0
        turns.append(
            TurnWork(
                new_prompt_tokens=prompt,
                generated_tokens=sampled,
                tool_s=spec.tool_s.draw(rng, shared, 0.0) * factors["tool_factor"],
                tool="tool",
                result=ToolResult.ERROR if failed else ToolResult.OK,
            )
        )
        context += prompt + sampled
    turns[-1] = msgspec.structs.replace(turns[-1], tool_s=0.0)
    return TrajectoryWork(turns=tuple(turns))
