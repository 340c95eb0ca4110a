"""A core of several ranks (FSDP2 over gloo, real processes) learns what one process learns."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from steelyard.errors import IntegrityError, RunError
from steelyard.testing.parallel_ranks import SETTINGS, one_process, rank_batch, run_ranks
from steelyard.testing.tiny_model import write_tiny_model
from steelyard.trainer.model import load_model
from steelyard.trainer.parallel import ShardedCore, join_ranks, leave_ranks
from steelyard.trainer.parallel_checkpoint import read_shards, shard_name, write_shards

NUM_STEPS = 2
LIMIT_S = 100


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


def parameters_in(directory: Path) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in load_model(directory).named_parameters()}


def largest_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@contextmanager
def one_rank(tmp_path: Path, model_dir: Path) -> Iterator[ShardedCore]:
    """A core of one rank, in this process."""
    mesh = join_ranks(tmp_path / "store-of-one", 0, 1, 30.0)
    try:
        yield ShardedCore(SETTINGS, load_model(model_dir), mesh)
    finally:
        leave_ranks()


def test_two_ranks_learn_what_one_learns_and_any_number_goes_on_from_their_shards(
    tmp_path: Path, model_dir: Path
) -> None:
    wanted, weights = one_process(model_dir, NUM_STEPS)
    two = run_ranks(tmp_path, model_dir, 2, num_steps=NUM_STEPS, limit_s=LIMIT_S)
    assert two.losses == pytest.approx(wanted.losses, abs=1e-5)
    assert two.grad_norms == pytest.approx(wanted.grad_norms, rel=1e-4)
    assert two.num_tokens == wanted.num_tokens
    assert largest_difference(parameters_in(tmp_path / "export"), weights) < 1e-4
    assert two.losses_again == two.losses[1:]
    assert largest_difference(parameters_in(tmp_path / "export-again"), parameters_in(tmp_path / "export")) == 0.0
    with one_rank(tmp_path, model_dir) as core:
        assert read_shards(tmp_path / "checkpoint", core) == 1
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
