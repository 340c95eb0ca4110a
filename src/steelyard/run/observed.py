"""What a run did, from its journal, traces and metrics alone: its work and its times, for a simulation of it."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from steelyard import config_file
from steelyard.allocation.observed_speeds import ObservedTurn
from steelyard.allocation.workload import GroupWork, ToolResult, TrajectoryWork, TurnWork, Workload
from steelyard.config import Config
from steelyard.coordinator import events as e
from steelyard.coordinator.journal.base import decode
from steelyard.errors import InputError
from steelyard.observe.rows import StepRow, read_rows, surviving_steps
from steelyard.run.blob_reading import BlobReader, reading_blobs
from steelyard.run.directory import RunDirectory
from steelyard.run.journals import open_journal_reader
from steelyard.types import Purpose, Record, ToolRecord, Trace, Turn


class ObservedStep(Record, frozen=True, kw_only=True):
    """One optimizer step: the places of its groups in the workload, and its seconds.

    ``begun_at_s``: when its batch was complete; ``ended_at_s``: when the weights after it were published, both since
    the Unix epoch. ``publish_s`` is until they were written, ``load_s`` until a replica had proven them.
    """

    step: int
    places: tuple[int, ...]
    begun_at_s: float
    ended_at_s: float
    train_s: float
    publish_s: float
    load_s: float


class ObservedRun(Record, frozen=True, kw_only=True):
    """A run as it was.

    Attributes:
        workload: its groups in the order of their admission, those that were sampled and not trained included.
        turns: its model calls for training, in no order.
        started_at_s: when the first attempt of training was leased.
        start_s: mean time from the lease of an attempt to its first model call; ``end_s`` from its last one to its
            sealed artifact.
        grading_s: median time from an artifact to its score.
        num_resumed: how often it was begun again; the time in between is in its times.
    """

    config: Config
    workload: Workload
    turns: tuple[ObservedTurn, ...]
    steps: tuple[ObservedStep, ...]
    started_at_s: float
    start_s: float
    end_s: float
    grading_s: float
    num_resumed: int

    @property
    def makespan_s(self) -> float:
        """From the first attempt to the end of the last step."""
        return self.steps[-1].ended_at_s - self.steps[-1].publish_s - self.started_at_s


def observe(directory: RunDirectory) -> ObservedRun:
    """Read a run, going on or not.

    Raises:
        InputError: it has trained no step yet.
        IntegrityError: a trace is damaged.
    """
    config = config_file.load(directory.config)
    facts = _Facts()
    for record in open_journal_reader(config, directory).records():
        facts.take(decode(record.payload))
    rows = {row.step: row for row in surviving_steps(read_rows(directory.metrics).rows)}
    groups, turns = list[GroupWork](), list[ObservedTurn]()
    starts_s, ends_s = list[float](), list[float]()
    place_of = dict[str, int]()
    with reading_blobs(directory, config.blobs) as blobs:
        for group_id in sorted(facts.rollouts, key=lambda one: facts.positions[one]):
            traces = list(_traces(facts, group_id, blobs))
            if traces:
                place_of[group_id] = len(groups)
                work = tuple(trajectory_of(trace) for trace in traces)
                groups.append(GroupWork(task_id=facts.tasks[group_id], trajectories=work))
                starts_s += [_in_order(one)[0].started_at_s - facts.leased_at_s[one.attempt_id] for one in traces]
                ends_s += [facts.ready_at_s[one.attempt_id] - _in_order(one)[-1].ended_at_s for one in traces]
                turns += [
                    _observed(turn, done.new_prompt_tokens)
                    for trace, trajectory in zip(traces, work, strict=True)
                    for turn, done in zip(_in_order(trace), trajectory.turns, strict=True)
                ]
    steps = tuple(_steps(facts, rows, place_of))
    if not steps:
        raise InputError(f"RUN must have trained at least one step, got {directory.path} which has trained none yet")
    return ObservedRun(
        config=config,
        workload=Workload(name=directory.path.name, groups=tuple(groups)),
        turns=tuple(turns),
        steps=steps,
        started_at_s=facts.started_at_s,
        start_s=max(0.0, statistics.fmean(starts_s)),
        end_s=max(0.0, statistics.fmean(ends_s)),
        grading_s=statistics.median(facts.gradings_s) if facts.gradings_s else 0.0,
        num_resumed=facts.num_resumed,
    )


def trajectory_of(trace: Trace) -> TrajectoryWork:
    """The work in a sealed trace of at least one turn.

    Between two calls lies all that is not the model: the tool, its sandbox, the harness.
    """
    turns, tools = _in_order(trace), _tools(trace.tools)
    works = list[TurnWork]()
    for before, turn, after in zip([None, *turns], turns, [*turns[1:], None], strict=False):
        extends = before is not None and before.segment_index == turn.segment_index
        held = len(before.prompt_token_ids) + len(before.token_ids) if before is not None and extends else 0
        tool = tools.get(turn.turn_index)
        works.append(
            TurnWork(
                new_prompt_tokens=max(0, len(turn.prompt_token_ids) - held),
                generated_tokens=max(1, len(turn.token_ids)),
                tool_s=0.0 if after is None else max(0.0, after.started_at_s - turn.ended_at_s),
                tool=tool.name if tool is not None else "",
                result=_result(tool),
                resets_context=before is not None and not extends,
            )
        )
    return TrajectoryWork(turns=tuple(works))


def _in_order(trace: Trace) -> list[Turn]:
    return sorted(trace.turns, key=lambda turn: turn.turn_index)


def _observed(turn: Turn, joined_tokens: int) -> ObservedTurn:
    return ObservedTurn(
        replica_id=turn.replica_id,
        started_at_s=turn.started_at_s,
        ended_at_s=turn.ended_at_s,
        joined_tokens=joined_tokens,
        computed_tokens=max(1, len(turn.prompt_token_ids) - turn.num_cached_tokens),
        sampled_tokens=max(1, len(turn.token_ids)),
    )


def _tools(records: Sequence[ToolRecord]) -> dict[int, ToolRecord]:
    """The last tool call after each turn."""
    return {record.turn_index: record for record in records}


def _result(tool: ToolRecord | None) -> ToolResult:
    if tool is None:
        return ToolResult.NONE
    return ToolResult(tool.outcome) if tool.outcome in set(ToolResult) else ToolResult.ERROR


def _traces(facts: "_Facts", group_id: str, blobs: BlobReader) -> Iterator[Trace]:
    """The sealed traces of a group's rollouts, the newest attempt of each."""
    for rollout_id in facts.rollouts[group_id]:
        attempt_id = facts.sealed.get(rollout_id)
        if attempt_id is not None and blobs.has_trace(attempt_id):
            trace, _ = blobs.trace(attempt_id)
            if trace.turns:
                yield trace


def _steps(facts: "_Facts", rows: dict[int, StepRow], place_of: dict[str, int]) -> Iterator[ObservedStep]:
    for step, (begun_at_s, group_ids) in sorted(facts.begun.items()):
        row, ended_at_s = rows.get(step), facts.published.get(step + 1)
        places = tuple(place_of[group_id] for group_id in group_ids if group_id in place_of)
        if row is None or ended_at_s is None or not places:
            continue
        yield ObservedStep(
            step=step,
            places=places,
            begun_at_s=begun_at_s,
            ended_at_s=ended_at_s,
            train_s=row.train_s,
            publish_s=row.publish_s,
            load_s=row.load_s,
        )


@dataclass
class _Facts:
    """What the journal says. A group that is restarted has new rollouts; a step that is begun again, new times."""

    tasks: dict[str, str] = field(default_factory=dict)
    positions: dict[str, int] = field(default_factory=dict)
    rollouts: dict[str, tuple[str, ...]] = field(default_factory=dict)
    rollout_of: dict[str, str] = field(default_factory=dict)
    sealed: dict[str, str] = field(default_factory=dict)
    leased_at_s: dict[str, float] = field(default_factory=dict)
    ready_at_s: dict[str, float] = field(default_factory=dict)
    gradings_s: list[float] = field(default_factory=list)
    begun: dict[int, tuple[float, tuple[str, ...]]] = field(default_factory=dict)
    published: dict[int, float] = field(default_factory=dict)
    trained: set[str] = field(default_factory=set)
    started_at_s: float = float("inf")
    num_resumed: int = 0

    def take(self, event: e.AnyEvent) -> None:
        match event:
            case e.RunResumed():
                self.num_resumed += 1
            case e.GroupAdmitted() if event.purpose is Purpose.TRAIN:
                self.tasks[event.group_id] = event.task_id
                self.positions[event.group_id] = len(self.positions)
                self._has(event.group_id, event.rollout_ids)
            case e.GroupRestarted() if event.group_id in self.positions:
                self._has(event.group_id, event.rollout_ids)
            case e.Leased() if event.rollout_id in self.trained:
                self.started_at_s = min(self.started_at_s, event.at_s)
                self.rollout_of[event.attempt_id] = event.rollout_id
                self.leased_at_s[event.attempt_id] = event.at_s
            case e.ArtifactReady() if event.report.attempt_id in self.rollout_of:
                self.sealed[self.rollout_of[event.report.attempt_id]] = event.report.attempt_id
                self.ready_at_s[event.report.attempt_id] = event.at_s
            case e.Scored() if event.score.attempt_id in self.ready_at_s:
                self.gradings_s.append(event.at_s - self.ready_at_s[event.score.attempt_id])
            case e.StepBegun():
                self.begun[event.step] = (event.at_s, event.group_ids)
            case e.StepVoided():
                self.begun.pop(event.step, None)
            case e.VersionPublished():
                self.published[event.step] = event.at_s
            case _:
                pass

    def _has(self, group_id: str, rollout_ids: tuple[str, ...]) -> None:
        self.rollouts[group_id] = rollout_ids
        self.trained.update(rollout_ids)
