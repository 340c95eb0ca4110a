"""The trainer as others meet it: steps, publication, checkpoints, and the same bits again."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest

from steelyard.assembly.batch import encode_step_batch
from steelyard.errors import IntegrityError, Refused
from steelyard.testing.tiny_model import write_tiny_model
from steelyard.testing.training_data import random_step_batch
from steelyard.trainer.checkpoint import FAULT_POINTS, read_checkpoint
from steelyard.trainer.records import (
    CheckpointReport,
    CheckpointRequest,
    OptimizerSettings,
    PublishRequest,
    TrainerSettings,
    TrainRequest,
)
from steelyard.trainer.trainer import Trainer
from steelyard.types import StepReport
from steelyard.weights.publisher import VersionPublisher


class Killed(BaseException):
    """Stands for SIGKILL: nothing in the code under test catches it."""


class Bench:
    """A run directory with a tiny policy, and the calls that control would make."""

    def __init__(self, root: Path, model_dir: Path) -> None:
        self.root = root
        self.model_dir = model_dir
        self.settings = TrainerSettings(
            checkpoints_dir=str(root / "checkpoints"), optimizer=OptimizerSettings(learning_rate=1e-2)
        )
        for name in ("weights", "checkpoints", "batches"):
            (root / name).mkdir(parents=True, exist_ok=True)

    async def open(
        self, checkpoint: CheckpointReport | None = None, fault: Callable[[str], None] | None = None
    ) -> Trainer:
        return await Trainer.open(
            self.settings,
            VersionPublisher(self.root / "weights", self.model_dir, 1e-4),
            model_dir=self.model_dir,
            checkpoint=Path(checkpoint.path) if checkpoint else None,
            checkpoint_digest=checkpoint.digest if checkpoint else None,
            fault=fault or (lambda _point: None),
        )

    def request(self, step: int, parent_version: int | None = None) -> TrainRequest:
        parent = step if parent_version is None else parent_version
        data, digest = encode_step_batch(random_step_batch(step, step=step, parent_version=parent))
        path = self.root / "batches" / f"{digest}.msgpack"
        path.write_bytes(data)
        return TrainRequest(path=str(path), digest=digest, step=step, version=step + 1)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def bench(tmp_path: Path, model_dir: Path) -> Bench:
    return Bench(tmp_path / "run", model_dir)


def run(work: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        await asyncio.wait_for(work(), 60)

    asyncio.run(main())


async def steps(bench: Bench, trainer: Trainer, first: int, stop: int) -> list[StepReport]:
    return [await trainer.train_step(bench.request(step)) for step in range(first, stop)]


def test_a_step_changes_the_weights_and_reports_what_it_did(bench: Bench) -> None:
    async def work() -> None:
        trainer = await bench.open()
        before = await trainer.state()
        (report,) = await steps(bench, trainer, 0, 1)
        after = await trainer.state()
        await trainer.close()
        batch = random_step_batch(0)
        assert (before.step, before.version, after.step, after.version) == (0, 0, 1, 1)
        assert before.weights_digest != after.weights_digest
        assert report.num_loss_tokens == batch.loss_denominator
        assert report.num_tokens == sum(len(sample.token_ids) for sample in batch.samples)
        assert report.grad_norm > 0 and report.entropy > 0 and report.ratio_max > 0
        assert report.learning_rate == 1e-2

    run(work)


def test_training_on_an_advantage_makes_the_sampled_tokens_likelier(bench: Bench) -> None:
    """Steps over one batch of one sample with a positive advantage raise its mean ratio, up to the clip."""

    async def work() -> None:
        trainer = await bench.open()
        ratios = []
        for step in range(4):
            batch = random_step_batch(0, step=step, parent_version=step, num_samples=1)
            good = tuple(msgspec.structs.replace(sample, advantage=1.0) for sample in batch.samples)
            micro = tuple(msgspec.structs.replace(m, advantages=b"\0\0\x80\x3f") for m in batch.micro_batches)
            data, digest = encode_step_batch(msgspec.structs.replace(batch, samples=good, micro_batches=micro))
            path = bench.root / "batches" / digest
            path.write_bytes(data)
            request = TrainRequest(path=str(path), digest=digest, step=step, version=step + 1)
            ratios.append((await trainer.train_step(request)).ratio_mean)
        await trainer.close()
        assert ratios == sorted(ratios) and ratios[-1] > 1.2 * ratios[0]

    run(work)


def test_the_same_batches_from_the_same_checkpoint_give_the_same_bits(bench: Bench) -> None:
    async def work() -> None:
        trainer = await bench.open()
        await steps(bench, trainer, 0, 2)
        saved = await trainer.checkpoint(CheckpointRequest(step=2, extra=b"cursor"))
        reports = await steps(bench, trainer, 2, 5)
        straight = await trainer.state()
        await trainer.close()
        again = await bench.open(saved)
        assert (await again.state()).checkpoint_extra == b"cursor"
        assert (await again.state()).weights_digest == saved.weights_digest
        replayed = await steps(bench, again, 2, 5)
        state = await again.state()
        await again.close()
        assert state.weights_digest == straight.weights_digest
        assert [msgspec.structs.replace(r, duration_s=0) for r in replayed] == [
            msgspec.structs.replace(r, duration_s=0) for r in reports
        ]

    run(work)


def test_a_replayed_step_publishes_the_version_that_lives_on(bench: Bench) -> None:
    async def work() -> None:
        trainer = await bench.open()
        await trainer.publish(PublishRequest(version=0, parent_version=None))
        saved = await trainer.checkpoint(CheckpointRequest(step=0))
        await steps(bench, trainer, 0, 1)
        first = await trainer.publish(PublishRequest(version=1, parent_version=0))
        await trainer.close()
        again = await bench.open(saved)
        await steps(bench, again, 0, 1)
        assert await again.publish(PublishRequest(version=1, parent_version=0)) == first
        await again.close()
        assert (first.step, first.parent_version) == (1, 0)

    run(work)


def test_a_step_taken_before_and_a_step_out_of_order_are_refused(bench: Bench) -> None:
    async def work() -> None:
        trainer = await bench.open()
        await steps(bench, trainer, 0, 1)
        with pytest.raises(Refused, match="double") as double:
            await trainer.train_step(bench.request(0))
        with pytest.raises(Refused, match="unknown") as unknown:
            await trainer.train_step(bench.request(2))
        assert (double.value.reason, unknown.value.reason) == ("double", "unknown")
        assert (await trainer.state()).step == 1
        await trainer.close()

    run(work)


def test_a_batch_for_other_weights_and_a_changed_batch_file_are_refused(bench: Bench) -> None:
    async def work() -> None:
        trainer = await bench.open()
        before = await trainer.state()
        with pytest.raises(IntegrityError, match="at version 0, got one of step 0 at version 3"):
            await trainer.train_step(bench.request(0, parent_version=3))
        request = bench.request(0)
        Path(request.path).write_bytes(Path(request.path).read_bytes()[:-1])
        with pytest.raises(IntegrityError, match=f"must have digest {request.digest}"):
            await trainer.train_step(request)
        Path(request.path).unlink()
        with pytest.raises(IntegrityError, match="must be readable"):
            await trainer.train_step(request)
        assert await trainer.state() == before
        await trainer.close()

    run(work)


def test_only_the_weights_held_can_be_published_and_checkpointed(bench: Bench) -> None:
    async def work() -> None:
        trainer = await bench.open()
        with pytest.raises(Refused, match="the weights held are version 0, not 1"):
            await trainer.publish(PublishRequest(version=1, parent_version=0))
        with pytest.raises(Refused, match="the next step is 0, not 4"):
            await trainer.checkpoint(CheckpointRequest(step=4))
        await trainer.close()

    run(work)


def test_old_checkpoints_go_and_the_one_before_the_newest_stays(bench: Bench) -> None:
    async def work() -> None:
        bench.settings = msgspec.structs.replace(bench.settings, keep_checkpoints=1)
        trainer = await bench.open()
        for step in range(4):
            await trainer.checkpoint(CheckpointRequest(step=step))
            await steps(bench, trainer, step, step + 1)
        await trainer.close()
        names = sorted(path.name for path in (bench.root / "checkpoints").iterdir())
        assert names == ["step-000002", "step-000003"]

    run(work)


@pytest.mark.parametrize("point", FAULT_POINTS)
def test_a_trainer_killed_while_it_writes_a_checkpoint_leaves_a_whole_one_or_none(bench: Bench, point: str) -> None:
    def die(reached: str) -> None:
        if reached == point:
            raise Killed

    async def work() -> None:
        trainer = await bench.open(fault=die)
        with pytest.raises(Killed):
            await trainer.checkpoint(CheckpointRequest(step=0))
        await trainer.close()
        survivor = await bench.open()
        report = await survivor.checkpoint(CheckpointRequest(step=0))
        await survivor.close()
        assert read_checkpoint(Path(report.path), report.digest).manifest.step == 0
        assert [path.name for path in (bench.root / "checkpoints").iterdir()] == ["step-000000"]

    run(work)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors_state", "config.json"])
def test_a_damaged_checkpoint_is_refused_and_the_file_is_named(bench: Bench, name: str) -> None:
    async def work() -> None:
        trainer = await bench.open()
        await steps(bench, trainer, 0, 1)
        saved = await trainer.checkpoint(CheckpointRequest(step=1))
        await trainer.close()
        path = Path(saved.path) / name
        data = bytearray(path.read_bytes())
        data[-2] ^= 1
        path.write_bytes(data)
        with pytest.raises(IntegrityError, match=f"{name} must have digest"):
            await bench.open(saved)

    run(work)


def test_a_checkpoint_with_another_digest_than_the_journal_s_is_refused(bench: Bench) -> None:
    async def work() -> None:
        trainer = await bench.open()
        saved = await trainer.checkpoint(CheckpointRequest(step=0))
        await trainer.close()
        with pytest.raises(IntegrityError, match="checkpoint step-000000 must have digest other"):
            await bench.open(msgspec.structs.replace(saved, digest="other"))

    run(work)


def test_state_is_answered_while_a_step_is_under_way(bench: Bench) -> None:
    async def work() -> None:
        loop = asyncio.get_running_loop()
        reached, go_on = asyncio.Event(), asyncio.Event()

        def wait_in_step(point: str) -> None:
            if point == "gradients_ready":
                loop.call_soon_threadsafe(reached.set)
                asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result(30)

        trainer = await bench.open(fault=wait_in_step)
        stepping = asyncio.create_task(trainer.train_step(bench.request(0)))
        await reached.wait()
        during = await trainer.state()
        go_on.set()
        await stepping
        after = await trainer.state()
        await trainer.close()
        assert (during.is_busy, during.step) == (True, 0)
        assert (after.is_busy, after.step) == (False, 1)

    run(work)


def test_a_resumed_trainer_outlives_the_checkpoint_that_it_was_opened_from(bench: Bench) -> None:
    async def work() -> None:
        first = await bench.open()
        saved = await first.checkpoint(CheckpointRequest(step=0))
        await first.close()
        bench.model_dir = Path(saved.path)
        again = await bench.open(saved)
        for step in range(3):
            await steps(bench, again, step, step + 1)
            await again.checkpoint(CheckpointRequest(step=step + 1))
        assert not Path(saved.path).exists()
        manifest = await again.publish(PublishRequest(version=3, parent_version=None))
        await again.close()
        assert "tokenizer.json" in {file.name for file in manifest.files}

    run(work)
