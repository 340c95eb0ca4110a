"""A sealed trace becomes training samples: one per segment, every sampled token in exactly one of them.

In a segment the prompt of each turn extends the tokens of the turn before it (prompt and generated), so the
tokens of the last turn hold all earlier ones. That is checked here again, token for token, although the gateway
has checked it while recording: what is trained rests on it.
"""

import math
from collections.abc import Iterable, Sequence

from steelyard.errors import IntegrityError
from steelyard.types import Trace, TrainingSample, Turn

_MAX_LOGPROB = 1e-5
"""A log-probability above this is no rounding of 0."""

MASKED_VERSION = -1


def trace_samples(trace: Trace, advantage: float) -> tuple[TrainingSample, ...]:
    """The training samples of one attempt, in segment order; all carry the attempt's advantage.

    A segment in which nothing was sampled gives no sample.

    Raises:
        IntegrityError: a turn belongs to another attempt, turns are out of order, a prompt does not extend the
            turn before it, a per-token sequence has another length than ``token_ids``, a log-probability is
            missing, not finite or positive, a version span is malformed, or a segment mixes temperatures.
    """
    if not math.isfinite(advantage):
        raise IntegrityError(f"the advantage of attempt {trace.attempt_id} must be finite, got {advantage}")
    samples = []
    for segment_index, turns in _segments(trace):
        sample = _segment_sample(trace.attempt_id, segment_index, turns, advantage)
        if any(sample.loss_mask):
            samples.append(sample)
    return tuple(samples)


def count_sampled_tokens(samples: Iterable[TrainingSample]) -> int:
    """Number of sampled tokens, which is the number of ones in the loss masks."""
    return sum(sum(sample.loss_mask) for sample in samples)


def _segments(trace: Trace) -> list[tuple[int, list[Turn]]]:
    segments: dict[int, list[Turn]] = {}
    previous_index = -1
    for turn in trace.turns:
        if turn.attempt_id != trace.attempt_id:
            raise IntegrityError(
                f"turn {turn.turn_index} of trace {trace.attempt_id} must belong to it, got {turn.attempt_id}"
            )
        if turn.turn_index <= previous_index:
            raise IntegrityError(
                f"turn_index of {trace.attempt_id} must grow, got {turn.turn_index} after {previous_index}"
            )
        previous_index = turn.turn_index
        _check_turn(turn)
        segments.setdefault(turn.segment_index, []).append(turn)
    return sorted(segments.items())


def _segment_sample(attempt_id: str, segment_index: int, turns: Sequence[Turn], advantage: float) -> TrainingSample:
    """Walk the turns of one segment; between two sampled stretches lies the rendering of new messages."""
    last = turns[-1]
    token_ids = last.prompt_token_ids + last.token_ids
    loss_mask = [0] * len(token_ids)
    logprobs = [0.0] * len(token_ids)
    versions = [MASKED_VERSION] * len(token_ids)
    temperature = turns[0].sampling.temperature
    recorded: tuple[int, ...] = ()
    for turn in turns:
        _check_extends(turn, recorded)
        if turn.sampling.temperature != temperature:
            raise IntegrityError(
                f"{_name(turn)}: one segment must have one temperature, got {turn.sampling.temperature} "
                f"after {temperature}"
            )
        start, stop = len(turn.prompt_token_ids), len(turn.prompt_token_ids) + len(turn.token_ids)
        loss_mask[start:stop] = [1] * len(turn.token_ids)
        logprobs[start:stop] = turn.logprobs
        versions[start:stop] = _token_versions(turn)
        recorded = turn.prompt_token_ids + turn.token_ids
    return TrainingSample(
        attempt_id=attempt_id,
        segment_index=segment_index,
        token_ids=token_ids,
        loss_mask=tuple(loss_mask),
        logprobs=tuple(logprobs),
        versions=tuple(versions),
        advantage=advantage,
        temperature=temperature,
    )


def _check_turn(turn: Turn) -> None:
    num_tokens = len(turn.token_ids)
    if not turn.prompt_token_ids:
        raise IntegrityError(f"{_name(turn)}: prompt_token_ids must not be empty")
    if len(turn.logprobs) != num_tokens:
        raise IntegrityError(f"{_name(turn)}: logprobs must have length {num_tokens}, got {len(turn.logprobs)}")
    if len(turn.kept_logmass) != num_tokens:
        raise IntegrityError(f"{_name(turn)}: kept_logmass must have length {num_tokens}, got {len(turn.kept_logmass)}")
    for logprob in turn.logprobs:
        if not math.isfinite(logprob) or logprob > _MAX_LOGPROB:
            raise IntegrityError(f"{_name(turn)}: logprobs must be finite and at most 0, got {logprob}")
    if num_tokens and turn.sampling.temperature <= 0.0:
        raise IntegrityError(
            f"{_name(turn)}: sampling.temperature must be above 0 to train, got {turn.sampling.temperature}: "
            "greedy tokens have no behaviour distribution"
        )


def _check_extends(turn: Turn, recorded: tuple[int, ...]) -> None:
    if turn.prompt_token_ids[: len(recorded)] == recorded:
        return
    common = 0
    for prompt_token, recorded_token in zip(turn.prompt_token_ids, recorded, strict=False):
        if prompt_token != recorded_token:
            break
        common += 1
    raise IntegrityError(
        f"{_name(turn)}: prompt_token_ids must extend the {len(recorded)} tokens of the turn before it in segment "
        f"{turn.segment_index}, but only {common} agree"
    )


def _token_versions(turn: Turn) -> list[int]:
    """The weights version of each generated token, from the spans."""
    if not turn.token_ids:
        return []
    starts = [span.start for span in turn.version_spans]
    if not starts or starts[0] != 0 or starts[-1] >= len(turn.token_ids) or starts != sorted(set(starts)):
        raise IntegrityError(
            f"{_name(turn)}: version_spans must start at 0 and grow below {len(turn.token_ids)}, got starts {starts}"
        )
    stops = [*starts[1:], len(turn.token_ids)]
    versions: list[int] = []
    for span, stop in zip(turn.version_spans, stops, strict=True):
        if span.version < 0:
            raise IntegrityError(f"{_name(turn)}: version_spans must name versions from 0 on, got {span.version}")
        versions.extend([span.version] * (stop - span.start))
    return versions


def _name(turn: Turn) -> str:
    return f"turn {turn.turn_index} of {turn.attempt_id} (request {turn.request_id})"
