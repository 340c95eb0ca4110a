"""Builders of turns, traces, samples and step batches, small and seeded."""

import random
from collections.abc import Sequence

from steelyard.assembly.batch import build_step_batch
from steelyard.types import (
    EndReason,
    FinishReason,
    Outcome,
    Sampling,
    Score,
    StepBatch,
    Trace,
    TrainingSample,
    Turn,
    VersionSpan,
)


def make_turn(
    prompt: Sequence[int],
    generated: Sequence[int],
    *,
    attempt_id: str = "att_a",
    turn_index: int = 0,
    segment_index: int = 0,
    spans: Sequence[tuple[int, int]] = ((0, 0),),
    temperature: float = 1.0,
    logprobs: Sequence[float] | None = None,
    replica_id: str = "rep_a",
    load_id: str = "load_a",
) -> Turn:
    """A turn whose log-probabilities, unless given, are -0.5, -1.0, -1.5 and so on."""
    return Turn(
        request_id=f"req_{attempt_id}_{turn_index}",
        attempt_id=attempt_id,
        turn_index=turn_index,
        segment_index=segment_index,
        prompt_token_ids=tuple(prompt),
        token_ids=tuple(generated),
        logprobs=tuple(logprobs if logprobs is not None else (-0.5 * (i + 1) for i in range(len(generated)))),
        kept_logmass=(0.0,) * len(generated),
        version_spans=tuple(VersionSpan(start=start, version=version) for start, version in spans),
        sampling=Sampling(temperature=temperature),
        finish_reason=FinishReason.STOP,
        replica_id=replica_id,
        load_id=load_id,
        num_cached_tokens=0,
        started_at_s=0.0,
        ended_at_s=1.0,
    )


def make_trace(turns: Sequence[Turn], attempt_id: str = "att_a") -> Trace:
    """A trace that ended with a submission."""
    return Trace(attempt_id=attempt_id, turns=tuple(turns), end_reason=EndReason.SUBMITTED)


def make_score(attempt_id: str, value: float | None, outcome: Outcome = Outcome.SCORED) -> Score:
    """A score, by default a counted one."""
    return Score(
        job_id=f"score_{attempt_id}", attempt_id=attempt_id, outcome=outcome, value=value, verifier_version="test"
    )


def make_sample(
    token_ids: Sequence[int],
    loss_mask: Sequence[int],
    *,
    attempt_id: str = "att_a",
    advantage: float = 1.0,
    temperature: float = 1.0,
    logprobs: Sequence[float] | None = None,
    version: int = 0,
) -> TrainingSample:
    """A sample whose log-probabilities, unless given, are -1.0 where the mask is 1."""
    return TrainingSample(
        attempt_id=attempt_id,
        segment_index=0,
        token_ids=tuple(token_ids),
        loss_mask=tuple(loss_mask),
        logprobs=tuple(logprobs if logprobs is not None else (-1.0 * bit for bit in loss_mask)),
        versions=tuple(version if bit else -1 for bit in loss_mask),
        advantage=advantage,
        temperature=temperature,
    )


def random_samples(
    seed: int, num_samples: int, *, vocab_size: int, min_tokens: int = 8, max_tokens: int = 64
) -> tuple[TrainingSample, ...]:
    """Samples of random tokens in alternating prompt and sampled stretches; advantages of both signs, none 0."""
    rng = random.Random(seed)
    samples = []
    for index in range(num_samples):
        length = rng.randint(min_tokens, max_tokens)
        first = rng.randint(1, length - 1)
        mask = [0] * first + [1 if rng.random() < 0.7 else 0 for _ in range(length - first)]
        mask[first] = 1
        samples.append(
            make_sample(
                [rng.randrange(vocab_size) for _ in range(length)],
                mask,
                attempt_id=f"att_{seed}_{index}",
                advantage=rng.choice((-1, 1)) * rng.uniform(0.2, 2.0),
            )
        )
    return tuple(samples)


def random_step_batch(
    seed: int,
    *,
    step: int = 0,
    parent_version: int = 0,
    num_samples: int = 12,
    vocab_size: int = 64,
    micro_batch_tokens: int = 256,
) -> StepBatch:
    """A seeded batch over :func:`random_samples`."""
    samples = random_samples(seed, num_samples, vocab_size=vocab_size)
    return build_step_batch(step, parent_version, samples, micro_batch_tokens)
