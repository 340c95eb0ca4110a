"""What a run has to do, in numbers: turns of trajectories, their tokens and tools, grouped by task."""

from enum import StrEnum

from steelyard.errors import InputError
from steelyard.types.record import Record


class ToolResult(StrEnum):
    """How a tool call ended; ``none``: it was no call, or nobody says."""

    OK = "ok"
    ERROR = "error"
    TIMEOUT = "timeout"
    NONE = "none"


class TurnWork(Record, frozen=True, kw_only=True):
    """One model call and the tool call after it.

    Attributes:
        new_prompt_tokens: that joined the context since the last call, without the model's own output.
        generated_tokens: sampled in this call.
        tool_s: from the end of the call to the next one; 0 after the last.
        resets_context: the context starts anew with this call's prompt.
    """

    new_prompt_tokens: int
    generated_tokens: int
    tool_s: float = 0.0
    tool: str = ""
    result: ToolResult = ToolResult.NONE
    resets_context: bool = False


class TrajectoryWork(Record, frozen=True, kw_only=True):
    """One rollout, at least one turn."""

    turns: tuple[TurnWork, ...]

    @property
    def generated_tokens(self) -> int:
        """Sampled tokens."""
        return sum(turn.generated_tokens for turn in self.turns)

    @property
    def trained_tokens(self) -> int:
        """Tokens of all its segments, prompts included: what a training step computes."""
        return sum(turn.new_prompt_tokens + turn.generated_tokens for turn in self.turns)

    @property
    def tool_s(self) -> float:
        """Seconds in tools."""
        return sum(turn.tool_s for turn in self.turns)

    @property
    def longest_context_tokens(self) -> int:
        """The longest context that any of its calls ends with."""
        return max(context + turn.generated_tokens for turn, context in zip(self.turns, self.contexts(), strict=True))

    def contexts(self) -> tuple[int, ...]:
        """For each turn, the tokens of its whole prompt."""
        contexts, held = list[int](), 0
        for turn in self.turns:
            held = turn.new_prompt_tokens + (0 if turn.resets_context else held)
            contexts.append(held)
            held += turn.generated_tokens
        return tuple(contexts)


class GroupWork(Record, frozen=True, kw_only=True):
    """Sibling rollouts of one task."""

    task_id: str
    trajectories: tuple[TrajectoryWork, ...]


class Workload(Record, frozen=True, kw_only=True):
    """Groups in the order in which they are admitted; who needs more starts again at the first.

    Raises:
        InputError: there is no group, a group without a trajectory, or a trajectory without a turn; names which.
    """

    name: str
    groups: tuple[GroupWork, ...]

    def __post_init__(self) -> None:
        if not self.groups:
            raise InputError(f"workload {self.name} must have at least one group, got none")
        for index, group in enumerate(self.groups):
            if not group.trajectories:
                raise InputError(f"workload {self.name}: groups[{index}] must have at least one trajectory, got none")
            for place, trajectory in enumerate(group.trajectories):
                _check(trajectory, f"workload {self.name}: groups[{index}].trajectories[{place}]")

    def regrouped(self, group_size: int) -> "Workload":
        """The same with ``group_size`` trajectories in every group: the first ones, and again from the first on.

        Raises:
            InputError: ``group_size`` is below 1.
        """
        if group_size < 1:
            raise InputError(f"traces.group_size must be >= 1, got {group_size}")
        groups = tuple(
            GroupWork(
                task_id=group.task_id,
                trajectories=tuple(group.trajectories[i % len(group.trajectories)] for i in range(group_size)),
            )
            for group in self.groups
        )
        return Workload(name=self.name, groups=groups)

    def group(self, position: int) -> GroupWork:
        """The group that is admitted at ``position``, counted from 0 without end."""
        return self.groups[position % len(self.groups)]


def _check(trajectory: TrajectoryWork, where: str) -> None:
    if not trajectory.turns:
        raise InputError(f"{where} must have at least one turn, got none")
    for index, turn in enumerate(trajectory.turns):
        for field, least in (("new_prompt_tokens", 0), ("generated_tokens", 1), ("tool_s", 0)):
            value = getattr(turn, field)
            if not least <= value < float("inf"):
                raise InputError(f"{where}.turns[{index}].{field} must be finite and >= {least}, got {value}")
