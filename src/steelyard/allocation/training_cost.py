"""What a training step costs, and whether it fits, for a layout of tensor, pipeline, data, context and expert
parallelism.

Parameters, gradients and optimizer are sharded over all devices that share them (as `fully_shard` does); every
micro-batch gathers the parameters of its stage and scatters its gradients. A pipeline of ``p`` stages idles ``(p - 1)
/ m`` of the time of ``m`` micro-batches (Huang et al., GPipe, arXiv 1811.06965).
"""

import math

from steelyard.allocation.architecture import Architecture, check_tp
from steelyard.allocation.roofline import Roofline
from steelyard.errors import InputError
from steelyard.types.record import Record

STATE_BYTES = 12
"""Of a parameter, in the optimizer: its fp32 copy and two moments."""
ACTIVATION_BYTES = 34
"""Per token, layer and hidden element without recomputation, where attention scores are never stored: Korthikanti et
al., arXiv 2205.05198, equation 1 without its attention term."""
CHECKPOINT_BYTES = 2
"""The same where each layer is computed again from its input."""
BACKWARD = 2.0
"""FLOPs of a backward pass, in forward passes."""


class TrainLayout(Record, frozen=True, kw_only=True):
    """How ``num_devices`` share a step. ``ep`` divides ``dp``: experts are spread over data ranks."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    micro_batch_tokens: int = 8192
    recompute: bool = True

    @property
    def num_devices(self) -> int:
        """Devices in all."""
        return self.tp * self.pp * self.dp * self.cp


class TrainBatch(Record, frozen=True, kw_only=True):
    """What a step trains on. ``pairs`` is the sum over tokens of the context before each."""

    num_tokens: int
    pairs: float
    longest_tokens: int


def least_device_s(architecture: Architecture, roofline: Roofline, batch: TrainBatch, element_bytes: int = 2) -> float:
    """Device-seconds that no layout goes below for one optimizer step: arithmetic without recomputation, and the
    states.

    Whatever the layout, each device-second does at most the peak's arithmetic and the bandwidth's traffic, and the
    optimizer comes after the arithmetic.
    """
    flops = (1.0 + BACKWARD) * forward_flops(architecture, batch.num_tokens, batch.pairs)
    arithmetic_s = roofline.work_s(flops, 0.0, roofline.corrections.train_compute)
    return arithmetic_s + roofline.work_s(0.0, optimizer_bytes(architecture, element_bytes), 1.0)


def forward_flops(architecture: Architecture, num_tokens: float, pairs: float) -> float:
    """Of one forward pass with a loss on every token."""
    products = 2.0 * num_tokens * (architecture.active_parameters + architecture.head_parameters)
    return products + architecture.attention_flops(pairs)


def optimizer_bytes(architecture: Architecture, element_bytes: int) -> float:
    """States, parameters and gradients, read and written once."""
    return architecture.num_parameters * 2.0 * (2 * element_bytes + STATE_BYTES)


class TrainingCost:
    """Times and sizes of one trainer.

    Raises:
        InputError: the layout cannot be; names the field and what would fit.
    """

    def __init__(
        self, architecture: Architecture, roofline: Roofline, layout: TrainLayout, element_bytes: int = 2
    ) -> None:
        _check(architecture, roofline, layout)
        self.architecture = architecture
        self.roofline = roofline
        self.layout = layout
        self.element_bytes = element_bytes
        if self.memory_bytes > roofline.device.usable_bytes:
            raise InputError(
                f"the training layout must fit into {roofline.device.usable_bytes / 1e9:.1f} GB a device, but takes "
                f"{self.memory_bytes / 1e9:.1f} GB; more tp, pp or dp, or a smaller micro_batch_tokens, would take less"
            )

    @property
    def memory_bytes(self) -> float:
        """Of the fullest device: sharded states, the gathered layer, activations of one micro-batch a stage, logits."""
        architecture, layout = self.architecture, self.layout
        states = architecture.num_parameters * (2 * self.element_bytes + STATE_BYTES) / layout.num_devices
        layer = 2 * architecture.num_parameters / architecture.num_layers * self.element_bytes / layout.tp
        tokens = layout.micro_batch_tokens / layout.cp / layout.tp
        per_layer = CHECKPOINT_BYTES if layout.recompute else ACTIVATION_BYTES
        layers = math.ceil(architecture.num_layers / layout.pp)
        # The first stage holds the activations of as many micro-batches as there are stages.
        kept = tokens * architecture.hidden_size * per_layer * layers * layout.pp
        working = tokens * architecture.hidden_size * ACTIVATION_BYTES if layout.recompute else 0.0
        logits = 2 * 4 * tokens * architecture.vocab_size
        return states + layer + kept + working + logits

    def model_flops(self, batch: TrainBatch) -> float:
        """Forward and backward of the batch, recomputation not counted."""
        return (1.0 + BACKWARD) * forward_flops(self.architecture, batch.num_tokens, batch.pairs)

    def step_s(self, batch: TrainBatch) -> float:
        """One optimizer step.

        Raises:
            InputError: a sequence is longer than a micro-batch, which is never cut.
        """
        if batch.longest_tokens > self.layout.micro_batch_tokens:
            raise InputError(
                f"micro_batch_tokens must be >= {batch.longest_tokens}, the longest sequence, "
                f"got {self.layout.micro_batch_tokens}"
            )
        if batch.num_tokens == 0:
            return 0.0
        layout = self.layout
        tokens, pairs = batch.num_tokens / layout.dp, batch.pairs / layout.dp
        full = min(tokens, float(layout.micro_batch_tokens))
        # The pipeline fills and drains at the pace of its slowest micro-batch: a full one of the longest sequences.
        slowest_pairs = min(pairs, full * (batch.longest_tokens + 1) / 2)
        num_micro_batches = math.ceil(tokens / full)
        filling_s = (layout.pp - 1) * self._micro_batches_s(full, slowest_pairs, 1)
        return self._micro_batches_s(tokens, pairs, num_micro_batches) + filling_s + self._optimizer_s()

    def utilisation(self, batch: TrainBatch) -> float:
        """Model FLOPs utilisation: at most 1."""
        peak = self.roofline.device.peak_flops_per_s * self.layout.num_devices
        return self.model_flops(batch) / (self.step_s(batch) * peak)

    def _micro_batches_s(self, num_tokens: float, pairs: float, number: int) -> float:
        """So many micro-batches of one data rank on one stage, one after the other; they hold all of the tokens.

        What can hide hides behind the arithmetic of all of them: parameters are fetched ahead.
        """
        layout, roofline = self.layout, self.roofline
        passes = 1.0 + BACKWARD + (1.0 if layout.recompute else 0.0)
        flops = passes * forward_flops(self.architecture, num_tokens, pairs) / layout.tp / layout.cp / layout.pp
        stage_bytes = self.architecture.num_parameters * self.element_bytes / layout.tp / layout.pp
        compute_s = roofline.work_s(flops, number * passes * stage_bytes, roofline.corrections.train_compute)
        each = num_tokens / number
        exposed_s = self._tensor_s(each / layout.cp, number * passes) + self._expert_s(
            each / layout.cp, number * passes
        )
        # Gathering and scattering run beside the arithmetic, and so does the ring of context parallelism.
        hidden_s = number * self._data_s(stage_bytes) + self._context_s(each, number * passes)
        layers = math.ceil(self.architecture.num_layers / layout.pp)
        pipeline_s = self._pipeline_s(num_tokens / layout.cp)
        return max(compute_s, hidden_s) + exposed_s + pipeline_s + number * passes * roofline.train_launches_s(layers)

    def _tensor_s(self, tokens: float, passes: float) -> float:
        """Two all-reduces a layer and pass."""
        one_s = self.roofline.all_reduce_s(tokens * self.architecture.hidden_size * self.element_bytes, self.layout.tp)
        return 2.0 * passes * one_s * self.architecture.num_layers / self.layout.pp

    def _expert_s(self, tokens: float, passes: float) -> float:
        """Tokens go to their experts and come back, in every layer that has them."""
        experts = self.architecture.experts
        if experts is None or self.layout.ep == 1:
            return 0.0
        num_bytes = tokens * experts.num_per_token * self.architecture.hidden_size * self.element_bytes
        return (
            2.0 * passes * self.roofline.all_to_all_s(num_bytes, self.layout.ep) * experts.num_layers / self.layout.pp
        )

    def _data_s(self, stage_bytes: float) -> float:
        """Parameters are gathered for the forward and for the backward pass, gradients scattered once."""
        return 3.0 * self.roofline.all_gather_s(stage_bytes, self.layout.dp * self.layout.cp)

    def _context_s(self, tokens: float, passes: float) -> float:
        """Keys and values of the whole micro-batch pass by every rank of the ring."""
        kv_bytes = tokens * self.architecture.kv_elements_per_token * self.element_bytes / self.layout.pp
        return passes * self.roofline.all_gather_s(kv_bytes, self.layout.cp)

    def _pipeline_s(self, tokens: float) -> float:
        """Hidden states to the next stage and their gradients back."""
        if self.layout.pp == 1:
            return 0.0
        return 2.0 * self.roofline.transfer_s(tokens * self.architecture.hidden_size * self.element_bytes)

    def _optimizer_s(self) -> float:
        num_bytes = optimizer_bytes(self.architecture, self.element_bytes)
        return self.roofline.work_s(0.0, num_bytes / self.layout.num_devices, 1.0)


def _check(architecture: Architecture, roofline: Roofline, layout: TrainLayout) -> None:
    for field in ("tp", "pp", "dp", "cp", "ep", "micro_batch_tokens"):
        if getattr(layout, field) < 1:
            raise InputError(f"{field} must be >= 1, got {getattr(layout, field)}")
    check_tp(architecture, layout.tp, roofline.device.devices_per_node)
    if layout.pp > architecture.num_layers:
        raise InputError(f"pp must be at most the {architecture.num_layers} layers, got {layout.pp}")
    num_experts = architecture.experts.num_experts if architecture.experts else 1
    if layout.dp % layout.ep or num_experts % layout.ep:
        raise InputError(
            f"ep must divide dp = {layout.dp} and the {num_experts} experts of {architecture.name}, got {layout.ep}"
        )
