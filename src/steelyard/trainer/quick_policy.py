"""The quick policy: a small decoder made from nothing in under two minutes on two cores.

::

    texts -> byte-level BPE -> (rendered elsewhere) token sequences -> supervised warm-up -> Hugging Face directory

What makes it fast: sequences of similar length share a batch, so hardly a padded token is computed; the head runs
on the tokens that count; and no other process is at work, so that both cores can be used.
"""

import math
import random
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers

from steelyard.errors import InputError, RunError
from steelyard.trainer.model import logits_at
from steelyard.trainer.muon import StackedMuon
from steelyard.trainer.quick_recipe import OnProgress, QuickPolicyRecipe, TokenSequence, WarmUpProgress, WarmUpReport

transformers.utils.logging.disable_progress_bar()

_WINDOW_STEPS = 24
"""Batches are cut from a shuffled window of this many, sorted by length: random enough, and hardly any padding."""
_PROGRESS_EVERY = 10
_BETA2 = 0.98
"""Below the usual 0.999, whose memory is longer than this whole warm-up."""


@dataclass(frozen=True)
class WarmUpBatch:
    """Right-padded rows: ``token_ids`` int64 [num_rows, num_columns]; per predicted token its position in the
    flattened rows before it, its id, and its weight; ``num_tokens`` real tokens."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    targets: torch.Tensor
    weights: torch.Tensor
    num_tokens: int


def new_quick_module(recipe: QuickPolicyRecipe, num_tokens: int) -> torch.nn.Module:
    """A freshly initialised decoder with room for ``num_tokens`` token ids; the same for the same seed."""
    config = transformers.LlamaConfig(
        vocab_size=-(-num_tokens // 16) * 16,
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.num_layers,
        num_attention_heads=recipe.num_heads,
        num_key_value_heads=recipe.num_kv_heads,
        head_dim=recipe.head_dim,
        max_position_embeddings=recipe.max_context_tokens,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        module: torch.nn.Module = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    return module.eval()


def warm_up(
    directory: Path,
    num_tokens: int,
    sequences: Sequence[TokenSequence],
    recipe: QuickPolicyRecipe,
    on_progress: OnProgress | None = None,
) -> WarmUpReport:
    """Train a new decoder on ``sequences`` and write it into ``directory``, beside its tokenizer.

    Repeatable bit for bit with the same number of threads, unless time runs out.

    Args:
        num_tokens: of the tokenizer.

    Raises:
        InputError: there are no sequences, or one is longer than a batch or a context may be.
        RunError: the gradient is not finite.
    """
    _check_sequences(sequences, recipe)
    torch.set_num_threads(recipe.num_threads)
    module = new_quick_module(recipe, num_tokens)
    optimizer = _WarmUpOptimizer(module, recipe)
    batches = _BatchSource(sequences, recipe)
    started_s = time.perf_counter()
    losses: deque[float] = deque(maxlen=_PROGRESS_EVERY)
    first_loss, total_tokens, step = 0.0, 0, 0
    while step < recipe.num_steps and time.perf_counter() - started_s < recipe.time_limit_s:
        batch = batches.next()
        done_frac = schedule_frac(step, time.perf_counter() - started_s, recipe)
        loss = _warm_up_step(module, optimizer, batch, warm_up_rate(done_frac, recipe))
        losses.append(loss)
        first_loss = first_loss or loss
        total_tokens += batch.num_tokens
        step += 1
        if on_progress is not None and (step % _PROGRESS_EVERY == 0 or step == recipe.num_steps):
            elapsed_s = time.perf_counter() - started_s
            on_progress(
                WarmUpProgress(
                    step=step,
                    num_steps=recipe.num_steps,
                    loss=sum(losses) / len(losses),
                    tokens_per_s=total_tokens / elapsed_s,
                    elapsed_s=elapsed_s,
                )
            )
    module.save_pretrained(directory)  # type: ignore[operator]
    return WarmUpReport(
        num_parameters=sum(parameter.numel() for parameter in module.parameters()),
        num_steps=step,
        num_tokens=total_tokens,
        first_loss=first_loss,
        last_loss=sum(losses) / max(len(losses), 1),
        duration_s=time.perf_counter() - started_s,
    )


def schedule_frac(step: int, elapsed_s: float, recipe: QuickPolicyRecipe) -> float:
    """How much of the warm-up is over: by steps, so that it is repeatable; by the clock where half of the time is
    gone and the steps are behind it."""
    by_steps = step / recipe.num_steps
    by_time = elapsed_s / recipe.time_limit_s
    return min(by_time, 1.0) if by_time > max(0.5, by_steps) else by_steps


def warm_up_rate(done_frac: float, recipe: QuickPolicyRecipe) -> float:
    """The share of the peak rates: a linear rise, then a cosine down to ``final_rate_frac`` (arXiv 1608.03983)."""
    if done_frac < recipe.warmup_frac:
        # The first step must move: it counts as the end of its own share.
        return (done_frac + 1.0 / recipe.num_steps) / (recipe.warmup_frac + 1.0 / recipe.num_steps)
    fallen = (done_frac - recipe.warmup_frac) / max(1.0 - recipe.warmup_frac, 1e-9)
    floor = recipe.final_rate_frac
    return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * fallen))


class _WarmUpOptimizer:
    """Muon for the matrices inside the layers, AdamW for embedding and norms."""

    def __init__(self, module: torch.nn.Module, recipe: QuickPolicyRecipe) -> None:
        matrices = [p for name, p in module.named_parameters() if p.ndim == 2 and ".layers." in name]
        inside = {id(p) for p in matrices}
        others = [p for p in module.parameters() if id(p) not in inside]
        self._parameters = [*matrices, *others]
        self._recipe = recipe
        self._muon = StackedMuon(matrices, recipe.weight_decay)
        self._adamw = torch.optim.AdamW(
            others, lr=recipe.learning_rate, betas=(0.9, _BETA2), weight_decay=0.0, fused=True
        )

    def zero_grad(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def step(self, rate: float) -> None:
        """Move by ``rate`` times the peak rates."""
        norm = float(torch.nn.utils.clip_grad_norm_(self._parameters, self._recipe.max_grad_norm))
        if not math.isfinite(norm):
            raise RunError(f"warm-up: the gradient norm must be finite, got {norm}; no parameter was changed")
        self._muon.step(rate * self._recipe.matrix_rate)
        self._adamw.param_groups[0]["lr"] = rate * self._recipe.learning_rate
        self._adamw.step()


def _warm_up_step(module: torch.nn.Module, optimizer: _WarmUpOptimizer, batch: WarmUpBatch, rate: float) -> float:
    """One step; returns the loss per token to be produced, context left out."""
    optimizer.zero_grad()
    logits = logits_at(module, batch.token_ids, batch.positions)
    per_token = torch.nn.functional.cross_entropy(logits, batch.targets, reduction="none")
    torch.autograd.backward((per_token * batch.weights).sum() / batch.weights.sum())
    optimizer.step(rate)
    return float(per_token.detach()[batch.weights == 1.0].mean())


class _BatchSource:
    """Endless batches over shuffled epochs; the same for the same seed."""

    def __init__(self, sequences: Sequence[TokenSequence], recipe: QuickPolicyRecipe) -> None:
        self._sequences = sequences
        self._recipe = recipe
        self._random = random.Random(recipe.seed)
        self._order: list[int] = []
        self._ready: list[list[int]] = []

    def next(self) -> WarmUpBatch:
        if not self._ready:
            self._ready = self._cut_window()
        return make_batch([self._sequences[i] for i in self._ready.pop()], self._recipe.context_weight)

    def _cut_window(self) -> list[list[int]]:
        """Take the next window of the epoch, sort it by length, and cut it into batches in random order."""
        window: list[int] = []
        num_tokens = 0
        while num_tokens < _WINDOW_STEPS * self._recipe.batch_tokens:
            if not self._order:
                self._order = list(range(len(self._sequences)))
                self._random.shuffle(self._order)
            window.append(self._order.pop())
            num_tokens += len(self._sequences[window[-1]].token_ids)
        window.sort(key=lambda i: (-len(self._sequences[i].token_ids), i))
        batches = cut_batches([len(self._sequences[i].token_ids) for i in window], self._recipe.batch_tokens)
        self._random.shuffle(batches)
        return [[window[k] for k in range(start, stop)] for start, stop in batches]


def cut_batches(lengths: Sequence[int], budget_tokens: int) -> list[tuple[int, int]]:
    """Cut non-increasing lengths into ``[start, stop)`` runs of as many rows as the budget takes, padding included."""
    runs = []
    start = 0
    while start < len(lengths):
        stop = min(len(lengths), start + budget_tokens // lengths[start])
        runs.append((start, stop))
        start = stop
    return runs


def make_batch(rows: Sequence[TokenSequence], context_weight: float) -> WarmUpBatch:
    """Right-pad ``rows`` and list the tokens that are predicted."""
    num_columns = max(len(row.token_ids) for row in rows)
    token_ids = torch.zeros((len(rows), num_columns), dtype=torch.int64)
    weights = torch.zeros((len(rows), num_columns))
    for index, row in enumerate(rows):
        length = len(row.token_ids)
        token_ids[index, :length] = torch.tensor(row.token_ids)
        mask = torch.tensor(row.loss_mask, dtype=torch.float32)
        weights[index, :length] = mask + context_weight * (1.0 - mask)
    weights[:, 0] = 0.0  # nothing predicts the first token
    flat = weights.flatten()
    chosen = flat.nonzero().squeeze(1)
    return WarmUpBatch(
        token_ids=token_ids,
        positions=chosen - 1,
        targets=token_ids.flatten()[chosen],
        weights=flat[chosen],
        num_tokens=sum(len(row.token_ids) for row in rows),
    )


def _check_sequences(sequences: Sequence[TokenSequence], recipe: QuickPolicyRecipe) -> None:
    if not any(any(sequence.loss_mask[1:]) for sequence in sequences):
        raise InputError("a warm-up needs at least one sequence with a token to produce, got none")
    limit = min(recipe.batch_tokens, recipe.max_context_tokens)
    longest = max(len(sequence.token_ids) for sequence in sequences)
    if longest > limit:
        raise InputError(f"a warm-up sequence must have at most {limit} tokens, got {longest}")
