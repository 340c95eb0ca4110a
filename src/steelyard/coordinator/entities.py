"""What the coordinator remembers of a run: plain mutable records, changed only by ``state.apply``."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from steelyard.coordinator.events import DropReason, RestartReason, Rules
from steelyard.coordinator.standing import Standing
from steelyard.coordinator.transitions import HELD, GroupState, ReplicaState, RolloutState, VersionState
from steelyard.types import ArtifactReport, LoadProof, Outcome, Purpose, Record, Sampling, Score


@dataclass(slots=True, eq=False)
class Rollout:
    """One sibling of a group and its newest attempt.

    ``attempt_number`` counts leases. ``num_failures`` counts those failures that use up budget, ``num_tokens`` the
    sampled tokens of all attempts that ended, sealed or lost.
    ``cancelled_for``: the reason, once it is cancelled.
    ``since_s``: when the present state began. ``changed``: number of the event that last changed it, so that an
    answer about it can wait for exactly that commit.
    """

    rollout_id: str
    group: "Group"
    member_index: int
    since_s: float
    changed: int
    state: RolloutState = RolloutState.PENDING
    attempt_id: str | None = None
    attempt_number: int = 0
    worker_id: str | None = None
    policy_version: int | None = None
    issued_at_s: float = 0.0
    expires_at_s: float = 0.0
    not_before_s: float = 0.0
    num_failures: int = 0
    num_tokens: int = 0
    num_grader_failures: int = 0
    last_outcome: Outcome | None = None
    cancelled_for: str | None = None
    report: ArtifactReport | None = None
    score: Score | None = None

    @property
    def sealed_tokens(self) -> int:
        """Tokens in the sealed trace, 0 without one."""
        return self.report.trace.num_tokens if self.report else 0


class FailedAttempt(Record, frozen=True, kw_only=True):
    """How an attempt failed, and who held it: so that the same news again is known as such."""

    attempt_number: int
    worker_id: str
    content_digest: str


@dataclass(slots=True, eq=False)
class Group:
    """One issue of a prompt. ``order`` is the number of the event that (re)admitted it: older is smaller."""

    group_id: str
    task_id: str
    task_index: int | None
    stream_position: int | None
    purpose: Purpose
    label: str | None
    sampling: Sampling
    max_turns: int
    bound_version: int | None
    order: int
    admitted_version: int
    admitted_step: int
    admitted_at_s: float
    priority: int = 0
    state: GroupState = GroupState.OPEN
    rollouts: list[Rollout] = field(default_factory=list)
    num_open: int = 0
    num_accepted: int = 0
    num_stale_restarts: int = 0
    parked_for: RestartReason | None = None
    num_rollouts_parked: int = 0

    def accepted(self) -> list[Rollout]:
        """Members that enter the group's statistics, in member order."""
        wanted = (RolloutState.ACCEPTED, RolloutState.CONSUMED)
        return [rollout for rollout in self.rollouts if rollout.state in wanted]


@dataclass(slots=True, eq=False)
class Version:
    """One policy version. ``num_live`` attempts are sampling from it; ``labels`` pin its files."""

    version: int
    step: int
    parent_version: int | None
    weights_digest: str
    published_at_s: float
    state: VersionState = VersionState.PUBLISHED
    since_s: float = 0.0
    num_live: int = 0
    is_orphaned: bool = False
    labels: set[str] = field(default_factory=set)
    proofs: list[LoadProof] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Replica:
    """One replica: the versions that it has proven to hold, and the one that it drains or loads for."""

    replica_id: str
    state: ReplicaState = ReplicaState.SERVING
    since_s: float = 0.0
    held: set[int] = field(default_factory=set)
    goal: int | None = None
    num_refused: int = 0
    num_down: int = 0

    @property
    def takes_attempts(self) -> bool:
        """Whether new attempts may be bound to what it holds."""
        return self.state in (ReplicaState.SERVING, ReplicaState.LOADING)


@dataclass(slots=True, eq=False)
class Step:
    """One optimizer step that no kept checkpoint covers yet."""

    step: int
    parent_version: int
    group_ids: tuple[str, ...]
    sample_ids: tuple[str, ...]
    batch_digest: str
    begun_at_s: float


@dataclass(slots=True, eq=False)
class MemberResult:
    """What is kept of one rollout of an evaluation after its group closed."""

    member_index: int
    attempt_id: str | None
    outcome: Outcome
    report: ArtifactReport | None
    score: Score | None


@dataclass(slots=True, eq=False)
class Evaluation:
    """One label. ``task_of`` maps groups to tasks, ``open_groups`` are not closed yet."""

    version: int
    task_of: dict[str, str] = field(default_factory=dict)
    open_groups: set[str] = field(default_factory=set)
    results: dict[str, list[MemberResult]] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class PromptCounts:
    """Counted as events pass, for the prompt books; what is live is counted from the groups themselves."""

    issued: int = 0
    trained: int = 0
    restarted: int = 0
    dropped: Counter[DropReason] = field(default_factory=Counter)

    @property
    def not_dropped(self) -> int:
        """Groups that hold a slot of the admission capacity or have used it."""
        return self.issued - self.dropped.total()


@dataclass(slots=True, eq=False)
class TokenCounts:
    """Counted as events pass, for the token books; ``rejected`` and ``lost`` by reason."""

    trained: int = 0
    evaluated: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    lost: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True, eq=False)
class Tallies:
    """Ends of attempts and gradings, for the alarms."""

    num_leased: int = 0
    num_failed: int = 0
    num_expired: int = 0
    num_scored: int = 0
    num_grader_failed: int = 0


@dataclass(slots=True, eq=False)
class Run:
    """The run itself."""

    run_id: str
    seed: int
    config_digest: str
    rules: Rules
    started_at_s: float
    is_finished: bool = False
    num_resumes: int = 0


MAX_ENDED_ATTEMPTS = 100_000
"""So many ended attempts are remembered by name; a message for an older one is refused as unknown, not as late."""

KEPT_CHECKPOINTS = 2
"""Steps below the oldest of the last so many checkpoints are forgotten; a resume can go back that far."""


class State:
    """All that is live, and counts of what is not. Read freely; only ``apply`` writes."""

    def __init__(self) -> None:
        self.run: Run | None = None
        self.at_s = 0.0
        self.num_events = 0
        self.groups: dict[str, Group] = {}
        self.live_groups: dict[str, Group] = {}
        self.rollouts: dict[str, Rollout] = {}
        self.attempts: dict[str, Rollout] = {}
        self.ended_attempts: dict[str, str] = {}
        self.failed_attempts: dict[str, FailedAttempt] = {}
        self.versions: dict[int, Version] = {}
        self.lineage: dict[int, int] = {}
        self.unreleased: set[int] = set()
        self.replicas: dict[str, Replica] = {}
        self.steps: dict[int, Step] = {}
        self.next_step = 0
        self.checkpoints: list[int] = []
        self.checkpoint_digests: dict[int, str] = {}
        self.kept_batches: set[int] = set()
        self.next_position = 0
        self.evaluations: dict[str, Evaluation] = {}
        self.prompts = PromptCounts()
        self.tokens = TokenCounts()
        self.tallies = Tallies()
        self.standing = Standing()

    @property
    def newest_ready(self) -> Version | None:
        """The READY version of the highest step; None before the first."""
        ready = [self.versions[v] for v in self.unreleased if self.versions[v].state is VersionState.READY]
        return max(ready, key=lambda version: version.step, default=None)

    def is_served(self, version: int) -> bool:
        """Whether a live replica has proven to hold ``version`` and takes new attempts."""
        return any(version in replica.held and replica.takes_attempts for replica in self.replicas.values())

    @property
    def horizon_step(self) -> int:
        """Steps below it are covered by every kept checkpoint."""
        return self.checkpoints[0] if len(self.checkpoints) == KEPT_CHECKPOINTS else 0

    def next_version(self) -> int:
        """The number of the next version to publish: numbers are never reused, orphaned or not."""
        return max(self.versions, default=-1) + 1

    def held(self) -> Iterator[Rollout]:
        """Rollouts whose attempt is with a worker."""
        for group in self.live_groups.values():
            for rollout in group.rollouts:
                if rollout.state in HELD:
                    yield rollout
