"""The probe: fixed token sequences and the log-probabilities that the trainer itself gives their tokens."""

import random
from typing import Any

import torch

from steelyard.types import Probe

MAX_PROBE_TOKENS = 256
_NUM_SEQUENCES = 4
_NUM_TOKENS_EACH = MAX_PROBE_TOKENS // _NUM_SEQUENCES


def probe_sequences(vocab_size: int, seed: int = 0) -> tuple[tuple[int, ...], ...]:
    """Seeded uniform token ids, at most 256 in all, the same for all versions of a run.

    Random tokens depend on every row of the embedding alike; text that the policy knows well would give
    log-probabilities near 0, which tell few versions apart.
    """
    rng = random.Random(seed)
    return tuple(tuple(rng.randrange(vocab_size) for _ in range(_NUM_TOKENS_EACH)) for _ in range(_NUM_SEQUENCES))


@torch.no_grad()
def probe_logprobs(
    module: torch.nn.Module,
    sequences: tuple[tuple[int, ...], ...],
    tensors: dict[str, torch.Tensor] | None = None,
) -> tuple[tuple[float, ...], ...]:
    """Log-probability at temperature 1 of each token after the first, for sequences of one length.

    Args:
        tensors: parameters by name that stand in for the module's own during this pass, tied ones once.

    Returns:
        For sequence i of length L, L - 1 numbers.
    """
    device = next(module.parameters()).device
    token_ids = torch.tensor(sequences, dtype=torch.int64, device=device)
    inputs = {"input_ids": token_ids, "use_cache": False}
    # Not a copy moved to another dtype: that would also round the buffers that a load leaves in float32.
    output: Any = torch.func.functional_call(module, tensors or {}, kwargs=inputs)
    logits = output.logits[:, :-1].float()
    chosen = logits.log_softmax(-1).gather(-1, token_ids[:, 1:, None]).squeeze(-1)
    return tuple(tuple(row) for row in chosen.tolist())


def max_error(one: tuple[tuple[float, ...], ...], other: tuple[tuple[float, ...], ...]) -> float:
    """Largest absolute difference between two sets of log-probabilities of the same sequences."""
    return max(abs(a - b) for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True))


def separates(probe: Probe | None, logprobs: tuple[tuple[float, ...], ...], tolerance: float) -> bool:
    """Whether a replica that served the parent instead would surely be caught.

    A replica may err by ``tolerance``, so the parent must differ by more than twice as much. Without a parent there
    is nothing to tell apart.
    """
    return probe is not None and max_error(probe.logprobs, logprobs) > 2.0 * tolerance
