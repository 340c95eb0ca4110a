"""What the coordinator gives to and takes from the rest of the system, beside the records of ``types``."""

import math

from steelyard.config import Config
from steelyard.coordinator.events import Budgets, Rules
from steelyard.types import Outcome, Record, Sampling, Score, SealedTrace


class CoordinatorSettings(Record, frozen=True, kw_only=True):
    """The part of the configuration that the coordinator decides by. Durations in seconds of its clock.

    ``max_steps`` None admits for ever. ``max_attempts``, ``budget_tokens`` and ``budget_s`` are for each rollout, the
    latter two None without a limit. ``retry_backoff_s`` doubles with each failure of a rollout, up to
    ``max_backoff_s``; ``backoff_jitter_frac`` of the wait is left to chance. One level of priority is worth
    ``priority_ageing_s`` seconds of waiting. ``tick_s`` is the longest time between two looks at the clock.
    """

    rules: Rules
    sampling: Sampling
    max_turns: int
    max_age_s: float | None = None
    max_tail_wait_s: float = 120.0
    max_stale_retries: int = 2
    max_drop_frac: float = 0.5
    max_steps: int | None = None
    lease_s: float = 60.0
    max_attempts: int = 3
    budget_tokens: int | None = None
    budget_s: float | None = None
    priority_ageing_s: float = 60.0
    retry_after_external: bool = False
    score_lease_s: float = 30.0
    max_grader_attempts: int = 3
    alarm_failure_frac: float = 0.1
    max_retained_versions: int = 8
    retry_backoff_s: float = 0.25
    max_backoff_s: float = 10.0
    backoff_jitter_frac: float = 0.5
    group_commit_s: float = 0.002
    snapshot_every_events: int = 50_000
    tick_s: float = 1.0

    @property
    def budgets(self) -> Budgets:
        """What is journalled of the budgets."""
        return Budgets(num_attempts=self.max_attempts, num_tokens=self.budget_tokens, time_s=self.budget_s)

    @classmethod
    def from_config(cls, config: Config) -> "CoordinatorSettings":
        """The settings of a run."""
        rules = Rules(
            max_policy_lag=config.admission.max_policy_lag,
            groups_per_batch=config.groups_per_batch,
            group_size=config.rollout.group_size,
            min_scored=config.algorithm.min_scored,
            follows_updates=config.weights.mode == "segmented",
        )
        sampling = Sampling(
            temperature=config.rollout.temperature,
            top_p=config.rollout.top_p,
            max_tokens=config.rollout.max_tokens,
            seed=config.run.seed,
        )
        return cls(
            rules=rules,
            sampling=sampling,
            max_turns=config.rollout.max_turns,
            max_age_s=config.admission.max_age_s,
            max_tail_wait_s=config.admission.max_tail_wait_s,
            max_stale_retries=config.admission.max_stale_retries,
            max_drop_frac=config.admission.max_drop_frac,
            max_steps=config.train.max_steps,
            lease_s=config.rollout.lease_s,
            max_attempts=config.rollout.max_attempts,
            budget_tokens=config.rollout.budget_tokens,
            budget_s=config.rollout.budget_s,
            priority_ageing_s=config.admission.priority_ageing_s,
            score_lease_s=1.5 * config.scoring.deadline_s + 5.0,
            max_grader_attempts=config.scoring.max_attempts,
            alarm_failure_frac=config.scoring.alarm_failure_frac,
            max_retained_versions=config.weights.max_retained_versions,
            group_commit_s=config.journal.group_commit_s,
            snapshot_every_events=config.journal.snapshot_every_events,
            tick_s=min(1.0, config.rollout.lease_s / 4),
        )


class BatchMember(Record, frozen=True, kw_only=True):
    """One accepted attempt of a batch. ``score.value`` is finite."""

    group_id: str
    task_id: str
    rollout_id: str
    attempt_id: str
    member_index: int
    score: Score
    trace: SealedTrace


class BatchPlan(Record, frozen=True, kw_only=True):
    """What optimizer step ``step``, computed at ``parent_version``, consumes: whole groups, oldest first.

    ``members`` are those accepted, in group order, then member order; a group keeps its members together.
    ``max_lag`` in optimizer steps, over all members.
    """

    step: int
    parent_version: int
    group_ids: tuple[str, ...]
    members: tuple[BatchMember, ...]
    max_lag: int


class PendingStep(Record, frozen=True, kw_only=True):
    """A step that was begun and that the checkpoint does not cover: replay it from its stored batch."""

    step: int
    parent_version: int
    group_ids: tuple[str, ...]
    sample_ids: tuple[str, ...]
    batch_digest: str
    published_version: int | None
    published_digest: str | None


class EvaluationResult(Record, frozen=True, kw_only=True):
    """How one rollout of an evaluation ended. ``score``, ``trace`` and ``artifact_digest`` are None where
    it was never scored."""

    label: str
    version: int
    group_id: str
    task_id: str
    member_index: int
    attempt_id: str | None
    outcome: Outcome
    score: Score | None
    trace: SealedTrace | None
    artifact_digest: str | None

    @property
    def is_success(self) -> bool:
        """The environment's yes; anything that was not scored is no success, and its outcome says why."""
        return self.score is not None and self.score.success


class VersionInfo(Record, frozen=True, kw_only=True):
    """A version as the coordinator knows it."""

    version: int
    step: int
    parent_version: int | None
    weights_digest: str
    state: str
    num_live: int


class Wait(Record, frozen=True, kw_only=True):
    """``who`` waits for ``whom`` since ``since_s``, until ``until_s`` (None: no deadline of its own)."""

    who: str
    whom: str
    why: str
    since_s: float
    until_s: float | None = None

    def describe(self, now_s: float) -> str:
        """One line for people."""
        left = "" if self.until_s is None else f", {max(0.0, self.until_s - now_s):.1f} s left"
        return f"{self.who} waits for {self.whom} ({self.why}) since {max(0.0, now_s - self.since_s):.1f} s{left}"


def is_finite(value: float | None) -> bool:
    """Whether a score's value can be trained on."""
    return value is not None and math.isfinite(value)
