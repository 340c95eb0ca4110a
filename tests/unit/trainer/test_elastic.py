"""Helpers of a trainer, in its own process: whatever they do, the update is the one that the core makes alone."""

import asyncio
import functools
import random
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest
import torch

from steelyard.errors import IntegrityError, Refused, RemoteFailed
from steelyard.testing.elastic_rig import PATIENT, ElasticRig, InlineHelper, elastic_rig, moved_apart
from steelyard.testing.tiny_model import write_tiny_model
from steelyard.testing.training_data import random_step_batch
from steelyard.trainer.elastic_records import ComputeRequest, ProveRequest, PullRequest, UnitDone, WeightProof
from steelyard.trainer.elastic_worker import ElasticWorker
from steelyard.trainer.model import load_model
from steelyard.trainer.records import LossSettings
from steelyard.trainer.slice_plan import Slice, plan_chunks
from steelyard.trainer.slices import read_slices, tensors_digest, write_slices
from steelyard.trainer.step import units_of
from steelyard.trainer.units import LeaseUnit
from steelyard.types import StepReport

NUM_STEPS = 5
Plot = Callable[[ElasticRig, int], Awaitable[None]]


@functools.cache
def model_dir() -> Path:
    return write_tiny_model(Path(tempfile.mkdtemp(prefix="sy-tiny-")))


async def _nothing(_rig: ElasticRig, _step: int) -> None:
    return None


def five_steps(plot: Plot) -> tuple[torch.Tensor, torch.Tensor, list[StepReport]]:
    """Weights before and after, and reports."""

    async def main(root: Path) -> tuple[torch.Tensor, torch.Tensor, list[StepReport]]:
        async with asyncio.timeout(60), elastic_rig(root, model_dir(), PATIENT) as rig:
            start, reports = await rig.weights(), []
            for step in range(NUM_STEPS):
                await plot(rig, step)
                batch = random_step_batch(step, step=step, parent_version=step, num_samples=32, micro_batch_tokens=256)
                reports.append(await rig.step(batch))
            return start, await rig.weights(), reports

    with tempfile.TemporaryDirectory() as root:
        return asyncio.run(main(Path(root)))


@functools.cache
def alone() -> tuple[torch.Tensor, torch.Tensor, list[StepReport]]:
    return five_steps(_nothing)


def check_same(plot: Plot) -> list[StepReport]:
    """The plot's five steps give the bits of five steps alone; their reports."""
    start, wanted, alone_reports = alone()
    _, found, reports = five_steps(plot)
    assert moved_apart(start, wanted, found) <= 1e-4
    assert torch.equal(wanted, found)
    figures = [(r.loss, r.grad_norm, r.ratio_max, r.num_loss_tokens) for r in reports]
    assert figures == [(r.loss, r.grad_norm, r.ratio_max, r.num_loss_tokens) for r in alone_reports]
    return reports


@pytest.mark.parametrize("num_helpers", [1, 2])
def test_with_helpers_the_same_bits_are_learned(num_helpers: int) -> None:
    names = [f"helper-{index}" for index in range(num_helpers)]

    async def plot(rig: ElasticRig, step: int) -> None:
        for name in names if step == 0 else ():
            await rig.attach_inline(name)
        await rig.ready(*names)

    reports = check_same(plot)
    assert sum(report.num_units_elsewhere for report in reports) >= NUM_STEPS


@pytest.mark.parametrize("seed", range(3))
def test_with_helpers_that_join_leave_and_fail_at_random_the_same_bits_are_learned(seed: int) -> None:
    rng = random.Random(seed)

    async def plot(rig: ElasticRig, step: int) -> None:
        present = [helper.name for helper in (await rig.trainer.state()).helpers]
        if present and rng.random() < 0.4:
            leaving.append(asyncio.create_task(rig.trainer.detach(present[0])))
        helper = await rig.attach_inline(f"helper-{step}")
        if rng.random() < 0.5:
            fails_at = rng.randrange(32)

            def on_compute(unit: LeaseUnit) -> None:
                if unit.index >= fails_at:
                    raise RemoteFailed("a worker that failed")

            helper.on_compute = on_compute
        if rng.random() < 0.7:
            await rig.ready(helper.name)

    leaving: list[asyncio.Task[None]] = []
    check_same(plot)
    assert all(task.done() for task in leaving)


class LossyHelper(InlineHelper):
    """Loses the gradients of what it computes."""

    async def compute(self, request: ComputeRequest, deadline_s: float) -> UnitDone:
        return msgspec.structs.replace(await super().compute(request, deadline_s), names=())


class LyingHelper(InlineHelper):
    """Holds other weights than it was sent."""

    def __init__(self, name: str, worker: ElasticWorker) -> None:
        super().__init__(name, worker)
        self.closed = asyncio.Event()

    async def prove(self, request: ProveRequest, deadline_s: float) -> WeightProof:
        return msgspec.structs.replace(await super().prove(request, deadline_s), digest="other")

    async def close(self) -> None:
        await super().close()
        self.closed.set()


def test_a_unit_that_is_dropped_is_seen() -> None:
    """The comparison that all other tests here make must fail where gradients are lost."""

    async def plot(rig: ElasticRig, step: int) -> None:
        if step == 0:
            await rig.trainer.attach(LossyHelper("lossy", ElasticWorker(load_model(model_dir()))))
            await rig.ready("lossy")

    start, wanted, _ = alone()
    _, found, reports = five_steps(plot)
    assert reports[0].num_units_elsewhere >= 1
    assert moved_apart(start, wanted, found) > 1e-2


def test_a_helper_that_proves_other_weights_is_dropped() -> None:
    async def plot(rig: ElasticRig, step: int) -> None:
        if step == 0:
            helper = LyingHelper("liar", ElasticWorker(load_model(model_dir())))
            await rig.trainer.attach(helper)
            async with asyncio.timeout(30):
                await helper.closed.wait()
            assert not (await rig.trainer.state()).helpers

    assert sum(report.num_units_elsewhere for report in check_same(plot)) == 0


def test_a_helper_comes_once_and_only_one_that_is_here_goes() -> None:
    async def plot(rig: ElasticRig, step: int) -> None:
        if step == 0:
            await rig.attach_inline("one")
            with pytest.raises(Refused, match="helper one is here already"):
                await rig.attach_inline("one")
            with pytest.raises(Refused, match="there is no helper two"):
                await rig.trainer.detach("two")

    check_same(plot)


def test_a_worker_computes_only_at_the_version_that_it_holds() -> None:
    async def plot(rig: ElasticRig, step: int) -> None:
        if step:
            return
        helper = await rig.attach_inline("one")
        await rig.ready("one")
        (unit, *_) = units_of(random_step_batch(1, step=4, parent_version=4), LossSettings()).units
        with pytest.raises(Refused, match="the version held is 0, not 4"):
            await helper.compute(ComputeRequest(unit=unit, loss=LossSettings()), 10)
        with pytest.raises(Refused, match="the weights sent last are of version 0"):
            await helper.prove(ProveRequest(version=3), 10)
        with pytest.raises(Refused, match="there is no sum of unit 7 of step 0"):
            await helper.pull(PullRequest(step=0, unit=7, slices=()), 10)

    check_same(plot)


@pytest.mark.parametrize("chunk_bytes", [1, 12, 40, 1 << 20])
def test_slices_cover_every_tensor_once_and_carry_its_bytes(chunk_bytes: int) -> None:
    tensors = {"a": torch.rand(3, 5), "b": torch.rand(7), "empty": torch.rand(0), "scalar": torch.rand(())}
    copies = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    chunks = list(plan_chunks({name: tensor.numel() for name, tensor in tensors.items()}, 4, chunk_bytes))
    for slices in chunks:
        data = read_slices(tensors, slices)
        assert 0 < len(data) <= max(4, chunk_bytes)
        write_slices(copies, slices, data)
    assert all(torch.equal(tensors[name], copies[name]) for name in tensors)
    assert tensors_digest(tensors) == tensors_digest(dict(reversed(copies.items())))
    copies["b"][3] += 1
    assert tensors_digest(tensors) != tensors_digest(copies)


def test_slices_that_do_not_fit_are_refused() -> None:
    tensors = {"a": torch.zeros(4)}
    with pytest.raises(IntegrityError, match=r"slice \[2, 5\) of a must lie in a tensor, got 4 elements"):
        read_slices(tensors, (Slice(name="a", start=2, stop=5),))
    with pytest.raises(IntegrityError, match="got no such tensor"):
        write_slices(tensors, (Slice(name="b", start=0, stop=1),), bytes(4))
    with pytest.raises(IntegrityError, match="slices of 8 bytes must come with as many, got 4"):
        write_slices(tensors, (Slice(name="a", start=0, stop=2),), bytes(4))
