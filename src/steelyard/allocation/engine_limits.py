"""What an engine allows itself: the sizes that decide how its batches are made up."""

from steelyard.errors import InputError
from steelyard.types.record import Record


class EngineLimits(Record, frozen=True, kw_only=True):
    """Sizes of one replica.

    Attributes:
        chunk_tokens: tokens of prompts that a step computes beside the batch, over all of them.
        kv_tokens: of its KV memory; None: what fits into its devices beside the weights.
        block_tokens: a kept prefix is used again in whole blocks of so many tokens.
        range_tokens: 0 where sequences read their own KV only, as with paged attention. Else those in neighbouring rows
            are read together, each as far as the longest of them, and are cut apart where that saves reading more than
            so many tokens, which is what one more range costs.
        call_s: what a call takes on its way to the engine and back, while the engine works for others.
    """

    chunk_tokens: int = 2048
    kv_tokens: int | None = None
    block_tokens: int = 1
    range_tokens: int = 0
    call_s: float = 0.0

    def __post_init__(self) -> None:
        for field in ("chunk_tokens", "block_tokens"):
            if getattr(self, field) < 1:
                raise InputError(f"engine.{field} must be >= 1, got {getattr(self, field)}")
        if self.range_tokens < 0:
            raise InputError(f"engine.range_tokens must be >= 0, got {self.range_tokens}")
        if self.kv_tokens is not None and self.kv_tokens < 1:
            raise InputError(f"engine.kv_tokens must be >= 1, or null for what fits, got {self.kv_tokens}")
        if not 0.0 <= self.call_s < float("inf"):
            raise InputError(f"engine.call_s must be finite and >= 0, got {self.call_s}")
