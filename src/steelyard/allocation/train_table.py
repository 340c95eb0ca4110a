"""Seconds of an optimizer step by number of devices, each in its best layout: all layouts at once, as arrays.

The same formulas as :class:`steelyard.allocation.training_cost.TrainingCost`, for every layout of up to so many devices
in one pass: a planner asks for thousands of device counts. A test holds the two equal.
"""

from functools import lru_cache
from itertools import product

import numpy as np
import numpy.typing as npt

from steelyard.allocation.architecture import Architecture
from steelyard.allocation.devices import DeviceKind
from steelyard.allocation.roofline import Roofline
from steelyard.allocation.training_cost import (
    ACTIVATION_BYTES,
    BACKWARD,
    CHECKPOINT_BYTES,
    STATE_BYTES,
    TrainBatch,
    TrainLayout,
    forward_flops,
    optimizer_bytes,
)
from steelyard.errors import InputError

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_SIZES = (1, 2, 4, 8, 16)
_CONTEXT_SIZES = (1, 2, 4)
_LEAST_MICRO_BATCH_TOKENS = 4096
_MOST_DEVICES = 4096
_COLUMNS = ("tp", "pp", "dp", "cp", "ep", "recompute")


class TrainTable:
    """The best layouts of one batch.

    Args:
        max_devices: the table's last row.

    Attributes:
        step_s: by number of devices, from 0 on; infinite where nothing fits. Never more with more devices: those that
            do not help stand idle.

    Raises:
        InputError: nothing fits into ``max_devices``.
    """

    def __init__(
        self,
        architecture: Architecture,
        roofline: Roofline,
        batch: TrainBatch,
        max_devices: int,
        element_bytes: int = 2,
    ) -> None:
        self._layouts = _layouts(architecture, roofline.device, max_devices)
        # A sequence is never cut, so a micro-batch holds the longest; sizes are powers of two, so that choices last.
        longest = 1 << max(0, batch.longest_tokens - 1).bit_length()
        self._micro_batch_tokens = max(_LEAST_MICRO_BATCH_TOKENS, longest)
        rows = _Rows(architecture, roofline, self._layouts, self._micro_batch_tokens, element_bytes)
        fits = rows.memory_bytes() <= roofline.device.usable_bytes
        times = np.where(fits, rows.step_s(batch), np.inf)
        self.step_s, self._row = _best(self._layouts[:, -1], times, max_devices)
        if not np.isfinite(self.step_s[-1]):
            raise InputError(_unfitting(architecture, roofline, batch, max_devices, element_bytes))

    @property
    def least_devices(self) -> int:
        """With fewer nothing fits."""
        return int(np.argmax(np.isfinite(self.step_s)))

    def layout(self, num_devices: int) -> TrainLayout:
        """The fastest layout of at most so many devices.

        Raises:
            InputError: nothing fits; says how many would do.
        """
        row = int(self._row[num_devices])
        if row < 0:
            raise InputError(f"train must be >= {self.least_devices}, with which a layout fits, got {num_devices}")
        tp, pp, dp, cp, ep, recompute = (int(value) for value in self._layouts[row, : len(_COLUMNS)])
        return TrainLayout(
            tp=tp,
            pp=pp,
            dp=dp,
            cp=cp,
            ep=ep,
            micro_batch_tokens=self._micro_batch_tokens,
            recompute=bool(recompute),
        )


def _unfitting(
    architecture: Architecture, roofline: Roofline, batch: TrainBatch, max_devices: int, element_bytes: int
) -> str:
    words = f"train must be a number of devices into which a tp x pp x dp x cp of {architecture.name} fits"
    for more in (4 * max_devices, 64 * max_devices):
        if more <= _MOST_DEVICES:
            try:
                least = TrainTable(architecture, roofline, batch, more, element_bytes).least_devices
            except InputError:
                continue
            return f"{words}, got at most {max_devices}; {least} would fit"
    return f"{words}, got at most {max_devices}; none would fit: shorter trajectories or larger devices"


@lru_cache(maxsize=16)
def _layouts(architecture: Architecture, device: DeviceKind, max_devices: int) -> Ints:
    """Rows of tp, pp, dp, cp, ep, recompute and devices, by devices: all that divide what they must divide."""
    num_experts = architecture.experts.num_experts if architecture.experts else 1
    tensor = [tp for tp in _SIZES if architecture.splits_into(tp) and tp <= device.devices_per_node]
    pipeline = [pp for pp in _SIZES if pp <= architecture.num_layers]
    experts = [ep for ep in (_SIZES if architecture.experts else (1,)) if num_experts % ep == 0]
    blocks = list[Ints]()
    for tp, pp, cp, ep, recompute in product(tensor, pipeline, _CONTEXT_SIZES, experts, (1, 0)):
        dp = np.arange(ep, max_devices // (tp * pp * cp) + 1, ep, dtype=np.int64)
        full = np.ones_like(dp)
        blocks.append(
            np.stack([tp * full, pp * full, dp, cp * full, ep * full, recompute * full, tp * pp * cp * dp], axis=1)
        )
    rows = np.concatenate(blocks)
    return rows[np.argsort(rows[:, -1], kind="stable")]


def _best(devices: Ints, times: Floats, max_devices: int) -> tuple[Floats, Ints]:
    """The least time with at most so many devices, and its row (-1: none), by number of devices."""
    counts, starts = np.unique(devices, return_index=True)
    least = np.minimum.reduceat(times, starts)
    step_s = np.full(max_devices + 1, np.inf)
    step_s[counts] = least
    # The first row of each count that has its least time.
    is_least = times == np.repeat(least, np.diff(np.append(starts, len(times))))
    rows = np.full(max_devices + 1, -1, dtype=np.int64)
    first = np.flatnonzero(is_least)[::-1]
    rows[devices[first]] = first
    best_s = np.minimum.accumulate(step_s)
    at = np.maximum.accumulate(np.where((step_s == best_s) & np.isfinite(step_s), np.arange(max_devices + 1), 0))
    return best_s, np.where(np.isfinite(best_s), rows[at], -1)


class _Rows:
    """The formulas of ``TrainingCost``, with one element for each layout."""

    def __init__(
        self, architecture: Architecture, roofline: Roofline, layouts: Ints, micro_batch_tokens: int, element_bytes: int
    ) -> None:
        self._architecture, self._roofline, self._element_bytes = architecture, roofline, element_bytes
        self._micro_batch_tokens = float(micro_batch_tokens)
        columns = layouts.T.astype(np.float64)
        self._tp, self._pp, self._dp, self._cp, self._ep, recompute, self._devices = columns
        self._recompute = recompute > 0
        self._passes = 1.0 + BACKWARD + recompute
        self._layers = np.ceil(architecture.num_layers / self._pp)

    def memory_bytes(self) -> Floats:
        """As ``TrainingCost.memory_bytes``."""
        architecture = self._architecture
        states = architecture.num_parameters * (2 * self._element_bytes + STATE_BYTES) / self._devices
        layer = 2 * architecture.num_parameters / architecture.num_layers * self._element_bytes / self._tp
        tokens = self._micro_batch_tokens / self._cp / self._tp
        per_layer = np.where(self._recompute, CHECKPOINT_BYTES, ACTIVATION_BYTES)
        kept = tokens * architecture.hidden_size * per_layer * self._layers * self._pp
        working = np.where(self._recompute, tokens * architecture.hidden_size * ACTIVATION_BYTES, 0.0)
        return np.asarray(states + layer + kept + working + 8.0 * tokens * architecture.vocab_size)

    def step_s(self, batch: TrainBatch) -> Floats:
        """As ``TrainingCost.step_s``, of a batch with tokens."""
        tokens, pairs = batch.num_tokens / self._dp, batch.pairs / self._dp
        full = np.minimum(tokens, self._micro_batch_tokens)
        slowest_pairs = np.minimum(pairs, full * (batch.longest_tokens + 1) / 2)
        one = np.ones_like(full)
        filling_s = (self._pp - 1.0) * self._micro_batches_s(full, slowest_pairs, one)
        num_bytes = optimizer_bytes(self._architecture, self._element_bytes)
        optimizer_s = self._roofline.work_s(0.0, num_bytes, 1.0) / self._devices
        return np.asarray(self._micro_batches_s(tokens, pairs, np.ceil(tokens / full)) + filling_s + optimizer_s)

    def _micro_batches_s(self, num_tokens: Floats, pairs: Floats, number: Floats) -> Floats:
        roofline, model, passes = self._roofline, self._architecture, self._passes
        shards = self._tp * self._cp * self._pp
        flops = passes * (num_tokens * forward_flops(model, 1, 0.0) + pairs * forward_flops(model, 0, 1.0)) / shards
        stage_bytes = model.num_parameters * self._element_bytes / self._tp / self._pp
        arithmetic_s = flops * roofline.compute_s(1.0, roofline.corrections.train_compute)
        traffic_s = number * passes * stage_bytes * roofline.memory_s(1.0)
        exposed = 1.0 - roofline.corrections.overlap
        compute_s = np.maximum(arithmetic_s, traffic_s) + exposed * np.minimum(arithmetic_s, traffic_s)
        each, times = num_tokens / number, number * passes
        hidden_s = number * 3.0 * self._ring_s(1.0, stage_bytes, self._dp * self._cp)
        hidden_s += times * self._ring_s(
            1.0, each * model.kv_elements_per_token * self._element_bytes / self._pp, self._cp
        )
        exposed_s = self._tensor_s(each / self._cp, times) + self._expert_s(each / self._cp, times)
        state_bytes = num_tokens / self._cp * model.hidden_size * self._element_bytes
        pipeline_s = np.where(self._pp > 1, 2.0 * state_bytes * roofline.transfer_s(1.0), 0.0)
        launches_s = times * self._layers * roofline.train_launches_s(1)
        return np.asarray(np.maximum(compute_s, hidden_s) + exposed_s + pipeline_s + launches_s)

    def _tensor_s(self, tokens: Floats, passes: Floats) -> Floats:
        one_s = self._ring_s(2.0, tokens * self._architecture.hidden_size * self._element_bytes, self._tp)
        return np.asarray(2.0 * passes * one_s * self._architecture.num_layers / self._pp)

    def _expert_s(self, tokens: Floats, passes: Floats) -> Floats:
        experts = self._architecture.experts
        if experts is None:
            return np.zeros_like(tokens)
        num_bytes = tokens * experts.num_per_token * self._architecture.hidden_size * self._element_bytes
        return np.asarray(2.0 * passes * self._ring_s(1.0, num_bytes, self._ep) * experts.num_layers / self._pp)

    def _ring_s(self, ways: float, num_bytes: Floats, num_devices: Floats) -> Floats:
        """As ``Roofline.all_reduce_s`` (two ways) and ``all_gather_s`` (one)."""
        device = self._roofline.device
        rate = np.where(num_devices <= device.devices_per_node, device.link_bytes_per_s, device.network_bytes_per_s)
        moved = ways * (num_devices - 1.0) / num_devices * num_bytes
        taken_s = (device.link_latency_s + moved / rate) * self._roofline.corrections.communication
        return np.where(num_devices > 1, taken_s, 0.0)
