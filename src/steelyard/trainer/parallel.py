"""The core trainer over several ranks: parameters, gradients and optimizer state sharded with FSDP2.

Every rank runs the same steps over the same batches. A unit is computed in rounds (:mod:`parallel_rounds`); each
backward adds the round's gradients of all ranks into the shards, so the gradient sum of a unit is spread over the ranks
as the parameters are, and unit sums are added in unit order, as in one process.

FSDP2 is ``torch.distributed.fsdp.fully_shard``: per-parameter sharding along the first dimension (arXiv 2304.11277 is
its first version).
"""

from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from steelyard.errors import RunError
from steelyard.trainer.loss import LossSums
from steelyard.trainer.optim import apply_step, learning_rate, make_optimizer
from steelyard.trainer.parallel_rounds import core_rounds
from steelyard.trainer.records import TrainerSettings
from steelyard.trainer.step import backward, set_gradients, take_gradients, units_of
from steelyard.trainer.unit_sums import Gradients, UnitSums
from steelyard.trainer.units import LeaseUnit, StepUnits, cut_rows
from steelyard.types import StepBatch


def join_ranks(store: Path, rank: int, num_ranks: int, deadline_s: float) -> DeviceMesh:
    """Meet the other ranks of this run on one machine; the mesh of all of them, over gloo.

    Args:
        store: a file that all ranks can reach, and that no earlier group has used.
        deadline_s: how long a rank may wait for the others, here and in each collective.

    Raises:
        RunError: they did not all come.
    """
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store.absolute()}",
            rank=rank,
            world_size=num_ranks,
            timeout=timedelta(seconds=deadline_s),
        )
    except (dist.DistError, RuntimeError) as error:
        raise RunError(f"rank {rank} must meet {num_ranks - 1} others within {deadline_s:.0f} s: {error}") from error
    return init_device_mesh("cpu", (num_ranks,))


def leave_ranks() -> None:
    """End the group of :func:`join_ranks`."""
    dist.destroy_process_group()


def shard_module(module: torch.nn.Module, mesh: DeviceMesh) -> torch.nn.Module:
    """Shard a decoder over the mesh, layer by layer, in place. Gradients are sums over ranks, not means."""
    layer_kinds: set[str] = set(getattr(module, "_no_split_modules", None) or ())
    for layer in tuple(module.modules()):
        if type(layer).__name__ in layer_kinds:
            fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)
    for part in module.modules():
        if isinstance(part, FSDPModule):
            # The loss has the denominator of the whole batch already; and gloo has no scaled sums.
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
    return module


class ShardedCore:
    """One rank of the core. All ranks make the same calls in the same order.

    Args:
        module: the whole decoder, the same on every rank; it is sharded here.
    """

    def __init__(self, settings: TrainerSettings, module: torch.nn.Module, mesh: DeviceMesh) -> None:
        self.module = shard_module(module, mesh)
        self.optimizer = make_optimizer(self.module, settings.optimizer)
        self._settings = settings
        self._mesh = mesh
        self._rank, self._num_ranks = mesh.get_rank(), mesh.size()

    def train_step(self, batch: StepBatch) -> tuple[StepUnits, LossSums, float]:
        """Take one optimizer step; the units, the figures over all ranks, and the gradient norm before clipping.

        Raises:
            IntegrityError: a micro-batch is malformed.
            RunError: the gradient is not finite; no parameter was changed on any rank.
        """
        step = units_of(batch, self._settings.loss, self._settings.seed)
        sums = UnitSums(len(step.units))
        for unit in step.units:
            sums.deliver(unit.index, *self.unit_gradient(unit))
            sums.advance()
        gradients, loss = sums.finish()
        set_gradients(self.module, gradients)
        rate = learning_rate(batch.step, self._settings.optimizer)
        max_norm = self._settings.optimizer.max_grad_norm
        norm = apply_step(self.module, self.optimizer, rate, max_norm, f"step {batch.step}")
        return step, loss, norm

    def unit_gradient(self, unit: LeaseUnit) -> tuple[Gradients, LossSums]:
        """This rank's shards of the gradient sum of a unit, and the unit's figures over all ranks."""
        mine = LossSums()
        self.module.zero_grad(set_to_none=True)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(unit.seed)
            for by_rank in core_rounds(unit.micro_batches, self._num_ranks):
                micro_batch = by_rank[self._rank]
                if micro_batch is None:
                    dummy = cut_rows(unit.micro_batches[0], 0, 1)
                    backward(self.module, dummy, unit, self._settings.loss, weight=0.0)
                else:
                    mine.add(backward(self.module, micro_batch, unit, self._settings.loss))
        return take_gradients(self.module), self._over_all_ranks(mine)

    def full_tensors(self) -> dict[str, torch.Tensor]:
        """All parameters whole, on every rank; of use for publication and export."""
        return {name: _full(parameter.detach()) for name, parameter in self.module.named_parameters()}

    def _over_all_ranks(self, mine: LossSums) -> LossSums:
        group = self._mesh.get_group()
        numbers = torch.tensor(
            [mine.num_tokens, mine.loss, mine.kl, mine.ratio, mine.num_clipped, mine.entropy], dtype=torch.float64
        )
        dist.all_reduce(numbers, group=group)
        largest = torch.tensor(mine.ratio_max, dtype=torch.float64)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        num_tokens, loss, kl, ratio, num_clipped, entropy = numbers.tolist()
        return LossSums(
            num_tokens=round(num_tokens),
            loss=loss,
            kl=kl,
            ratio=ratio,
            ratio_max=float(largest),
            num_clipped=round(num_clipped),
            entropy=entropy,
            current_log_ratios=self._gather(mine.current_log_ratios),
            older_log_ratios=self._gather(mine.older_log_ratios),
        )

    def _gather(self, parts: list[torch.Tensor]) -> list[torch.Tensor]:
        """Values of all ranks, by rank; each rank has as many as it has."""
        group = self._mesh.get_group()
        mine = torch.cat(parts).detach() if parts else torch.zeros(0)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self._num_ranks)]
        dist.all_gather(sizes, torch.tensor([len(mine)]), group=group)
        most = max(int(size) for size in sizes)
        padded = torch.nn.functional.pad(mine, (0, most - len(mine)))
        gathered = [torch.zeros(most) for _ in range(self._num_ranks)]
        dist.all_gather(gathered, padded, group=group)
        return [values[: int(size)] for values, size in zip(gathered, sizes, strict=True)]


def _full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
