"""The training loop, as control drives it.

::

    next_batch -> traces -> assemble -> batch durable -> STEP_BEGUN -> optimizer step -> publish -> (load, READY)
                                                                                           `-> CHECKPOINTED

    consumes      finished groups
    waits for     the batch of its step (deadline, culprits named), the trainer
    unblocked by  groups that complete
    produces      versions, checkpoints, one metrics row a step
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from steelyard.assembly.advantage import AdvantageCounts, GroupAdvantages, group_advantages
from steelyard.assembly.batch import build_step_batch, encode_step_batch
from steelyard.assembly.samples import trace_samples
from steelyard.clock import Clock
from steelyard.config import Config
from steelyard.coordinator.records import BatchMember, BatchPlan
from steelyard.coordinator.service import Coordinator
from steelyard.errors import IntegrityError
from steelyard.observe.rows import StepRow
from steelyard.run.step_statistics import BatchNumbers, batch_numbers
from steelyard.run.stores import Stores
from steelyard.run.tolerances import mismatch_bound
from steelyard.run.versions import VersionKeeper
from steelyard.trainer.client import TrainerClient
from steelyard.trainer.records import CheckpointRequest, TrainRequest
from steelyard.types import Score, StepBatch, StepReport, Trace


class Assembled(NamedTuple):
    """A batch with its bytes, their digest, and what is said of it."""

    batch: StepBatch
    data: bytes
    digest: str
    counts: AdvantageCounts


def advantages_of(config: Config, scores: Sequence[Score]) -> GroupAdvantages:
    """Advantages of one group as the configuration wants them."""
    return group_advantages(
        scores,
        normalise_by_std=config.algorithm.normalise_by_std,
        permutation_seed=config.run.seed if config.algorithm.permute_rewards else None,
    )


def assemble(config: Config, plan: BatchPlan, traces: Sequence[Trace]) -> Assembled:
    """Traces and scores of a plan, joined into the batch of its step. ``traces`` in the order of the members."""
    by_group: dict[str, list[BatchMember]] = defaultdict(list)
    for member in plan.members:
        by_group[member.group_id].append(member)
    counts = AdvantageCounts()
    advantage_of: dict[str, float] = {}
    for group_id in plan.group_ids:
        group = advantages_of(config, [member.score for member in by_group[group_id]])
        counts.add(group, config.rollout.group_size)
        advantage_of.update(zip(group.attempt_ids, group.advantages, strict=True))
    samples = [sample for trace in traces for sample in trace_samples(trace, advantage_of[trace.attempt_id])]
    batch = build_step_batch(plan.step, plan.parent_version, samples, config.train.micro_batch_tokens)
    data, digest = encode_step_batch(batch)
    return Assembled(batch, data, digest, counts)


class TrainingLoop:
    """Takes optimizer steps one after another.

    Args:
        on_row: gets the metrics row of each step.
    """

    def __init__(
        self,
        config: Config,
        coordinator: Coordinator,
        trainer: TrainerClient,
        versions: VersionKeeper,
        stores: Stores,
        clock: Clock,
        on_row: Callable[[StepRow], None],
    ) -> None:
        self._config = config
        self._coordinator = coordinator
        self._trainer = trainer
        self._versions = versions
        self._stores = stores
        self._clock = clock
        self._on_row = on_row

    async def run(self) -> None:
        """Train until ``train.max_steps`` steps are done; all of them are covered by a checkpoint then."""
        await self._make_up_checkpoint()
        for step in range(self._coordinator.state.next_step, self._config.train.max_steps):
            await self._take_step(step)

    async def _take_step(self, step: int) -> None:
        watch = _Stopwatch()
        plan = await self._coordinator.next_batch(step, self._batch_deadline_s())
        wait_s = watch.lap()
        assembled, numbers = await self._assemble(plan)
        path = await self._stores.batches.put(step, assembled.data)
        await self._coordinator.begin_step(
            step=step,
            parent_version=plan.parent_version,
            group_ids=plan.group_ids,
            sample_ids=tuple(f"{s.attempt_id}/{s.segment_index}" for s in assembled.batch.samples),
            batch_digest=assembled.digest,
        )
        assemble_s = watch.lap()
        version = self._coordinator.next_version()
        request = TrainRequest(path=str(path), digest=assembled.digest, step=step, version=version)
        report = await self._trainer.train_step(request)
        train_s = watch.lap()
        await self._versions.publish(version, plan.parent_version)
        self._versions.load_soon(version)
        publish_s = watch.lap()
        if self._is_checkpoint_due(step + 1):
            await self.checkpoint(step + 1)
        checkpoint_s = watch.lap()
        self._on_row(
            self._row(
                report,
                numbers,
                wait_s=wait_s,
                assemble_s=assemble_s,
                train_s=train_s,
                publish_s=publish_s,
                load_s=self._versions.load_s.get(plan.parent_version, 0.0),
                checkpoint_s=checkpoint_s,
                wall_s=watch.total(),
            )
        )

    async def checkpoint(self, step: int) -> None:
        """Make the state before ``step`` durable, then forget batches that every kept checkpoint covers."""
        report = await self._trainer.checkpoint(CheckpointRequest(step=step))
        await self._coordinator.checkpointed(step, report.digest)
        await self._forget_covered()

    async def _make_up_checkpoint(self) -> None:
        """A crash may have come between a step and its checkpoint; the steps are replayed by now."""
        checkpoints, next_step = self._coordinator.state.checkpoints, self._coordinator.state.next_step
        num_uncovered = next_step - (checkpoints[-1] if checkpoints else 0)
        is_last = next_step == self._config.train.max_steps
        if num_uncovered >= self._config.train.checkpoint_every or (is_last and num_uncovered):
            await self.checkpoint(next_step)
        else:
            await self._forget_covered()

    async def _forget_covered(self) -> None:
        for covered in await self._coordinator.deletable_batches():
            await self._coordinator.batch_deleted(covered)
            await self._stores.batches.delete(covered)

    async def _assemble(self, plan: BatchPlan) -> tuple[Assembled, BatchNumbers]:
        traces = await asyncio.gather(*(self._read(member) for member in plan.members))
        assembled = await asyncio.to_thread(assemble, self._config, plan, traces)
        numbers = batch_numbers(
            plan.members,
            traces,
            assembled.batch,
            lags=[self._lag(plan, member) for member in plan.members],
            num_groups=len(plan.group_ids),
            num_no_signal=assembled.counts.num_no_signal,
            now_s=self._clock.now_s(),
        )
        return assembled, numbers

    async def _read(self, member: BatchMember) -> Trace:
        trace, digest = await self._stores.traces.read(member.attempt_id)
        sealed = member.trace.digest
        if digest != sealed:
            raise IntegrityError(
                f"trace of {member.attempt_id} must have the digest of its seal {sealed}, got {digest}"
            )
        return trace

    def _lag(self, plan: BatchPlan, member: BatchMember) -> int:
        oldest = self._coordinator.version(member.trace.oldest_version)
        return plan.step - (oldest.step if oldest is not None else plan.step)

    def _is_checkpoint_due(self, step: int) -> bool:
        return step % self._config.train.checkpoint_every == 0 or step == self._config.train.max_steps

    def _batch_deadline_s(self) -> float:
        """Every attempt may use up its budget, and the tail may be waited for and replaced."""
        rollout, admission = self._config.rollout, self._config.admission
        attempts_s = rollout.max_attempts * rollout.max_turns * rollout.turn_deadline_s
        return attempts_s + (admission.max_stale_retries + 1) * admission.max_tail_wait_s

    def _row(
        self,
        report: StepReport,
        numbers: BatchNumbers,
        *,
        wait_s: float,
        assemble_s: float,
        train_s: float,
        publish_s: float,
        load_s: float,
        checkpoint_s: float,
        wall_s: float,
    ) -> StepRow:
        return StepRow(
            at_s=self._clock.now_s(),
            step=report.step,
            version=report.version,
            max_steps=self._config.train.max_steps,
            loss=report.loss,
            grad_norm=report.grad_norm,
            kl=report.kl,
            ratio_mean=report.ratio_mean,
            ratio_max=report.ratio_max,
            clip_frac=report.clip_frac,
            entropy=report.entropy,
            learning_rate=report.learning_rate,
            num_tokens=numbers.num_tokens,
            num_loss_tokens=numbers.num_loss_tokens,
            num_trajectories=numbers.num_trajectories,
            num_groups=numbers.num_groups,
            num_useful_groups=numbers.num_groups - numbers.num_no_signal,
            num_no_signal=numbers.num_no_signal,
            reward_mean=numbers.reward_mean,
            success_frac=numbers.success_frac,
            first_try_frac=numbers.first_try_frac,
            lag_mean=numbers.lag_mean,
            lag_max=numbers.lag_max,
            age_mean_s=numbers.age_mean_s,
            turns_mean=numbers.turns_mean,
            tokens_p50=numbers.tokens_p50,
            tokens_p99=numbers.tokens_p99,
            tokens_max=numbers.tokens_max,
            wait_s=wait_s,
            assemble_s=assemble_s,
            train_s=train_s,
            publish_s=publish_s,
            load_s=load_s,
            checkpoint_s=checkpoint_s,
            wall_s=wall_s,
            engine=self._config.inference.engine,
            mismatch=report.mismatch,
            policy_change=report.policy_change,
            mismatch_bound=mismatch_bound(self._config),
        )


class _Stopwatch:
    """Durations for people, in seconds; nothing is decided by them."""

    def __init__(self) -> None:
        self._started_s = self._last_s = time.perf_counter()

    def lap(self) -> float:
        now_s = time.perf_counter()
        lap_s, self._last_s = now_s - self._last_s, now_s
        return lap_s

    def total(self) -> float:
        return time.perf_counter() - self._started_s
