"""What an audit looks at: readers of the stores, and the facts that one pass over the journal yields.

The facts are gathered by plain bookkeeping of their own and not by the state machine, so that an error of the one is
not repeated by the other.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from steelyard.coordinator import events as e
from steelyard.coordinator.journal.base import JournalReader
from steelyard.errors import IntegrityError
from steelyard.types import (
    ArtifactReport,
    FileDigest,
    LoadProof,
    Manifest,
    Purpose,
    Record,
    Score,
    StepBatch,
    Trace,
)

_K = TypeVar("_K")
_T = TypeVar("_T")


class TraceReader(Protocol):
    """Sealed traces."""

    def read(self, attempt_id: str) -> tuple[Trace, str]:
        """A sealed trace, and the digest of its bytes as they are stored now.

        Raises:
            IntegrityError: it is missing or cannot be read.
        """
        ...


class BatchReader(Protocol):
    """Stored step batches."""

    def read(self, step: int) -> tuple[StepBatch, str]:
        """The batch of a step, and the digest of its bytes as they are stored now.

        Raises:
            IntegrityError: it is missing or cannot be read.
        """
        ...


class ArtifactReader(Protocol):
    """Stored artifacts."""

    def digest(self, artifact_digest: str) -> str:
        """The digest of the bytes that are stored under this digest now.

        Raises:
            IntegrityError: nothing is stored under it.
        """
        ...


class StoredVersion(Record, frozen=True, kw_only=True):
    """A version as stored now: its manifest, its files hashed anew, and the digest of the parameters in those files.

    ``weights_digest`` is None where a store can read no parameters; the files of a run directory always can.
    """

    manifest: Manifest
    files: tuple[FileDigest, ...]
    weights_digest: str | None = None


class WeightsReader(Protocol):
    """Stored versions."""

    def read(self, version: int) -> StoredVersion:
        """Manifest and recomputed file digests of a version.

        Raises:
            IntegrityError: it is missing or has no readable manifest.
        """
        ...


class CheckpointReader(Protocol):
    """Stored checkpoints."""

    def digest(self, step: int) -> str | None:
        """The digest of the checkpoint of ``step`` as it is stored now; None where there is none."""
        ...


AdvantageFunction = Callable[[Sequence[Score]], Mapping[str, float]]
"""Advantages by attempt, from the scores of the accepted members of one group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditStores:
    """All stores of a run. ``recorded``: sampled tokens by attempt, from the recorder's ledger."""

    journal: JournalReader
    traces: TraceReader
    batches: BatchReader
    artifacts: ArtifactReader
    weights: WeightsReader
    checkpoints: CheckpointReader
    recorded: Mapping[str, int]
    advantages: AdvantageFunction


@dataclass(slots=True)
class AttemptFacts:
    """What the journal says of one attempt. ``lost_tokens`` is None unless it ended without a sealed trace.

    ``is_unreadable``: the journal itself says that trace or artifact were lost after the sealing. ``follows_updates``:
    by the rules of its time weights could change under it, if it was for training.
    """

    attempt_id: str
    rollout_id: str
    group_id: str
    policy_version: int
    follows_updates: bool = False
    report: ArtifactReport | None = None
    score: Score | None = None
    scored_digest: str | None = None
    is_accepted: bool = False
    is_unreadable: bool = False
    lost_tokens: int | None = None


@dataclass(slots=True)
class GroupFacts:
    """What the journal says of one group."""

    admitted: e.GroupAdmitted
    rollout_ids: tuple[str, ...]


@dataclass(slots=True)
class StepFacts:
    """A step that was begun and not voided, with the rules of its time."""

    begun: e.StepBegun
    rules: e.Rules


@dataclass(slots=True)
class Facts:
    """All facts; dictionaries are in journal order."""

    rules: e.Rules | None = None
    groups: dict[str, GroupFacts] = field(default_factory=dict)
    rollout_group: dict[str, str] = field(default_factory=dict)
    newest_attempt: dict[str, str] = field(default_factory=dict)
    attempts: dict[str, AttemptFacts] = field(default_factory=dict)
    steps: dict[int, StepFacts] = field(default_factory=dict)
    published: dict[int, e.VersionPublished] = field(default_factory=dict)
    proofs: dict[int, list[LoadProof]] = field(default_factory=dict)
    ready: set[int] = field(default_factory=set)
    orphaned: set[int] = field(default_factory=set)
    deleted: set[int] = field(default_factory=set)
    deleted_batches: set[int] = field(default_factory=set)
    checkpoints: dict[int, str] = field(default_factory=dict)
    repeated: list[str] = field(default_factory=list)
    num_ids: int = 0

    def purpose(self, attempt_id: str) -> Purpose | None:
        """What an attempt was for; None for an unknown one."""
        attempt = self.attempts.get(attempt_id)
        group = self.groups.get(attempt.group_id) if attempt else None
        return group.admitted.purpose if group else None

    def accepted(self, group_id: str) -> list[AttemptFacts]:
        """Accepted attempts of a group's present rollouts, in member order."""
        group = self.groups.get(group_id)
        names = [self.newest_attempt.get(r, "") for r in group.rollout_ids] if group else []
        return [self.attempts[name] for name in names if name in self.attempts and self.attempts[name].is_accepted]

    def step_of(self, version: int) -> int | None:
        """Optimizer steps behind a version, None for an unknown one."""
        published = self.published.get(version)
        return published.step if published else None


def gather(events: Iterable[e.AnyEvent]) -> Facts:
    """One pass over whatever events could be read."""
    facts = Facts()
    seen: set[str] = set()
    for event in events:
        _note_ids(facts, seen, event)
        _note_groups(facts, event)
        _note_attempts(facts, event)
        _note_versions(facts, event)
        _note_steps(facts, event)
    return facts


def _note_ids(facts: Facts, seen: set[str], event: e.AnyEvent) -> None:
    names: tuple[str, ...] = ()
    if isinstance(event, e.GroupAdmitted):
        names = (event.group_id, *event.rollout_ids)
    elif isinstance(event, e.GroupRestarted):
        names = event.rollout_ids
    elif isinstance(event, e.Leased):
        names = (event.attempt_id,)
    elif isinstance(event, e.VersionPublished):
        names = (f"version {event.version}",)
    for name in names:
        if name in seen:
            facts.repeated.append(name)
        seen.add(name)
    facts.num_ids += len(names)


def _note_groups(facts: Facts, event: e.AnyEvent) -> None:
    if isinstance(event, e.GroupAdmitted):
        facts.groups[event.group_id] = GroupFacts(admitted=event, rollout_ids=event.rollout_ids)
        facts.rollout_group.update(dict.fromkeys(event.rollout_ids, event.group_id))
    elif isinstance(event, e.GroupRestarted) and event.group_id in facts.groups:
        facts.groups[event.group_id].rollout_ids = event.rollout_ids
        facts.rollout_group.update(dict.fromkeys(event.rollout_ids, event.group_id))


def _note_attempts(facts: Facts, event: e.AnyEvent) -> None:
    if isinstance(event, e.Leased):
        facts.newest_attempt[event.rollout_id] = event.attempt_id
        facts.attempts[event.attempt_id] = AttemptFacts(
            attempt_id=event.attempt_id,
            rollout_id=event.rollout_id,
            group_id=facts.rollout_group.get(event.rollout_id, ""),
            policy_version=event.policy_version,
            follows_updates=facts.rules is not None and facts.rules.follows_updates,
        )
        return
    attempt = facts.attempts.get(_attempt_of(facts, event) or "")
    if attempt is None:
        return
    if isinstance(event, e.ArtifactReady):
        attempt.report = event.report
    elif isinstance(event, e.Scored):
        attempt.score, attempt.scored_digest = event.score, event.artifact_digest
    elif isinstance(event, e.Accepted):
        attempt.is_accepted = True
    elif isinstance(event, e.InfraFailed) and attempt.report is not None:
        attempt.is_unreadable = True
    elif isinstance(event, e.InfraFailed | e.LeaseExpired | e.RolloutCancelled) and attempt.report is None:
        attempt.lost_tokens = (attempt.lost_tokens or 0) + event.lost_tokens


def _attempt_of(facts: Facts, event: e.AnyEvent) -> str | None:
    if isinstance(event, e.ArtifactReady):
        return event.report.attempt_id
    if isinstance(event, e.Scored):
        return event.score.attempt_id
    if isinstance(event, e.Accepted | e.InfraFailed | e.LeaseExpired):
        return event.attempt_id
    if isinstance(event, e.RolloutCancelled):
        return facts.newest_attempt.get(event.rollout_id)
    return None


def _note_versions(facts: Facts, event: e.AnyEvent) -> None:
    if isinstance(event, e.VersionPublished):
        facts.published.setdefault(event.version, event)
    elif isinstance(event, e.VersionLoaded):
        facts.proofs.setdefault(event.proof.version, []).append(event.proof)
    elif isinstance(event, e.VersionReady):
        facts.ready.add(event.version)
    elif isinstance(event, e.VersionOrphaned):
        facts.orphaned.add(event.version)
    elif isinstance(event, e.VersionDeleted):
        facts.deleted.add(event.version)


def _note_steps(facts: Facts, event: e.AnyEvent) -> None:
    if isinstance(event, e.RunStarted | e.RunResumed):
        facts.rules = event.rules
    elif isinstance(event, e.StepBegun) and facts.rules is not None:
        if event.step in facts.steps:
            facts.repeated.append(f"step {event.step}")
        facts.steps[event.step] = StepFacts(begun=event, rules=facts.rules)
    elif isinstance(event, e.StepVoided):
        facts.steps.pop(event.step, None)
        facts.deleted_batches.discard(event.step)
    elif isinstance(event, e.BatchDeleted):
        facts.deleted_batches.add(event.step)
    elif isinstance(event, e.Checkpointed):
        facts.checkpoints[event.step] = event.digest


class Findings:
    """What was checked, and the first counter-example to each invariant."""

    def __init__(self, names: Iterable[str]) -> None:
        self.num_checked = dict.fromkeys(names, 0)
        self.num_broken = dict.fromkeys(self.num_checked, 0)
        self.examples: dict[str, str] = {}
        self.notes: dict[str, str] = {}

    def check(self, name: str, holds: bool, example: str) -> bool:
        """Count one check of invariant ``name``; ``example`` says what is wrong where it does not hold."""
        self.num_checked[name] += 1
        if not holds:
            self.num_broken[name] += 1
            self.examples.setdefault(name, example)
        return holds

    def note(self, name: str, text: str) -> None:
        """Say on what the proof of invariant ``name`` rests, where it rests on less than it might."""
        self.notes[name] = text

    def read(self, name: str, reader: Callable[[_K], _T], key: _K) -> _T | None:
        """Read ``key`` from a store; what cannot be read breaks invariant ``name`` and gives None."""
        try:
            found = reader(key)
        except IntegrityError as error:
            self.check(name, False, str(error))
            return None
        self.check(name, True, "")
        return found
