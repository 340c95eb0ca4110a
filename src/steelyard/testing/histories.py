"""Long histories of a run, made by driving the real state machine: whole lives of groups, seeded, without a run.

Every event is applied before it is handed on, so a history that the state machine would refuse cannot come about.
"""

import random
from collections.abc import Callable

from steelyard.coordinator import events as e
from steelyard.coordinator.entities import Group, Rollout, State
from steelyard.coordinator.state import apply
from steelyard.coordinator.transitions import RolloutState
from steelyard.digests import digest_bytes
from steelyard.types import (
    ArtifactReport,
    EndReason,
    LoadProof,
    Outcome,
    Purpose,
    Sampling,
    Score,
    SealedTrace,
)

_SAMPLING = Sampling(max_tokens=128, seed=7)
_TICK_S = 0.001
_CHECKPOINT_EVERY = 5


class History:
    """Drives one run step by step.

    Args:
        sink: is handed every event once it has been applied.
        seed: of lengths, scores and failures.
        groups_per_batch, group_size: of the run's rules.
        failure_frac: share of attempts that are lost, of gradings that fail, and of verdicts that are rejected.

    ``before`` is handed every event before it is applied.
    """

    def __init__(
        self,
        sink: Callable[[e.AnyEvent], None],
        *,
        seed: int = 0,
        groups_per_batch: int = 8,
        group_size: int = 8,
        failure_frac: float = 0.03,
    ) -> None:
        self.state = State()
        self.before: Callable[[e.AnyEvent], None] = lambda event: None
        self._sink = sink
        self._random = random.Random(seed)
        self._groups_per_batch = groups_per_batch
        self._group_size = group_size
        self._failure_frac = failure_frac
        self._at_s = 1.7e9
        self._next_id = 0

    def start(self) -> None:
        """Begin the run and bring version 0 to READY."""
        rules = e.Rules(
            max_policy_lag=1, groups_per_batch=self._groups_per_batch, group_size=self._group_size, min_scored=2
        )
        self._emit(e.RunStarted(at_s=self._now_s(), run_id="run_history", seed=0, config_digest="c0", rules=rules))
        self._publish(0)

    def step(self) -> None:
        """A whole optimizer step: a batch of groups from admission to consumption, and the version after it."""
        groups = [self.admit() for _ in range(self._groups_per_batch)]
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        self._random.shuffle(rollouts)
        for rollout in rollouts:
            self.carry(rollout, RolloutState.LEASED)
        for rollout in rollouts:
            self.carry(rollout, RolloutState.ACCEPTED)
        for group in groups:
            self._close(group)
        step = self.state.next_step
        whole = [group for group in groups if group.group_id in self.state.live_groups]
        samples = tuple(f"{rollout.attempt_id}/0" for group in whole for rollout in group.accepted())
        self._emit(
            e.StepBegun(
                at_s=self._now_s(),
                step=step,
                parent_version=self.state.lineage[step],
                group_ids=tuple(group.group_id for group in whole),
                sample_ids=samples,
                batch_digest=digest_bytes(f"batch {step}".encode()),
            )
        )
        self._publish(step + 1)
        if (step + 1) % _CHECKPOINT_EVERY == 0:
            self._checkpoint(step + 1)

    def admit(self) -> Group:
        """One prompt more."""
        position, newest = self.state.next_position, self._newest()
        group_id = self._id("grp")
        self._emit(
            e.GroupAdmitted(
                at_s=self._now_s(),
                group_id=group_id,
                task_id=f"repair/train/{position}",
                task_index=position,
                stream_position=position,
                purpose=Purpose.TRAIN,
                label=None,
                rollout_ids=tuple(self._id("rol") for _ in range(self._group_size)),
                admitted_version=newest,
                bound_version=None,
                sampling=_SAMPLING,
                max_turns=6,
            )
        )
        return self.state.groups[group_id]

    def carry(self, rollout: Rollout, until: RolloutState) -> None:
        """Carry one rollout to ``until`` (ACCEPTED also ends with REJECTED), through whatever fails on the way."""
        while rollout.state is not until and rollout.state is not RolloutState.REJECTED:
            self._move(rollout)

    def _move(self, rollout: Rollout) -> None:
        """The next event of a rollout; draws whether it fails."""
        at_s, attempt_id = self._now_s(), rollout.attempt_id or ""
        is_failure = self._random.random() < self._failure_frac
        match rollout.state:
            case RolloutState.PENDING:
                self._lease(rollout)
            case RolloutState.LEASED:
                self._emit(e.Running(at_s=at_s, attempt_id=attempt_id))
            case RolloutState.RUNNING if is_failure and self._random.random() < 0.5:
                self._emit(e.LeaseExpired(at_s=at_s, attempt_id=attempt_id, lost_tokens=11))
            case RolloutState.RUNNING if is_failure:
                outcome = Outcome.INFRA_FAILED
                self._emit(e.InfraFailed(at_s=at_s, attempt_id=attempt_id, outcome=outcome, reason="sandbox_died"))
            case RolloutState.RUNNING:
                self._emit(e.ArtifactReady(at_s=at_s, report=self._report(rollout)))
            case RolloutState.INFRA_FAILED:
                self._emit(e.RolloutRetried(at_s=at_s, rollout_id=rollout.rollout_id, not_before_s=at_s + 0.25))
            case RolloutState.ARTIFACT_READY if is_failure:
                failed = Outcome.GRADER_FAILED
                job_id = self._id("job")
                self._emit(
                    e.GraderFailed(at_s=at_s, attempt_id=attempt_id, job_id=job_id, outcome=failed, reason="grader")
                )
            case RolloutState.ARTIFACT_READY:
                self._score(rollout)
            case RolloutState.SCORED if is_failure:
                self._emit(e.Rejected(at_s=at_s, attempt_id=attempt_id, reason=e.RejectReason.STALE))
            case RolloutState.SCORED:
                self._emit(e.Accepted(at_s=at_s, attempt_id=attempt_id))
            case state:
                raise ValueError(f"a rollout must be able to move, {rollout.rollout_id} is {state}")

    def _lease(self, rollout: Rollout) -> None:
        self._emit(
            e.Leased(
                at_s=self._now_s(),
                rollout_id=rollout.rollout_id,
                attempt_id=self._id("att"),
                attempt_number=rollout.attempt_number + 1,
                worker_id=f"wrk_{self._random.randrange(64)}",
                policy_version=self._newest(),
                expires_at_s=self._now_s() + 60.0,
            )
        )

    def _report(self, rollout: Rollout) -> ArtifactReport:
        attempt_id, version = rollout.attempt_id or "", rollout.policy_version or 0
        trace = SealedTrace(
            attempt_id=attempt_id,
            digest=digest_bytes(f"trace {attempt_id}".encode()),
            num_turns=3,
            num_tokens=self._random.randrange(20, 200),
            oldest_version=version,
            newest_version=version,
            mean_version=float(version),
            num_segments=1,
            end_reason=EndReason.SUBMITTED,
        )
        return ArtifactReport(
            attempt_id=attempt_id,
            attempt_number=rollout.attempt_number,
            trace=trace,
            artifact_digest=digest_bytes(attempt_id.encode()),
        )

    def _score(self, rollout: Rollout) -> None:
        value = float(self._random.randrange(2))
        score = Score(
            job_id=self._id("job"),
            attempt_id=rollout.attempt_id or "",
            outcome=Outcome.SCORED,
            value=value,
            verifier_version="v1",
            success=value > 0.5,
            duration_s=0.01,
        )
        digest = rollout.report.artifact_digest if rollout.report else ""
        self._emit(e.Scored(at_s=self._now_s(), score=score, artifact_digest=digest))

    def _close(self, group: Group) -> None:
        if group.num_accepted >= 2:
            self._emit(e.GroupCompleted(at_s=self._now_s(), group_id=group.group_id))
        else:
            self._emit(e.GroupDropped(at_s=self._now_s(), group_id=group.group_id, reason=e.DropReason.INCOMPLETE))

    def _publish(self, step: int) -> None:
        """Publish, load and ready the version of ``step``; release the one before."""
        number = self.state.next_version()
        parent = self.state.lineage.get(step - 1)
        weights = digest_bytes(f"weights {step}".encode())
        self._emit(
            e.VersionPublished(
                at_s=self._now_s(),
                version=number,
                step=step,
                parent_version=parent,
                weights_digest=weights,
                model_config_digest="config",
                tokenizer_digest="tokenizer",
                template_digest="template",
                num_bytes=1 << 20,
            )
        )
        proof = LoadProof(
            version=number,
            replica_id="rep_0",
            load_id=f"load_{number}",
            weights_digest=weights,
            probe_max_error=1e-6,
            probe_tolerance=1e-4,
            loaded_in_s=0.1,
        )
        self._emit(e.VersionLoaded(at_s=self._now_s(), proof=proof))
        self._emit(e.VersionReady(at_s=self._now_s(), version=number))
        if parent is not None and self.state.versions[parent].num_live == 0:
            self._emit(e.VersionReleased(at_s=self._now_s(), version=parent))

    def _checkpoint(self, step: int) -> None:
        self._emit(e.Checkpointed(at_s=self._now_s(), step=step, digest=digest_bytes(f"checkpoint {step}".encode())))
        for covered in sorted(self.state.kept_batches):
            if covered < self.state.horizon_step:
                self._emit(e.BatchDeleted(at_s=self._now_s(), step=covered))

    def _newest(self) -> int:
        newest = self.state.newest_ready
        if newest is None:
            raise ValueError("a version must be READY, call start first")
        return newest.version

    def _emit(self, event: e.AnyEvent) -> None:
        self.before(event)
        apply(self.state, event)
        self._at_s += _TICK_S
        self._sink(event)

    def _now_s(self) -> float:
        return self._at_s

    def _id(self, kind: str) -> str:
        """As long as the ids of a real run."""
        self._next_id += 1
        return f"{kind}_{self._next_id:016x}"
