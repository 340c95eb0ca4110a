"""The real coordinator on virtual time: its parts as they are, without journal and event loop.

Admission, leases, fences, groups, batches by their due steps, versions and what replicas hold are decided by the code
that decides live. Only what is asynchronous there, waiting, is left to the simulation: it is told when to look again.
"""

from collections.abc import Callable

from steelyard.coordinator import effects as fx
from steelyard.coordinator import events as e
from steelyard.coordinator.batches import Batches
from steelyard.coordinator.core import Core, FullWait
from steelyard.coordinator.entities import State
from steelyard.coordinator.groups import Groups
from steelyard.coordinator.leases import Leases
from steelyard.coordinator.records import BatchPlan, CoordinatorSettings
from steelyard.coordinator.scores import Scoring
from steelyard.coordinator.versions import Versions
from steelyard.ids import SeededIds
from steelyard.metrics import Counters
from steelyard.sim.kernel import Kernel, Timer
from steelyard.sim.setup import SimSetup
from steelyard.types import (
    ArtifactReport,
    AttemptFailure,
    EndReason,
    Lease,
    LoadProof,
    Manifest,
    Outcome,
    Probe,
    Sampling,
    Score,
    ScoreJob,
    SealedTrace,
    TaskRef,
)

_FOR_EVER_S = 1e15
_WORKER = "wrk_sim"


class _Stream:
    """A task for each position without end."""

    def at(self, position: int) -> TaskRef:
        return TaskRef(position=position, epoch=0, task_index=position, task_id=str(position))


class _Lost:
    """What was sampled for attempts that fail: said just before the failure that loses it."""

    def __init__(self) -> None:
        self.num_tokens = dict[str, int]()

    def discard(self, attempt_id: str) -> int:
        return self.num_tokens.pop(attempt_id, 0)


async def _never(_seconds: float) -> None:
    raise AssertionError("nothing waits in virtual time")


class SimCoordinator:
    """What stages of a simulation ask of the coordinator. Synchronous; an answer holds at the instant it is given.

    Args:
        on_work: called when a rollout may be leased that could not be before.
        on_batch: called when a batch may be complete that was not.
    """

    def __init__(
        self, setup: SimSetup, kernel: Kernel, seed: int, on_work: Callable[[], None], on_batch: Callable[[], None]
    ) -> None:
        self._setup = setup
        self._kernel, self._on_work = kernel, on_work
        self._next_advance: Timer | None = None
        self.counters = Counters()
        self._lost = _Lost()
        self.core = Core(
            state=State(),
            journal=None,
            settings=_settings(setup),
            clock=kernel,
            sleep=_never,
            ids=SeededIds(seed),
            counters=self.counters,
            open_traces=self._lost,
            jitter=FullWait(),
        )
        self._groups = Groups(self.core, _Stream())
        self._leases = Leases(self.core, self._groups)
        self._scoring = Scoring(self.core, self._groups, self._leases)
        self._versions = Versions(self.core, self._groups, self._leases)
        self._batches = Batches(self.core, self._groups, self._scoring)
        work: tuple[type[fx.Effect], ...] = (fx.WorkWaits, fx.ScoreWaits, fx.VersionChanged, fx.ReplicaChanged)
        for kind in work:
            self.core.subscribe(kind, lambda _: on_work())
        batch: tuple[type[fx.Effect], ...] = (fx.GroupChanged, fx.VersionChanged)
        for kind in batch:
            self.core.subscribe(kind, lambda _: on_batch())
        self.core.begin("run_sim", seed, "sim")

    @property
    def state(self) -> State:
        """The coordinator's state."""
        return self.core.state

    # --- rollouts -------------------------------------------------------------------------------------

    def lease(self, max_leases: int) -> tuple[Lease, ...]:
        """Attempts to begin now, each started."""
        leases = self._leases.grant(_WORKER, max_leases)
        for lease in leases:
            self._leases.start(_WORKER, lease.attempt_id, lease.attempt_number)
        return leases

    def is_alive(self, lease: Lease) -> bool:
        """Whether the attempt is still the rollout's own."""
        rollout = self.state.attempts.get(lease.attempt_id)
        return rollout is not None and rollout.attempt_number == lease.attempt_number

    def sampled(self, lease: Lease, num_turns: int, num_tokens: int, oldest: int, newest: int) -> None:
        """The agent of an attempt is done; versions from ``oldest`` to ``newest`` sampled for it."""
        trace = SealedTrace(
            attempt_id=lease.attempt_id,
            digest="sim",
            num_turns=num_turns,
            num_tokens=num_tokens,
            oldest_version=oldest,
            newest_version=newest,
            mean_version=(oldest + newest) / 2,
            num_segments=1,
            end_reason=EndReason.SUBMITTED,
        )
        report = ArtifactReport(
            attempt_id=lease.attempt_id, attempt_number=lease.attempt_number, trace=trace, artifact_digest="sim"
        )
        self._leases.finish(report, _WORKER)

    def lost(self, lease: Lease, reason: str, num_tokens: int) -> None:
        """The system could not carry an attempt through."""
        failure = AttemptFailure(
            attempt_id=lease.attempt_id,
            attempt_number=lease.attempt_number,
            outcome=Outcome.INFRA_FAILED,
            reason=reason,
            lost_tokens=num_tokens,
        )
        self._lost.num_tokens[lease.attempt_id] = num_tokens
        self._leases.report_failure(failure, _WORKER)
        self._plan_advance()

    def _plan_advance(self) -> None:
        """Look again when the next of those that have failed has waited out its back-off."""
        due_s = self._leases.next_due_s()
        if due_s is None or due_s >= _FOR_EVER_S:
            return
        planned = self._next_advance
        if planned is None or not planned.is_pending or planned.at_s > due_s:
            if planned is not None:
                planned.cancel()
            self._next_advance = self._kernel.at(max(due_s, self._kernel.now_s()), self._advance)

    def _advance(self) -> None:
        self._leases.advance()
        self._plan_advance()
        self._on_work()

    # --- scores ---------------------------------------------------------------------------------------

    @property
    def num_scores_waiting(self) -> int:
        """Trajectories that wait for a grader."""
        return self._scoring.num_waiting

    def lease_scores(self, max_jobs: int) -> tuple[ScoreJob, ...]:
        """Gradings to begin now."""
        return self._scoring.grant(_WORKER, max_jobs)

    def scored(self, job: ScoreJob) -> None:
        """A grading is done."""
        score = Score(
            job_id=job.job_id, attempt_id=job.attempt_id, outcome=Outcome.SCORED, value=1.0, verifier_version="sim"
        )
        self._scoring.finish(score, _WORKER)

    # --- training -------------------------------------------------------------------------------------

    def batch(self) -> tuple[BatchPlan | None, float | None]:
        """The next step's batch, if it is complete; else when to look again (None: an event will say)."""
        return self._batches.look(self.state.next_step)

    def begin_step(self, plan: BatchPlan) -> None:
        """The batch is consumed."""
        samples = tuple(f"{member.attempt_id}/0" for member in plan.members)
        self._batches.begin(plan.step, plan.parent_version, plan.group_ids, samples, "sim")

    def publish(self) -> int:
        """The version after the newest step, with its step's checkpoint; returns its number."""
        state = self.state
        number, step = state.next_version(), state.next_step
        parent = state.lineage.get(step - 1) if step else None
        self._versions.publish(_manifest(number, step, parent))
        self._batches.checkpoint(step, "sim")
        return number

    # --- replicas -------------------------------------------------------------------------------------

    def replica_started(self, replica_id: str) -> None:
        """A replica is up and holds nothing."""
        self.core.record(e.ReplicaStarted(at_s=self.core.now_s(), replica_id=replica_id))

    def replica_down(self, replica_id: str, detail: str) -> None:
        """A replica is gone."""
        self.core.record(e.ReplicaDown(at_s=self.core.now_s(), replica_id=replica_id, detail=detail))

    def loaded(self, replica_id: str, version: int, replaced: int | None = None) -> None:
        """A replica has proven ``version``, in the place of ``replaced``; new attempts may be bound to it."""
        now_s = self.core.now_s()
        in_place = replaced is not None
        self.core.record(e.ReplicaLoading(at_s=now_s, replica_id=replica_id, version=version, in_place=in_place))
        self._versions.load(
            LoadProof(
                version=version,
                replica_id=replica_id,
                load_id=f"load_{replica_id}_{version}",
                weights_digest="sim",
                probe_max_error=0.0,
                probe_tolerance=0.0,
                loaded_in_s=0.0,
            )
        )
        if replaced is not None:
            self.core.record(e.ReplicaUnloaded(at_s=now_s, replica_id=replica_id, version=replaced))
        self._versions.make_ready(version)


def _settings(setup: SimSetup) -> CoordinatorSettings:
    return CoordinatorSettings(
        rules=e.Rules(
            max_policy_lag=setup.max_policy_lag,
            groups_per_batch=setup.groups_per_batch,
            group_size=setup.group_size,
            min_scored=1,
            follows_updates=True,
        ),
        sampling=Sampling(max_tokens=setup.max_tokens),
        max_turns=1_000_000,
        max_tail_wait_s=_FOR_EVER_S,
        max_drop_frac=1.0,
        max_steps=setup.num_steps,
        lease_s=_FOR_EVER_S,
        max_attempts=1_000_000,
        score_lease_s=_FOR_EVER_S,
        max_retained_versions=1_000_000,
    )


def _manifest(version: int, step: int, parent: int | None) -> Manifest:
    return Manifest(
        version=version,
        step=step,
        parent_version=parent,
        files=(),
        parameters=(),
        weights_digest="sim",
        model_config_digest="sim",
        tokenizer_digest="sim",
        template_digest="sim",
        dtype="bfloat16",
        probe=Probe(sequences=(), logprobs=(), separates_parent=True),
    )
