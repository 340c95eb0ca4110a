"""Five steps give the same weights with helper processes that join, leave, are stopped and are killed."""

import asyncio
import os
import signal
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from steelyard.errors import ProcessDied
from steelyard.processes.faults import FaultPlan
from steelyard.testing.elastic_rig import PATIENT, ElasticRig, elastic_rig, moved_apart
from steelyard.testing.tiny_model import write_tiny_model
from steelyard.testing.training_data import random_step_batch
from steelyard.types import StepBatch, StepReport

NUM_STEPS = 5
LIMIT_S = 100
SETTINGS = msgspec.structs.replace(PATIENT, unit_deadline_s=5.0)

Plot = Callable[[ElasticRig, int], Awaitable[None]]
"""What happens before each step."""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def root() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="sy-") as short:
        yield Path(short)


def batch(step: int) -> StepBatch:
    return random_step_batch(step, step=step, parent_version=step, num_samples=48, micro_batch_tokens=64)


async def alone(_rig: ElasticRig, _step: int) -> None:
    return None


async def five_steps(root: Path, model_dir: Path, plot: Plot) -> tuple[torch.Tensor, torch.Tensor, list[StepReport]]:
    async with asyncio.timeout(LIMIT_S), elastic_rig(root, model_dir, SETTINGS) as rig:
        start = await rig.weights()
        reports = []
        for step in range(NUM_STEPS):
            await plot(rig, step)
            reports.append(await rig.step(batch(step)))
        return start, await rig.weights(), reports


def test_processes_that_join_leave_stop_and_die_change_no_bit_of_what_is_learned(root: Path, model_dir: Path) -> None:
    """In step 1 a helper is killed in its first unit. In step 2 another is stopped: its lease runs out. In step 3 it
    comes back, and it leaves in step 4."""

    async def plot(rig: ElasticRig, step: int) -> None:
        if step == 0:
            fault = FaultPlan(process="doomed", point="micro_batch", occurrence=2)
            sockets.update(
                zip(
                    ("doomed", "frozen"),
                    await asyncio.gather(rig.start_helper("doomed", fault), rig.start_helper("frozen")),
                    strict=True,
                )
            )
        if step == 1:
            await rig.attach("doomed", sockets["doomed"])
            await rig.ready("doomed")
        if step == 2:
            await rig.attach("frozen", sockets["frozen"])
            await rig.ready("frozen")
            os.kill(rig.helpers["frozen"].pid, signal.SIGSTOP)
        if step == 3:
            os.kill(rig.helpers["frozen"].pid, signal.SIGCONT)
            assert not (await rig.trainer.state()).helpers
            await rig.attach("frozen", sockets["frozen"])
            await rig.ready("frozen")
        if step == 4:
            with pytest.raises(ProcessDied, match="signal 9"):
                await rig.helpers["doomed"].watch()
            assert [helper.name for helper in (await rig.trainer.state()).helpers] == ["frozen"]
            leaving.append(asyncio.create_task(rig.trainer.detach("frozen")))

    sockets: dict[str, Path] = {}
    leaving: list[asyncio.Task[None]] = []
    start, wanted, alone_reports = asyncio.run(five_steps(root / "alone", model_dir, alone))
    _, found, reports = asyncio.run(five_steps(root / "plot", model_dir, plot))
    assert moved_apart(start, wanted, found) <= 1e-4
    assert torch.equal(wanted, found)
    assert [(r.loss, r.grad_norm) for r in reports] == [(r.loss, r.grad_norm) for r in alone_reports]
    assert reports[1].num_units_leased_again >= 1
    assert reports[2].num_units_leased_again >= 1
    assert reports[3].num_units_elsewhere >= 1
    assert leaving[0].done() and leaving[0].exception() is None
