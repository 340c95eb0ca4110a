"""Ranks of a sharded core that take steps, each ``python -m steelyard.testing.parallel_ranks OPTIONS.json RANK``.

Rank 0 writes what came out as JSON beside the options.
"""

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import msgspec
import torch

from steelyard.errors import RunError
from steelyard.processes.child import die_with_parent, thread_environment
from steelyard.testing.training_data import random_step_batch
from steelyard.trainer.checkpoint import read_companions
from steelyard.trainer.model import load_model
from steelyard.trainer.optim import apply_step, learning_rate, make_optimizer
from steelyard.trainer.parallel import ShardedCore, join_ranks, leave_ranks
from steelyard.trainer.parallel_checkpoint import export_model, read_shards, write_shards
from steelyard.trainer.records import OptimizerSettings, TrainerSettings
from steelyard.trainer.step import accumulate_gradients
from steelyard.types import Record, StepBatch

SETTINGS = TrainerSettings(checkpoints_dir="", optimizer=OptimizerSettings(learning_rate=1e-2))


class RankOptions(Record, frozen=True, kw_only=True):
    """Take ``num_steps`` steps over seeded batches; before step ``checkpoint_at`` a checkpoint is written.

    From it the steps behind it are taken again by a new core. All files are under ``root``.
    """

    root: str
    model_dir: str
    num_ranks: int
    parent_pid: int
    num_steps: int
    checkpoint_at: int
    deadline_s: float = 60.0


class RankResult(Record, frozen=True, kw_only=True):
    """Of each step the loss, the gradient norm and the sampled tokens that were computed; losses when taken again."""

    losses: tuple[float, ...]
    losses_again: tuple[float, ...] = ()
    grad_norms: tuple[float, ...]
    num_tokens: tuple[int, ...]


def rank_batch(step: int) -> StepBatch:
    """A batch whose last micro-batches have fewer rows than some cores have ranks."""
    return random_step_batch(step, step=step, parent_version=step, num_samples=7, micro_batch_tokens=128)


def run_ranks(root: Path, model_dir: Path, num_ranks: int, *, num_steps: int, limit_s: float) -> RankResult:
    """Run the ranks as processes; they leave ``checkpoint`` and ``export`` in ``root``.

    Raises:
        RunError: a rank failed; shows the end of the log.
        subprocess.TimeoutExpired: they did not end within ``limit_s`` seconds.
    """
    options = RankOptions(
        root=str(root), model_dir=str(model_dir), num_ranks=num_ranks, parent_pid=os.getpid(), num_steps=num_steps,
        checkpoint_at=1,
    )  # fmt: skip
    path, log_path = root / "options.json", root / "ranks.log"
    path.write_bytes(msgspec.json.encode(options))
    command = [sys.executable, "-m", "steelyard.testing.parallel_ranks", str(path)]
    environment = {**os.environ, **thread_environment(1)}
    with ExitStack() as stack:
        log = stack.enter_context(log_path.open("w"))
        ranks = [
            stack.enter_context(subprocess.Popen([*command, str(rank)], stderr=log, env=environment))
            for rank in range(num_ranks)
        ]
        for rank in ranks:
            stack.callback(rank.kill)
        codes = [rank.wait(timeout=limit_s) for rank in ranks]
    if any(codes):
        raise RunError(f"ranks must end with 0, got {codes}: {log_path.read_text()[-2000:]}")
    return msgspec.json.decode((root / "result.json").read_bytes(), type=RankResult)


def one_process(model_dir: Path, num_steps: int) -> tuple[RankResult, dict[str, torch.Tensor]]:
    """The same steps in this process without any rank; and the parameters then."""
    module = load_model(model_dir)
    optimizer = make_optimizer(module, SETTINGS.optimizer)
    losses, norms, num_tokens = [], [], []
    for step in range(num_steps):
        _, loss = accumulate_gradients(module, rank_batch(step), SETTINGS.loss)
        rate = learning_rate(step, SETTINGS.optimizer)
        norms.append(apply_step(module, optimizer, rate, SETTINGS.optimizer.max_grad_norm, f"step {step}"))
        losses.append(loss.loss)
        num_tokens.append(loss.num_tokens)
    tensors = {name: parameter.detach() for name, parameter in module.named_parameters()}
    return RankResult(losses=tuple(losses), grad_norms=tuple(norms), num_tokens=tuple(num_tokens)), tensors


def main() -> None:
    """One rank."""
    options = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=RankOptions)
    rank = int(sys.argv[2])
    die_with_parent(options.parent_pid)
    torch.set_num_threads(1)
    root, model_dir = Path(options.root), Path(options.model_dir)
    mesh = join_ranks(root / "store", rank, options.num_ranks, options.deadline_s)
    core = ShardedCore(SETTINGS, load_model(model_dir), mesh)
    results = []
    for step in range(options.num_steps):
        if step == options.checkpoint_at:
            write_shards(root / "checkpoint", core, step)
        results.append(core.train_step(rank_batch(step)))
    export_model(root / "export", core, read_companions(model_dir))
    again = ShardedCore(SETTINGS, load_model(model_dir), mesh)
    first = read_shards(root / "checkpoint", again)
    losses_again = tuple(again.train_step(rank_batch(step))[1].loss for step in range(first, options.num_steps))
    export_model(root / "export-again", again, read_companions(model_dir))
    if rank == 0:
        result = RankResult(
            losses=tuple(loss.loss for _, loss, _ in results),
            losses_again=losses_again,
            grad_norms=tuple(norm for _, _, norm in results),
            num_tokens=tuple(sum(map(len, loss.current_log_ratios + loss.older_log_ratios)) for _, loss, _ in results),
        )
        (root / "result.json").write_bytes(msgspec.json.encode(result))
    leave_ranks()
    os._exit(0)


if __name__ == "__main__":
    main()
