"""How long an engine takes, by a model in place of a machine. All times in seconds."""

from typing import Protocol


class TimeModel(Protocol):
    """What the emulated engine asks of the cost model; it is given one."""

    def step_s(self, num_decoding: int, kv_tokens: int, prefill_tokens: int, context_tokens: int) -> float:
        """One step that samples one token for each of ``num_decoding``, which attend to ``kv_tokens`` together, and
        computes the KV of ``prefill_tokens`` of one prompt, after ``context_tokens`` that are computed already."""
        ...

    def load_s(self) -> float:
        """To bring the weights of one version into memory and prove them."""
        ...
