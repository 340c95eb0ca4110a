"""Workloads from normalised traces: one JSON object a line, numbers only."""

from collections.abc import Iterable

import msgspec

from steelyard.allocation.workload import GroupWork, ToolResult, TrajectoryWork, TurnWork, Workload
from steelyard.errors import InputError


class _Turn(msgspec.Struct, frozen=True):
    prompt_tokens_new: int
    generated_tokens: int
    outcome: ToolResult
    tool: str | None = None
    tool_latency_s: float | None = None
    ctx_reset: bool | int = False


class _Trajectory(msgspec.Struct, frozen=True):
    task_id: str
    group_id: str
    turns: tuple[_Turn, ...]


def read_traces(lines: Iterable[bytes], name: str, *, default_tool_s: float | None = None) -> Workload:
    """A workload of the trajectories in ``lines``, siblings together, in the order of their first one.

    A turn in which nothing was sampled joins the one after it; one at the end falls away.

    Args:
        name: of the workload, and for messages.
        default_tool_s: for calls whose latency was not logged; None refuses them.

    Raises:
        InputError: names line and field of what is missing or absurd, and what would fit.
    """
    groups: dict[str, tuple[str, list[TrajectoryWork]]] = {}
    decoder = msgspec.json.Decoder(_Trajectory)
    for number, line in enumerate(lines, 1):
        where = f"{name}, line {number}"
        try:
            found = decoder.decode(line)
        except msgspec.MsgspecError as error:
            raise InputError(f"{where} must be a trajectory: {error}") from error
        turns = _turns(found.turns, where, default_tool_s)
        if not turns:
            raise InputError(f"{where}: turns must hold at least one turn with generated_tokens >= 1, got none")
        task_id, members = groups.setdefault(found.group_id, (found.task_id, []))
        if task_id != found.task_id:
            raise InputError(f"{where}: task_id must be {task_id}, as of the rest of its group, got {found.task_id}")
        members.append(TrajectoryWork(turns=turns))
    works = (GroupWork(task_id=task_id, trajectories=tuple(members)) for task_id, members in groups.values())
    return Workload(name=name, groups=tuple(works))


def _turns(raw: tuple[_Turn, ...], where: str, default_tool_s: float | None) -> tuple[TurnWork, ...]:
    turns = list[TurnWork]()
    waiting_tokens, resets = 0, False
    for index, turn in enumerate(raw):
        place = f"{where}: turns[{index}]"
        for field, value in (
            ("prompt_tokens_new", turn.prompt_tokens_new),
            ("generated_tokens", turn.generated_tokens),
        ):
            if value < 0:
                raise InputError(f"{place}.{field} must be >= 0, got {value}")
        waiting_tokens += turn.prompt_tokens_new
        resets = resets or bool(turn.ctx_reset)
        if turn.generated_tokens == 0:
            continue
        is_last = index == len(raw) - 1
        turns.append(
            TurnWork(
                new_prompt_tokens=waiting_tokens,
                generated_tokens=turn.generated_tokens,
                tool_s=0.0 if is_last else _tool_s(turn, place, default_tool_s),
                tool=turn.tool or "",
                result=turn.outcome,
                resets_context=resets and bool(turns),
            )
        )
        waiting_tokens, resets = 0, False
    return tuple(turns)


def _tool_s(turn: _Turn, place: str, default_tool_s: float | None) -> float:
    value = turn.tool_latency_s if turn.tool_latency_s is not None else default_tool_s
    if value is None:
        raise InputError(
            f"{place}.tool_latency_s must be given, or a default for calls that were not timed (tool_s=1.0), got null"
        )
    if not 0.0 <= value < float("inf"):
        raise InputError(f"{place}.tool_latency_s must be finite and >= 0, got {value}")
    return value
