"""How long an engine takes, by a model in place of a machine. Pure; all times in seconds."""

from dataclasses import dataclass
from typing import Protocol


class TimeModel(Protocol):
    """What the emulated engine asks of a cost model."""

    def decode_s(self, num_sequences: int, kv_tokens: int) -> float:
        """One step that samples one token for each of ``num_sequences``, which attend to ``kv_tokens`` together."""
        ...

    def prefill_s(self, num_tokens: int, context_tokens: int) -> float:
        """To compute the KV of ``num_tokens`` of one prompt, after ``context_tokens`` that are computed already."""
        ...

    def load_s(self) -> float:
        """To read the weights of one version into memory."""
        ...


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """A decoder on one device, as the slower of arithmetic and memory traffic (Williams, Waterman and Patterson,
    Roofline, CACM 2009).

    Arithmetic: 2 operations per parameter and token (Kaplan et al., arXiv 2001.08361, section 2.1); those of attention
    are left out, which is right while the context is shorter than a few times the width of the model. Memory traffic of
    a decoding step: all weights once, and the KV of all sequences. A step never takes less than ``step_overhead_s``.

    ``peak_flops`` in operations per second, ``memory_bytes_per_s`` and ``load_bytes_per_s`` in bytes per second;
    ``efficiency_frac`` is the share of both peaks that is reached.
    """

    num_params: float
    bytes_per_param: float
    kv_bytes_per_token: float
    peak_flops: float
    memory_bytes_per_s: float
    efficiency_frac: float
    step_overhead_s: float
    load_bytes_per_s: float

    def decode_s(self, num_sequences: int, kv_tokens: int) -> float:
        """See :meth:`TimeModel.decode_s`."""
        moved_bytes = self.num_params * self.bytes_per_param + kv_tokens * self.kv_bytes_per_token
        memory_s = moved_bytes / (self.memory_bytes_per_s * self.efficiency_frac)
        return self.step_overhead_s + max(self._compute_s(num_sequences), memory_s)

    def prefill_s(self, num_tokens: int, context_tokens: int) -> float:
        """See :meth:`TimeModel.prefill_s`."""
        context_s = context_tokens * self.kv_bytes_per_token / (self.memory_bytes_per_s * self.efficiency_frac)
        return max(self._compute_s(num_tokens), context_s)

    def load_s(self) -> float:
        """See :meth:`TimeModel.load_s`."""
        return self.num_params * self.bytes_per_param / self.load_bytes_per_s

    def _compute_s(self, num_tokens: int) -> float:
        return 2.0 * self.num_params * num_tokens / (self.peak_flops * self.efficiency_frac)
