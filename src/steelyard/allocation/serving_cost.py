"""What sampling costs: a step of continuous batching, prefill, KV memory, at a tensor-parallel size."""

import math

from steelyard.allocation.architecture import Architecture, check_tp
from steelyard.allocation.roofline import Roofline
from steelyard.errors import InputError
from steelyard.types.record import Record


class StepWork(Record, frozen=True, kw_only=True):
    """What one step of an engine computes, over all sequences in it.

    Attributes:
        num_decoding: sequences that get one token each.
        kv_tokens: tokens in the KV that they read, in sum.
        prefill_tokens: tokens of prompts that are computed beside them.
        prefill_pairs: for those, the sum over tokens of the context before each: what attention multiplies.
        num_prompts: prompts that they belong to; each ends in one sampled token.
    """

    num_decoding: int = 0
    kv_tokens: float = 0.0
    prefill_tokens: float = 0.0
    prefill_pairs: float = 0.0
    num_prompts: int = 0


def prompt_work(new_tokens: int, context_tokens: int = 0) -> StepWork:
    """A prompt of ``new_tokens`` after ``context_tokens`` that the KV holds already."""
    return StepWork(prefill_tokens=new_tokens, prefill_pairs=_pairs(new_tokens, context_tokens), num_prompts=1)


def _pairs(new_tokens: int, context_tokens: int) -> float:
    return new_tokens * context_tokens + new_tokens * (new_tokens + 1) / 2


class ServingCost:
    """Times and sizes of one replica of ``tp`` devices.

    Args:
        element_bytes: of a weight and of a key or value (2: bf16; 4: fp32).

    Attributes:
        weight_bytes_per_device: weights, cut evenly.
        kv_bytes_per_token: of one token, on one device.
        kv_capacity_tokens: tokens whose KV fits beside the weights.

    Raises:
        InputError: the layout cannot be: ``tp`` does not divide the heads, exceeds the node, or the weights do not fit.
    """

    def __init__(self, architecture: Architecture, roofline: Roofline, tp: int, element_bytes: int = 2) -> None:
        check_tp(architecture, tp, roofline.device.devices_per_node)
        self.architecture = architecture
        self.roofline = roofline
        self.tp = tp
        self.element_bytes = element_bytes
        # A key-value head is not cut: beyond their number each is held more than once.
        kv_shards = min(tp, architecture.num_kv_heads)
        self.weight_bytes_per_device = architecture.num_parameters * element_bytes / tp
        self.kv_bytes_per_token = architecture.kv_elements_per_token * element_bytes / kv_shards
        free = roofline.device.usable_bytes - self.weight_bytes_per_device
        self.kv_capacity_tokens = max(0, math.floor(free / self.kv_bytes_per_token))
        if self.kv_capacity_tokens < 1:
            weights = self.weight_bytes_per_device
            raise InputError(
                f"tp must be large enough that {architecture.name} fits: at tp = {tp} a device must hold "
                f"{weights / 1e9:.1f} GB of weights and some KV, and has {roofline.device.usable_bytes / 1e9:.1f} GB"
            )
        # What every step asks for is computed once.
        experts = architecture.experts
        active, head = architecture.active_parameters, architecture.head_parameters
        self._shared_bytes = float(architecture.base_parameters + head) * element_bytes / tp
        stored = experts.num_layers * experts.num_experts * architecture.expert_parameters if experts else 0
        self._expert_bytes = float(stored) * element_bytes / tp
        self._decode_flops, self._prompt_flops, self._head_flops = 2.0 * (active + head), 2.0 * active, 2.0 * head
        self._pair_flops = architecture.attention_flops(1.0)
        self._s_per_decode_flop = roofline.compute_s(1.0, roofline.corrections.decode_compute) / tp
        self._s_per_prefill_flop = roofline.compute_s(1.0, roofline.corrections.prefill_compute) / tp
        self._s_per_byte = roofline.memory_s(1.0)
        self._exposed_frac = 1.0 - roofline.corrections.overlap
        self._launches_s = roofline.launches_s(architecture.num_layers)
        self._talk_s = self.communication_s(0)
        self._talk_s_per_token = self.communication_s(1) - self._talk_s

    def step_s(self, work: StepWork) -> float:
        """One step of the engine, in seconds; 0 where there is nothing to do."""
        return self._time_s(
            work.num_decoding, work.kv_tokens, work.prefill_tokens, work.prefill_pairs, work.num_prompts
        )

    def decode_step_s(self, batch: int, context_tokens: float) -> float:
        """One token for each of ``batch`` sequences with ``context_tokens`` each."""
        return self._time_s(batch, batch * context_tokens, 0.0, 0.0, 0)

    def prefill_s(self, new_tokens: int, context_tokens: int = 0) -> float:
        """A prompt alone. Moving a trajectory costs this for all of its tokens on the target."""
        if not new_tokens:
            return 0.0
        return self._time_s(0, 0.0, new_tokens, _pairs(new_tokens, context_tokens), 1)

    def _time_s(
        self, num_decoding: int, kv_tokens: float, prefill_tokens: float, prefill_pairs: float, num_prompts: int
    ) -> float:
        """See :class:`StepWork`. What a simulation asks for most: no record is made, constants are known."""
        num_tokens = num_decoding + prefill_tokens
        if num_tokens == 0:
            return 0.0
        took_s = self._launches_s
        decode_bytes = self.touched_bytes(num_decoding) if num_decoding else 0.0
        if num_decoding:
            # Those that decode pay for reading the weights.
            flops = num_decoding * self._decode_flops + kv_tokens * self._pair_flops
            num_bytes = (kv_tokens + num_decoding) * self.kv_bytes_per_token + decode_bytes
            took_s += self._work_s(flops * self._s_per_decode_flop, num_bytes * self._s_per_byte)
        if prefill_tokens:
            flops = prefill_tokens * self._prompt_flops + num_prompts * self._head_flops
            flops += prefill_pairs * self._pair_flops
            num_bytes = prefill_tokens * self.kv_bytes_per_token + self.touched_bytes(num_tokens) - decode_bytes
            took_s += self._work_s(flops * self._s_per_prefill_flop, num_bytes * self._s_per_byte)
        if self.tp > 1:
            took_s += self._talk_s + num_tokens * self._talk_s_per_token
        return took_s

    def _work_s(self, compute_s: float, memory_s: float) -> float:
        """As :meth:`Roofline.work_s`."""
        if compute_s > memory_s:
            return compute_s + self._exposed_frac * memory_s
        return memory_s + self._exposed_frac * compute_s

    def decode_rate_limit(self, context_tokens: float) -> float:
        """Tokens per second per device that no batch exceeds, with unlimited memory and concurrency.

        It is what remains of :meth:`step_s` per token as the batch grows: reading weights and launches are shared by
        ever more sequences, arithmetic, KV and communication are not.
        """
        far = 1 << 40
        return far / self.decode_step_s(far, context_tokens) / self.tp

    def touched_bytes(self, num_tokens: float) -> float:
        """Weights that a step reads on one device: all that is shared, and the experts that are met."""
        if self._expert_bytes:
            return self._shared_bytes + self._expert_bytes * self.architecture.touched_experts_frac(num_tokens)
        return self._shared_bytes

    def communication_s(self, num_tokens: float) -> float:
        """Two all-reduces of the hidden states a layer (Shoeybi et al., Megatron-LM, arXiv 1909.08053)."""
        if self.tp == 1:
            return 0.0
        one_s = self.roofline.all_reduce_s(num_tokens * self.architecture.hidden_size * self.element_bytes, self.tp)
        return 2.0 * self.architecture.num_layers * one_s
