"""A core of several ranks (FSDP2 over gloo, real processes) learns what one process learns."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
import pytest
import torch

from steelyard.errors import IntegrityError, RunError
from steelyard.processes.child import thread_environment
from steelyard.testing.parallel_ranks import SETTINGS, RankOptions, RankResult, rank_batch
from steelyard.testing.tiny_model import write_tiny_model
from steelyard.trainer.model import load_model
from steelyard.trainer.optim import apply_step, learning_rate, make_optimizer
from steelyard.trainer.parallel import ShardedCore, join_ranks, leave_ranks
from steelyard.trainer.parallel_checkpoint import read_shards, shard_name, write_shards
from steelyard.trainer.step import accumulate_gradients

NUM_STEPS = 2
LIMIT_S = 100


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


def run_ranks(root: Path, model_dir: Path, name: str, num_ranks: int, **options: object) -> RankResult:
    path = root / f"{name}.options"
    path.write_bytes(
        msgspec.json.encode(
            RankOptions(
                root=str(root), name=name, model_dir=str(model_dir), num_ranks=num_ranks, parent_pid=os.getpid(),
                **options,  # type: ignore[arg-type]
            )
        )
    )  # fmt: skip
    command = [sys.executable, "-m", "steelyard.testing.parallel_ranks", str(path)]
    environment = {**os.environ, **thread_environment(1)}
    with ExitStack() as stack:
        log = stack.enter_context((root / f"{name}.log").open("w"))
        ranks = [
            stack.enter_context(subprocess.Popen([*command, str(rank)], stderr=log, env=environment))
            for rank in range(num_ranks)
        ]
        for rank in ranks:
            stack.callback(rank.kill)
        codes = [rank.wait(timeout=LIMIT_S) for rank in ranks]
    assert codes == [0] * num_ranks, (root / f"{name}.log").read_text()[-2000:]
    return msgspec.json.decode((root / f"{name}.json").read_bytes(), type=RankResult)


def one_process(model_dir: Path) -> tuple[RankResult, dict[str, torch.Tensor]]:
    module = load_model(model_dir)
    optimizer = make_optimizer(module, SETTINGS.optimizer)
    losses, norms, num_tokens = [], [], []
    for step in range(NUM_STEPS):
        _, loss = accumulate_gradients(module, rank_batch(step), SETTINGS.loss)
        norms.append(apply_step(module, optimizer, learning_rate(step, SETTINGS.optimizer), 1.0, "step"))
        losses.append(loss.loss)
        num_tokens.append(loss.num_tokens)
    tensors = {name: parameter.detach() for name, parameter in module.named_parameters()}
    return RankResult(losses=tuple(losses), grad_norms=tuple(norms), num_tokens=tuple(num_tokens)), tensors


def exported(root: Path, name: str) -> dict[str, torch.Tensor]:
    return {n: parameter.detach() for n, parameter in load_model(root / f"{name}.export").named_parameters()}


def largest_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@contextmanager
def one_rank(tmp_path: Path, model_dir: Path) -> Iterator[ShardedCore]:
    """A core of one rank, in this process."""
    mesh = join_ranks(tmp_path / "store", 0, 1, 30.0)
    try:
        yield ShardedCore(SETTINGS, load_model(model_dir), mesh)
    finally:
        leave_ranks()


def test_two_ranks_learn_what_one_learns_and_any_number_goes_on_from_their_shards(
    tmp_path: Path, model_dir: Path
) -> None:
    wanted, weights = one_process(model_dir)
    two = run_ranks(tmp_path, model_dir, "two", 2, checkpoint_at=1)
    assert two.losses == pytest.approx(wanted.losses, abs=1e-5)
    assert two.grad_norms == pytest.approx(wanted.grad_norms, rel=1e-4)
    assert two.num_tokens == wanted.num_tokens
    assert largest_difference(exported(tmp_path, "two"), weights) < 1e-4
    rest = run_ranks(tmp_path, model_dir, "resumed", 2, first=1, resume_from="two.checkpoint")
    assert rest.losses == two.losses[1:]
    assert largest_difference(exported(tmp_path, "resumed"), exported(tmp_path, "two")) == 0.0
    with one_rank(tmp_path, model_dir) as core:
        assert read_shards(tmp_path / "two.checkpoint", core) == 1
        losses = [core.train_step(rank_batch(step))[1].loss for step in range(1, NUM_STEPS)]
        assert losses == pytest.approx(wanted.losses[1:], abs=1e-5)
        assert largest_difference(core.full_tensors(), weights) < 1e-4


def test_a_damaged_shard_is_refused_and_named(tmp_path: Path, model_dir: Path) -> None:
    with one_rank(tmp_path, model_dir) as core:
        write_shards(tmp_path / "step-000000", core, 0)
        path = tmp_path / "step-000000" / shard_name(0, 1)
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        with pytest.raises(IntegrityError, match="rank-00000-of-00001 must have digest"):
            read_shards(tmp_path / "step-000000", core)
        (tmp_path / "step-000000" / "checkpoint.json").unlink()
        with pytest.raises(IntegrityError, match=r"checkpoint\.json must be the manifest"):
            read_shards(tmp_path / "step-000000", core)


def test_ranks_that_do_not_come_are_not_waited_for(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="rank 0 must meet 1 others within 1 s"):
        join_ranks(tmp_path / "store", 0, 2, 1.0)
