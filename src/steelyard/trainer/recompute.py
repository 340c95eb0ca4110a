"""Log-probabilities of recorded turns, computed again as the trainer computes them."""

import itertools
from collections.abc import Sequence

import torch

from steelyard.trainer.loss import token_logprobs
from steelyard.trainer.model import logits_at
from steelyard.types import Turn

_ROWS_AT_ONCE = 16


def recorded_logprobs(module: torch.nn.Module, turns: Sequence[Turn]) -> tuple[tuple[float, ...], ...]:
    """For each turn what a recorder should have noted for each of its sampled tokens, in nats.

    That is the log-probability after temperature over the full vocabulary; at temperature 1 where it is 0.
    """
    logprobs: list[tuple[float, ...]] = []
    for first in range(0, len(turns), _ROWS_AT_ONCE):
        logprobs += _of_rows(module, turns[first : first + _ROWS_AT_ONCE])
    return tuple(logprobs)


@torch.inference_mode()
def _of_rows(module: torch.nn.Module, turns: Sequence[Turn]) -> list[tuple[float, ...]]:
    rows = [turn.prompt_token_ids + turn.token_ids for turn in turns]
    num_columns = max(map(len, rows))
    token_ids = torch.zeros(len(rows), num_columns, dtype=torch.int64)
    for index, row in enumerate(rows):
        token_ids[index, : len(row)] = torch.tensor(row)
    # The logits at a position predict the token behind it.
    positions = [
        index * num_columns + column
        for index, turn in enumerate(turns)
        for column in range(len(turn.prompt_token_ids) - 1, len(rows[index]) - 1)
    ]
    targets = torch.tensor([token_id for turn in turns for token_id in turn.token_ids])
    temperatures = torch.tensor([turn.sampling.temperature or 1.0 for turn in turns for _ in turn.token_ids])
    found, _ = token_logprobs(logits_at(module, token_ids, torch.tensor(positions)), targets, temperatures)
    logprobs = iter(found.tolist())
    return [tuple(itertools.islice(logprobs, len(turn.token_ids))) for turn in turns]
