"""A whole run in memory around the real coordinator: fake harness, scorer, trainer and stores, seeded.

The stores hold what the real ones hold (traces, ledger of recorded tokens, artifacts, batches, versions), so the
same object serves tests of the coordinator, of recovery and of ``audit``.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import msgspec

from steelyard.assembly.advantage import group_advantages
from steelyard.assembly.batch import build_step_batch, encode_step_batch
from steelyard.assembly.samples import trace_samples
from steelyard.coordinator.audit import AuditReport, audit
from steelyard.coordinator.audit_deep import DeepAudit
from steelyard.coordinator.audit_evidence import AuditStores, StoredVersion
from steelyard.coordinator.core import Jitter
from steelyard.coordinator.events import Rules
from steelyard.coordinator.groups import TaskStream
from steelyard.coordinator.journal.base import Journal
from steelyard.coordinator.journal.memory import MemoryJournal
from steelyard.coordinator.records import BatchPlan, CoordinatorSettings
from steelyard.coordinator.service import Coordinator
from steelyard.digests import digest_bytes
from steelyard.errors import IntegrityError, Refused
from steelyard.ids import SeededIds
from steelyard.tasks.sampler import ShuffledStream
from steelyard.testing.manual_clock import ManualClock
from steelyard.testing.training_data import make_trace, make_turn
from steelyard.types import (
    ArtifactReport,
    AttemptFailure,
    FileDigest,
    Lease,
    LoadProof,
    Manifest,
    Outcome,
    Probe,
    Sampling,
    Score,
    ScoreJob,
    SealedTrace,
    StepBatch,
    Trace,
)

VOCABULARY = 50
WORKER = "wrk_rig"
SCORER = "wrk_scorer"

K = TypeVar("K")
V = TypeVar("V")


def make_settings(
    *,
    lag: int = 1,
    groups_per_batch: int = 2,
    group_size: int = 2,
    min_scored: int = 2,
    follows_updates: bool = False,
    **changes: Any,
) -> CoordinatorSettings:
    """Small settings without group-commit delay; ``changes`` go to CoordinatorSettings."""
    rules = Rules(
        max_policy_lag=lag,
        groups_per_batch=groups_per_batch,
        group_size=group_size,
        min_scored=min_scored,
        follows_updates=follows_updates,
    )
    settings = CoordinatorSettings(rules=rules, sampling=Sampling(seed=7), max_turns=4, group_commit_s=0.0)
    return msgspec.structs.replace(settings, **changes)


class Table(dict[K, V]):
    """A store that is a dictionary. ``read`` raises IntegrityError for what is missing, as the real stores do."""

    def read(self, key: K) -> V:
        try:
            return self[key]
        except KeyError:
            raise IntegrityError(f"{key} must be stored, and is not") from None


class Artifacts(Table[str, bytes]):
    """Artifacts by the digest that they were stored under."""

    def digest(self, artifact_digest: str) -> str:
        return digest_bytes(self.read(artifact_digest))


class Checkpoints(dict[int, str]):
    """Digests of stored checkpoints."""

    def digest(self, step: int) -> str | None:
        return self.get(step)


class MemoryStores:
    """Everything a run stores beside its journal. Public and mutable, so that tests can corrupt it."""

    def __init__(self) -> None:
        self.traces: Table[str, tuple[Trace, str]] = Table()
        self.recorded: dict[str, int] = {}
        self.artifacts = Artifacts()
        self.batches: Table[int, tuple[StepBatch, str]] = Table()
        self.versions: Table[int, StoredVersion] = Table()
        self.checkpoints = Checkpoints()

    def discard(self, attempt_id: str) -> int:
        """As the recorder does: tokens of the attempt, sealed or not, that nobody will train on."""
        return self.recorded.get(attempt_id, 0)

    def record(self, attempt_id: str, num_tokens: int) -> None:
        """Tokens of a model call that is not sealed yet."""
        self.recorded[attempt_id] = self.recorded.get(attempt_id, 0) + num_tokens


def grpo_advantages(scores: Sequence[Score]) -> dict[str, float]:
    """Advantages by attempt, by the real assembly."""
    group = group_advantages(scores, normalise_by_std=True)
    return dict(zip(group.attempt_ids, group.advantages, strict=True))


class RunRig:
    """One run. ``open`` can be called again after ``crash``: journal and stores live on.

    Args:
        settings: of the coordinator.
        num_tasks: of the stream; ``num_epochs`` passes (None: endless).
        seed: of ids, lengths and rewards.
        jitter: chance in the back-off of retries; None waits each out in full.
        weights_salt: changes the weights that a replay gives, where set before it.
    """

    def __init__(
        self,
        settings: CoordinatorSettings | None = None,
        *,
        num_tasks: int = 100,
        num_epochs: int | None = None,
        seed: int = 0,
        journal: Journal | None = None,
        jitter: Jitter | None = None,
    ) -> None:
        self.settings = settings or make_settings()
        self.clock = ManualClock()
        self.memory_journal = MemoryJournal()
        self.journal: Journal = journal if journal is not None else self.memory_journal
        self.stores = MemoryStores()
        self.stream: TaskStream = ShuffledStream(num_tasks, seed, "task-{:04d}".format, num_epochs=num_epochs)
        self.ids = SeededIds(seed)
        self.jitter = jitter
        self.random = random.Random(seed)
        self.weights_salt = ""
        self.coordinator: Coordinator

    async def open(self) -> "RunRig":
        """Open the coordinator on the journal."""
        self.coordinator = await Coordinator.open(
            journal=self.journal,
            settings=self.settings,
            clock=self.clock,
            ids=self.ids,
            run_id="run_rig",
            seed=0,
            config_digest="c0",
            open_traces=self.stores,
            stream=self.stream,
            sleep=self.clock.sleep,
            jitter=self.jitter,
        )
        return self

    async def start(self) -> "RunRig":
        """Open, and bring version 0 to READY."""
        await self.open()
        await self.publish(0)
        return self

    # --- versions ---------------------------------------------------------------------------------

    async def publish(self, step: int, *, is_ready: bool = True) -> int:
        """Publish the weights after ``step`` steps under the next number; load, prove and ready them."""
        coordinator = self.coordinator
        number = coordinator.next_version()
        parent = coordinator.version_at_step(step - 1)
        manifest = make_manifest(number, step, parent.version if parent else None, self.weights_salt)
        file = manifest.files[0]
        self.stores.versions[number] = StoredVersion(manifest=manifest, files=(file,))
        await coordinator.published(manifest)
        if is_ready:
            await self.load(number)
        return number

    async def load(self, number: int) -> None:
        """Load a published version with proof and make it READY."""
        await self.coordinator.loaded(make_proof(self.stores.versions[number].manifest))
        await self.coordinator.ready(number)

    # --- rollouts ---------------------------------------------------------------------------------

    def seal(self, lease: Lease, num_tokens: int | None = None) -> ArtifactReport:
        """Sample an attempt of one or two turns into the stores and return what a harness would report."""
        trace = self._sample(lease, num_tokens)
        digest = digest_bytes(msgspec.msgpack.encode(trace))
        self.stores.traces[lease.attempt_id] = (trace, digest)
        self.stores.recorded[lease.attempt_id] = sum(len(turn.token_ids) for turn in trace.turns)
        artifact = f"artifact of {lease.attempt_id}".encode()
        artifact_digest = digest_bytes(artifact)
        self.stores.artifacts[artifact_digest] = artifact
        return ArtifactReport(
            attempt_id=lease.attempt_id,
            attempt_number=lease.attempt_number,
            trace=sealed(trace, digest, lease.policy_version),
            artifact_digest=artifact_digest,
        )

    async def run_attempts(self, max_attempts: int = 1000) -> int:
        """Lease and finish up to ``max_attempts`` attempts; how many."""
        leases = await self.coordinator.lease(WORKER, max_attempts, 0.0)
        for lease in leases:
            await self.coordinator.start(lease.attempt_id, lease.attempt_number)
            await self.coordinator.artifact_ready(self.seal(lease))
        return len(leases)

    async def score_all(self, value: Callable[[ScoreJob], float] | None = None) -> int:
        """Score everything that waits, at 0 or 1 by the seed, or by ``value``; how many."""
        jobs = await self.coordinator.lease_scores(SCORER, 10_000, 0.0)
        for job in jobs:
            reward = value(job) if value else float(self.random.randrange(2))
            await self.coordinator.score(make_score(job, reward))
        return len(jobs)

    async def rollouts(self) -> None:
        """Run and score until nothing can be leased."""
        while await self.run_attempts() or await self.score_all():
            pass

    async def lose(self, lease: Lease, num_tokens: int = 5) -> None:
        """An attempt that recorded ``num_tokens`` and then failed for a reason of ours."""
        self.stores.record(lease.attempt_id, num_tokens)
        await self.coordinator.attempt_failed(
            AttemptFailure(
                attempt_id=lease.attempt_id,
                attempt_number=lease.attempt_number,
                outcome=Outcome.INFRA_FAILED,
                reason="sandbox_died",
            )
        )

    # --- training ---------------------------------------------------------------------------------

    async def begin(self, step: int) -> BatchPlan:
        """Choose, assemble, store and begin the batch of ``step``."""
        plan = await self.coordinator.next_batch(step, 1.0)
        batch = self.assemble(plan)
        data, digest = encode_step_batch(batch)
        self.stores.batches[step] = (msgspec.msgpack.decode(data, type=StepBatch), digest)
        await self.coordinator.begin_step(
            step=step,
            parent_version=plan.parent_version,
            group_ids=plan.group_ids,
            sample_ids=tuple(f"{s.attempt_id}/{s.segment_index}" for s in batch.samples),
            batch_digest=digest,
        )
        return plan

    async def train(self, step: int) -> BatchPlan:
        """A whole step: rollouts, batch, new version READY."""
        await self.rollouts()
        plan = await self.begin(step)
        await self.publish(step + 1)
        return plan

    async def checkpoint(self, step: int) -> None:
        """A durable checkpoint of the weights after ``step`` steps."""
        self.stores.checkpoints[step] = digest_bytes(f"checkpoint {step}".encode())
        await self.coordinator.checkpointed(step, self.stores.checkpoints[step])

    def assemble(self, plan: BatchPlan) -> StepBatch:
        """The batch of a plan, by the real assembly."""
        advantages: dict[str, float] = {}
        for group_id in plan.group_ids:
            scores = [member.score for member in plan.members if member.group_id == group_id]
            advantages.update(grpo_advantages(scores))
        samples = [
            sample
            for member in plan.members
            for sample in trace_samples(self.stores.traces[member.attempt_id][0], advantages[member.attempt_id])
        ]
        return build_step_batch(plan.step, plan.parent_version, samples, 4096)

    def audit(self, deep: DeepAudit | None = None) -> AuditReport:
        """Audit journal and stores as they are."""
        stores = self.stores
        return audit(
            AuditStores(
                journal=self.memory_journal,
                traces=stores.traces,
                batches=stores.batches,
                artifacts=stores.artifacts,
                weights=stores.versions,
                checkpoints=stores.checkpoints,
                recorded=stores.recorded,
                advantages=grpo_advantages,
            ),
            deep,
        )

    def _sample(self, lease: Lease, num_tokens: int | None) -> Trace:
        """The second turn extends the first, or starts a new segment, as the seed wants."""
        draw = self.random
        first_tokens = num_tokens if num_tokens is not None else draw.randrange(1, 6)
        spans = ((0, lease.policy_version),)
        prompt = [draw.randrange(VOCABULARY) for _ in range(3)]
        first = make_turn(prompt, self._tokens(first_tokens), attempt_id=lease.attempt_id, spans=spans)
        turns = [first]
        if num_tokens is None and draw.random() < 0.5:
            is_extension = draw.random() < 0.7
            before = [*first.prompt_token_ids, *first.token_ids] if is_extension else []
            second = make_turn(
                [*before, *self._tokens(2)],
                self._tokens(draw.randrange(1, 4)),
                attempt_id=lease.attempt_id,
                turn_index=1,
                segment_index=0 if is_extension else 1,
                spans=spans,
            )
            turns.append(second)
        loaded = [
            msgspec.structs.replace(turn, replica_id="rep_0", load_id=f"load_{lease.policy_version}") for turn in turns
        ]
        return make_trace(loaded, lease.attempt_id)

    def _tokens(self, count: int) -> list[int]:
        return [self.random.randrange(VOCABULARY) for _ in range(count)]


def sealed(trace: Trace, digest: str, bound_version: int) -> SealedTrace:
    """What the coordinator keeps of a trace sampled from one version."""
    return SealedTrace(
        attempt_id=trace.attempt_id,
        digest=digest,
        num_turns=len(trace.turns),
        num_tokens=sum(len(turn.token_ids) for turn in trace.turns),
        oldest_version=bound_version,
        newest_version=bound_version,
        mean_version=float(bound_version),
        num_segments=len({turn.segment_index for turn in trace.turns}),
        end_reason=trace.end_reason,
    )


def make_score(job: ScoreJob, value: float | None, outcome: Outcome = Outcome.SCORED) -> Score:
    """The verdict of a scorer on ``job``."""
    return Score(
        job_id=job.job_id,
        attempt_id=job.attempt_id,
        outcome=outcome,
        value=value,
        verifier_version="v1",
        success=bool(value and value > 0.5),
    )


def make_manifest(version: int, step: int, parent_version: int | None, salt: str = "") -> Manifest:
    """A manifest whose weights digest depends on the step and ``salt``, as replayed weights do."""
    data = f"weights {step} {salt}".encode()
    return Manifest(
        version=version,
        step=step,
        parent_version=parent_version,
        files=(FileDigest(name="model.safetensors", num_bytes=len(data), digest=digest_bytes(data)),),
        parameters=(),
        weights_digest=digest_bytes(b"parameters of " + data),
        model_config_digest="config",
        tokenizer_digest="tokenizer",
        template_digest="template",
        dtype="float32",
        probe=Probe(sequences=(), logprobs=(), separates_parent=version % 2 == 1),
    )


def make_proof(manifest: Manifest, replica_id: str = "rep_0") -> LoadProof:
    """The proof of a replica that holds what was published."""
    return LoadProof(
        version=manifest.version,
        replica_id=replica_id,
        load_id=f"load_{manifest.version}",
        weights_digest=manifest.weights_digest,
        probe_max_error=1e-6,
        probe_tolerance=1e-4,
        loaded_in_s=0.1,
    )


def play(scene: Callable[[RunRig], Awaitable[None]], **settings: Any) -> RunRig:
    """Run a scene on a rig whose version 0 is READY; at its end both books must close.

    Args:
        scene: what happens.
        settings: as of ``make_settings``.
    """

    async def run() -> RunRig:
        rig = await RunRig(make_settings(**settings)).start()
        await scene(rig)
        books = await rig.coordinator.books(rig.stores.recorded)
        assert books.are_closed, books
        await rig.coordinator.close()
        return rig

    return asyncio.run(run())


async def refusal_of(call: Awaitable[object]) -> str:
    """The reason for which ``call`` is refused; fails where it is not."""
    try:
        await call
    except Refused as refused:
        return refused.reason
    raise AssertionError("the call must be refused, and was answered")
