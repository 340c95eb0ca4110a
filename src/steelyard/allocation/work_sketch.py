"""What a run has seen of its work, in bounded memory: for planners, whose time must not grow with history.

Three parts, all of one pass with O(1) a trajectory:

- the latest groups whole, numbers only: distributions, slowest members and what belongs together are read off them;
- moments of each quantity under recency decay;
- trends: slope of the logarithm over optimizer steps by decayed least squares, with its standard error.

The latest groups are the quantile sketch: a sample that is exact for what is recent, and of bounded size.
"""

import math
from collections.abc import Mapping

import msgspec

from steelyard.allocation.workload import TrajectoryWork
from steelyard.errors import InputError
from steelyard.types.record import Record

QUANTITIES = ("num_turns", "prompt_tokens", "generated_tokens", "tool_s", "longest_context_tokens")
"""Fields of :class:`TrajectoryFacts` of which moments and trends are kept."""


class TrajectoryFacts(Record, frozen=True, kw_only=True):
    """What one trajectory costs, whatever does it.

    Attributes:
        prompt_tokens: computed by prefill once, when KV is kept between turns.
        decoded_tokens: sampled ones, without the first of each turn: that one comes out of its prefill.
        kv_read_tokens: sum over decoded tokens of the context that each reads.
        prompt_pairs: sum over prompt tokens of the context before each.
        train_pairs: the same over all tokens, as training computes them.
        longest_context_tokens: the longest context that a call ends with.
        longest_train_tokens: the longest segment.
        tool_s: seconds in tools.
    """

    num_turns: int
    prompt_tokens: int
    generated_tokens: int
    decoded_tokens: int
    kv_read_tokens: float
    prompt_pairs: float
    train_pairs: float
    longest_context_tokens: int
    longest_train_tokens: int
    tool_s: float

    @property
    def trained_tokens(self) -> int:
        """What a training step computes for it."""
        return self.prompt_tokens + self.generated_tokens


def facts_of(trajectory: TrajectoryWork) -> TrajectoryFacts:
    """The facts of one whole trajectory."""
    kv_read = prompt_pairs = train_pairs = 0.0
    decoded = segment = longest_segment = longest_context = 0
    for turn, context in zip(trajectory.turns, trajectory.contexts(), strict=True):
        new, sampled = turn.new_prompt_tokens, turn.generated_tokens
        decoded += sampled - 1
        kv_read += (sampled - 1) * (context + sampled / 2)
        prompt_pairs += new * (context - new) + new * (new + 1) / 2
        segment = 0 if turn.resets_context else segment
        added = new + sampled
        train_pairs += added * segment + added * (added + 1) / 2
        segment += added
        longest_segment = max(longest_segment, segment)
        longest_context = max(longest_context, context + sampled)
    return TrajectoryFacts(
        num_turns=len(trajectory.turns),
        prompt_tokens=sum(turn.new_prompt_tokens for turn in trajectory.turns),
        generated_tokens=trajectory.generated_tokens,
        decoded_tokens=decoded,
        kv_read_tokens=kv_read,
        prompt_pairs=prompt_pairs,
        train_pairs=train_pairs,
        longest_context_tokens=longest_context,
        longest_train_tokens=longest_segment,
        tool_s=trajectory.tool_s,
    )


class GroupFacts(Record, frozen=True, kw_only=True):
    """The members of one group that have ended so far. ``step``: optimizer steps done when the last of them did."""

    step: int
    members: tuple[TrajectoryFacts, ...]


class Moments(Record, frozen=True, kw_only=True):
    """Of one quantity, under recency decay; ``weight`` is the decayed number of trajectories."""

    weight: float
    mean: float
    second_moment: float

    @property
    def deviation(self) -> float:
        """Standard deviation."""
        return math.sqrt(max(0.0, self.second_moment - self.mean**2))


class Trend(Record, frozen=True, kw_only=True):
    """How the logarithm of a quantity changes an optimizer step: ``slope`` give or take ``error`` (its standard error,
    infinite while nothing can be told)."""

    slope: float = 0.0
    error: float = math.inf


class LiveWork(Record, frozen=True, kw_only=True):
    """What is under way.

    Attributes:
        num_generating: attempts with a call in an engine.
        num_in_tools: attempts between two calls.
        num_waiting: attempts whose call waits for a place.
        by_remaining_tokens: attempts by what they are predicted to generate still: the number with less than
            ``2 ** (i + 1)`` tokens and not less than ``2 ** i`` at place ``i``; empty where nobody predicts.
    """

    num_generating: int = 0
    num_in_tools: int = 0
    num_waiting: int = 0
    by_remaining_tokens: tuple[int, ...] = ()


class WorkSketch(Record, frozen=True, kw_only=True):
    """What is known at one instant.

    Attributes:
        num_ended: trajectories that were counted in all.
        groups: the latest groups, the latest last.
        moments, trends: by quantity, of :data:`QUANTITIES`; only those of which something is known.
        live: what is under way.
    """

    num_ended: int = 0
    groups: tuple[GroupFacts, ...] = ()
    moments: Mapping[str, Moments] = msgspec.field(default_factory=dict)
    trends: Mapping[str, Trend] = msgspec.field(default_factory=dict)
    live: LiveWork = LiveWork()


class WorkSketcher:
    """Takes trajectories in as they end. Memory is bounded by ``max_trajectories``, whatever the history.

    Args:
        max_trajectories: kept whole; at least one group stays whatever its size.
        half_life_steps: after so many optimizer steps a trajectory counts half, in moments and trends.
    """

    def __init__(self, max_trajectories: int = 512, half_life_steps: float = 4.0) -> None:
        if max_trajectories < 1:
            raise InputError(f"max_trajectories must be >= 1, got {max_trajectories}")
        if not 0.0 < half_life_steps < math.inf:
            raise InputError(f"half_life_steps must be finite and > 0, got {half_life_steps}")
        self._max_trajectories = max_trajectories
        self._decay_rate = math.log(2.0) / half_life_steps
        self._groups: dict[str, GroupFacts] = {}
        self._sums = {name: _Sums() for name in QUANTITIES}
        self._num_ended = self._num_kept = 0

    def add(self, facts: TrajectoryFacts, group_id: str, step: int) -> None:
        """One trajectory of a group has ended, after ``step`` optimizer steps."""
        known = self._groups.pop(group_id, None)
        members = (*known.members, facts) if known is not None else (facts,)
        self._groups[group_id] = GroupFacts(step=step, members=members)
        self._num_ended += 1
        self._num_kept += 1
        self._forget()
        for name, sums in self._sums.items():
            sums.add(float(getattr(facts, name)), step, self._decay_rate)

    def merge(self, other: "WorkSketcher") -> None:
        """Take in what another has seen, of other groups: live, each host may have its own."""
        both = [*self._groups.items(), *other._groups.items()]
        self._groups = dict(sorted(both, key=lambda pair: pair[1].step))
        self._num_ended += other._num_ended
        self._num_kept = sum(len(group.members) for group in self._groups.values())
        self._forget()
        for name, sums in self._sums.items():
            sums.merge(other._sums[name], self._decay_rate)

    def sketch(self, live: LiveWork | None = None) -> WorkSketch:
        """What is known now."""
        known = {name: sums for name, sums in self._sums.items() if sums.weight > 0.0}
        return WorkSketch(
            num_ended=self._num_ended,
            groups=tuple(self._groups.values()),
            moments={name: sums.moments() for name, sums in known.items()},
            trends={name: sums.trend() for name, sums in known.items()},
            live=live if live is not None else LiveWork(),
        )

    def _forget(self) -> None:
        """Groups of which nothing was heard for longest go first."""
        while self._num_kept > self._max_trajectories and len(self._groups) > 1:
            oldest = next(iter(self._groups))
            self._num_kept -= len(self._groups.pop(oldest).members)


class _Sums:
    """Decayed sums of one quantity ``v``, and of ``y = log(v + 1)`` over ``x``, steps counted from the latest one."""

    def __init__(self) -> None:
        self.step = 0
        self.weight = self.value = self.square = 0.0
        self.square_weight = self.x = self.y = self.xx = self.xy = self.yy = 0.0

    def add(self, value: float, step: int, decay_rate: float) -> None:
        self._advance(max(step, self.step), decay_rate)
        # What comes late, in step order, counts as what it is: older.
        x = float(step - self.step)
        weight, y = math.exp(decay_rate * x), math.log1p(value)
        self.weight += weight
        self.square_weight += weight * weight
        self.value += weight * value
        self.square += weight * value * value
        self.x += weight * x
        self.y += weight * y
        self.xx += weight * x * x
        self.xy += weight * x * y
        self.yy += weight * y * y

    def merge(self, other: "_Sums", decay_rate: float) -> None:
        step = max(self.step, other.step)
        self._advance(step, decay_rate)
        moved = _Sums()
        for name, value in vars(other).items():
            setattr(moved, name, value)
        moved._advance(step, decay_rate)
        for name in ("weight", "square_weight", "value", "square", "x", "y", "xx", "xy", "yy"):
            setattr(self, name, getattr(self, name) + getattr(moved, name))

    def moments(self) -> Moments:
        mean = self.value / self.weight
        return Moments(weight=self.weight, mean=mean, second_moment=self.square / self.weight)

    def trend(self) -> Trend:
        """Weighted least squares; weights are no precisions, so the error is that of the sandwich estimate with equal
        variances: ``var * sum(w^2 x^2) / sum(w x^2)^2``, with ``sum(w^2 x^2) / sum(w x^2)`` taken as the mean weight.
        """
        mean_x, mean_y = self.x / self.weight, self.y / self.weight
        spread_x = self.xx - self.weight * mean_x**2
        effective = self.weight**2 / self.square_weight
        if spread_x <= 1e-9 * self.weight or effective <= 3.0:
            return Trend()
        slope = (self.xy - self.weight * mean_x * mean_y) / spread_x
        residual = max(0.0, self.yy - self.weight * mean_y**2 - slope * slope * spread_x) / self.weight
        variance = residual * effective / (effective - 2.0)
        mean_weight = self.square_weight / self.weight
        return Trend(slope=slope, error=math.sqrt(variance * mean_weight / spread_x))

    def _advance(self, step: int, decay_rate: float) -> None:
        """Let ``step`` be the origin: all that was is older by the difference, and counts less."""
        by = float(step - self.step)
        if by <= 0.0:
            return
        self.step = step
        self.xx += -2.0 * by * self.x + by * by * self.weight
        self.xy -= by * self.y
        self.x -= by * self.weight
        factor = math.exp(-decay_rate * by)
        for name in ("weight", "value", "square", "x", "y", "xx", "xy", "yy"):
            setattr(self, name, getattr(self, name) * factor)
        self.square_weight *= factor * factor
