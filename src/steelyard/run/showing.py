"""The rollouts of a run as text, from journal and stores alone."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from steelyard import config_file
from steelyard.coordinator import events as e
from steelyard.coordinator.journal.base import decode
from steelyard.errors import InputError, IntegrityError
from steelyard.gateway.codec import TokenCodec
from steelyard.run.blob_reading import BlobReader, reading_blobs
from steelyard.run.directory import RunDirectory
from steelyard.run.journals import open_journal_reader
from steelyard.traces.export import show_trace
from steelyard.types import Score


@dataclass
class _Rollout:
    """What the journal says of one rollout, its newest attempt last."""

    rollout_id: str
    task_id: str
    purpose: str
    attempt_ids: list[str] = field(default_factory=list)
    fates: list[str] = field(default_factory=list)
    scores: dict[str, Score] = field(default_factory=dict)
    step: int | None = None


def list_rollouts(directory: RunDirectory, num_last: int) -> Iterator[str]:
    """One line for each of the newest ``num_last`` rollouts that were leased."""
    rollouts = [rollout for rollout in _read(directory).values() if rollout.attempt_ids]
    if not rollouts:
        yield "no rollout was leased yet"
        return
    yield f"{len(rollouts)} rollouts; the last {min(num_last, len(rollouts))}:"
    for rollout in rollouts[-num_last:]:
        yield f"{rollout.rollout_id}  {rollout.purpose:<10}  {rollout.task_id:<28}  {_verdict(rollout)}"
    yield f"to see one, type: steelyard show {directory.path.name} {rollouts[-1].rollout_id}"


def show_rollout(directory: RunDirectory, wanted: str, *, with_tokens: bool) -> str:
    """Everything about one rollout, by its id or that of one of its attempts.

    Raises:
        InputError: the run has no such rollout.
        IntegrityError: its trace is damaged, or no policy version is stored.
    """
    rollouts = _read(directory)
    found = rollouts.get(wanted) or next((r for r in rollouts.values() if wanted in r.attempt_ids), None)
    if found is None:
        raise InputError(f"ROLLOUT must be the id of a rollout or attempt of {directory.path.name}, got {wanted}")
    lines = [f"rollout {found.rollout_id} of task {found.task_id} ({found.purpose}): {_verdict(found)}"]
    codec = _codec(directory)
    with reading_blobs(directory, config_file.load(directory.config).blobs) as blobs:
        lines += _attempt_lines(found, wanted, blobs, codec, with_tokens=with_tokens)
    return "\n".join(lines) + "\n"


def _attempt_lines(
    found: _Rollout, wanted: str, blobs: BlobReader, codec: TokenCodec, *, with_tokens: bool
) -> list[str]:
    lines = []
    for number, (attempt_id, fate) in enumerate(zip(found.attempt_ids, found.fates, strict=True), start=1):
        if wanted not in (found.rollout_id, attempt_id):
            continue
        lines.append(f"attempt {number}: {attempt_id}, {fate}")
        score = found.scores.get(attempt_id)
        if score is not None:
            lines.append(f"score {score.value} by {score.verifier_version}: {score.detail}")
        if blobs.has_trace(attempt_id):
            trace, digest = blobs.trace(attempt_id)
            lines.append(show_trace(trace, digest, codec.decode, with_tokens=with_tokens))
    return lines


def _codec(directory: RunDirectory) -> TokenCodec:
    """The tokenizer of any version that is still stored: all versions of a run have the same."""
    stored = sorted(directory.weights.glob("v*/manifest.json"))
    if not stored:
        raise IntegrityError(f"{directory.weights} must hold a policy version, whose tokenizer is needed, got none")
    return TokenCodec.load(stored[-1].parent)


def _verdict(rollout: _Rollout) -> str:
    score = rollout.scores.get(rollout.attempt_ids[-1]) if rollout.attempt_ids else None
    said = (
        f"{'success' if score.success else 'failure'}, value {score.value:g}"
        if score and score.value is not None
        else ""
    )
    trained = f"trained in step {rollout.step}" if rollout.step is not None else ""
    fate = rollout.fates[-1] if rollout.fates else "not leased yet"
    return ", ".join(part for part in (said or fate, trained) if part)


def _read(directory: RunDirectory) -> dict[str, _Rollout]:
    rollouts: dict[str, _Rollout] = {}
    of_attempt: dict[str, _Rollout] = {}
    reader = open_journal_reader(config_file.load(directory.config), directory)
    for record in reader.records():
        _take(decode(record.payload), rollouts, of_attempt)
    return rollouts


def _take(event: e.AnyEvent, rollouts: dict[str, _Rollout], of_attempt: dict[str, _Rollout]) -> None:
    match event:
        case e.GroupAdmitted():
            for rollout_id in event.rollout_ids:
                rollouts[rollout_id] = _Rollout(rollout_id, event.task_id, str(event.purpose))
        case e.Leased():
            rollout = of_attempt[event.attempt_id] = rollouts[event.rollout_id]
            rollout.attempt_ids.append(event.attempt_id)
            rollout.fates.append(f"leased at version {event.policy_version}")
        case e.ArtifactReady():
            trace = event.report.trace
            fate = f"{trace.end_reason} after {trace.num_turns} turns and {trace.num_tokens} tokens"
            of_attempt[trace.attempt_id].fates[-1] = f"{fate}, version {trace.oldest_version}"
        case e.Scored():
            of_attempt[event.score.attempt_id].scores[event.score.attempt_id] = event.score
        case e.InfraFailed():
            of_attempt[event.attempt_id].fates[-1] = f"{event.outcome}: {event.reason} {event.detail}".strip()
        case e.LeaseExpired():
            of_attempt[event.attempt_id].fates[-1] = "lease expired"
        case e.StepBegun():
            for sample_id in event.sample_ids:
                of_attempt[sample_id.split("/", maxsplit=1)[0]].step = event.step
        case _:
            pass
