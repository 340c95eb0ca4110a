"""One rank of a sharded core that takes steps: ``python -m steelyard.testing.parallel_ranks OPTIONS.json RANK``.

Rank 0 writes what came out as JSON beside the options.
"""

import os
import sys
from pathlib import Path

import msgspec
import torch

from steelyard.processes.child import die_with_parent
from steelyard.testing.training_data import random_step_batch
from steelyard.trainer.checkpoint import read_companions
from steelyard.trainer.model import load_model
from steelyard.trainer.parallel import ShardedCore, join_ranks, leave_ranks
from steelyard.trainer.parallel_checkpoint import export_model, read_shards, write_shards
from steelyard.trainer.records import OptimizerSettings, TrainerSettings
from steelyard.types import Record, StepBatch

SETTINGS = TrainerSettings(checkpoints_dir="", optimizer=OptimizerSettings(learning_rate=1e-2))


class RankOptions(Record, frozen=True, kw_only=True):
    """Steps ``[first, stop)`` over seeded batches, from a checkpoint where one is named; each thing under ``root``.

    A checkpoint is written before step ``checkpoint_at``.
    """

    root: str
    name: str
    model_dir: str
    num_ranks: int
    parent_pid: int
    first: int = 0
    stop: int = 2
    checkpoint_at: int | None = None
    resume_from: str | None = None
    deadline_s: float = 60.0


class RankResult(Record, frozen=True, kw_only=True):
    """Of each step the loss, the gradient norm and the sampled tokens that were computed."""

    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]
    num_tokens: tuple[int, ...]


def rank_batch(step: int) -> StepBatch:
    """A batch whose last micro-batches have fewer rows than some cores have ranks."""
    return random_step_batch(step, step=step, parent_version=step, num_samples=7, micro_batch_tokens=128)


def main() -> None:
    """Take the steps and write an export."""
    options = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=RankOptions)
    rank = int(sys.argv[2])
    die_with_parent(options.parent_pid)
    torch.set_num_threads(1)
    root, model_dir = Path(options.root), Path(options.model_dir)
    mesh = join_ranks(root / f"{options.name}.store", rank, options.num_ranks, options.deadline_s)
    core = ShardedCore(SETTINGS, load_model(model_dir), mesh)
    if options.resume_from is not None:
        assert read_shards(root / options.resume_from, core) == options.first
    results = []
    for step in range(options.first, options.stop):
        if step == options.checkpoint_at:
            write_shards(root / f"{options.name}.checkpoint", core, step)
        results.append(core.train_step(rank_batch(step)))
    export_model(root / f"{options.name}.export", core, read_companions(model_dir))
    if rank == 0:
        result = RankResult(
            losses=tuple(loss.loss for _, loss, _ in results),
            grad_norms=tuple(norm for _, _, norm in results),
            num_tokens=tuple(sum(map(len, loss.current_log_ratios + loss.older_log_ratios)) for _, loss, _ in results),
        )
        (root / f"{options.name}.json").write_bytes(msgspec.json.encode(result))
    leave_ranks()
    os._exit(0)


if __name__ == "__main__":
    main()
