"""Builders of turns and traces."""

from steelyard.types import EndReason, FinishReason, Sampling, SealedTrace, Trace, Turn, VersionSpan


def make_turn(
    attempt_id: str, turn_index: int, *, segment_index: int = 0, num_tokens: int = 5, version: int = 0
) -> Turn:
    """A turn whose numbers depend on its index; turns of one segment extend each other, as recorded ones do."""
    size = num_tokens + 3
    prompt = tuple(1000 + i for i in range(3 + turn_index * size))
    return Turn(
        request_id=f"req_{attempt_id}_{turn_index}",
        attempt_id=attempt_id,
        turn_index=turn_index,
        segment_index=segment_index,
        prompt_token_ids=prompt,
        token_ids=tuple(1000 + len(prompt) + i for i in range(num_tokens)),
        logprobs=tuple(-0.25 - 0.125 * i for i in range(num_tokens)),
        kept_logmass=(0.0,) * num_tokens,
        version_spans=(VersionSpan(start=0, version=version),),
        sampling=Sampling(temperature=0.7),
        finish_reason=FinishReason.STOP,
        replica_id="rep_0",
        load_id="load_0",
        num_cached_tokens=0,
        started_at_s=100.0 + turn_index,
        ended_at_s=100.5 + turn_index,
    )


def make_trace(attempt_id: str, num_turns: int = 3, *, version: int = 0) -> Trace:
    """A sealed trace of one segment."""
    turns = tuple(make_turn(attempt_id, index, version=version) for index in range(num_turns))
    return Trace(attempt_id=attempt_id, turns=turns, end_reason=EndReason.SUBMITTED)


def sealed_trace(attempt_id: str, num_tokens: int) -> SealedTrace:
    """What a worker reports of a trace of one turn, sampled from version 0."""
    return SealedTrace(
        attempt_id=attempt_id,
        digest="d",
        num_turns=1,
        num_tokens=num_tokens,
        oldest_version=0,
        newest_version=0,
        mean_version=0.0,
        num_segments=1,
        end_reason=EndReason.SUBMITTED,
    )
