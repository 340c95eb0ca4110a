"""What is recorded of an attempt."""

from steelyard.types.generation import VersionSpan
from steelyard.types.outcomes import EndReason, FinishReason
from steelyard.types.record import Record
from steelyard.types.tasks import Sampling


class Turn(Record, frozen=True, kw_only=True):
    """One recorded model call. Turns of one segment share a token prefix."""

    request_id: str
    attempt_id: str
    turn_index: int
    segment_index: int
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    kept_logmass: tuple[float, ...]
    version_spans: tuple[VersionSpan, ...]
    sampling: Sampling
    finish_reason: FinishReason
    replica_id: str
    load_id: str
    num_cached_tokens: int
    started_at_s: float
    ended_at_s: float


class ToolRecord(Record, frozen=True, kw_only=True):
    """One tool call as the harness saw it: timing and outcome, no payload."""

    tool_call_id: str
    turn_index: int
    name: str
    outcome: str
    latency_s: float
    is_valid: bool = True


class Trace(Record, frozen=True, kw_only=True):
    """A whole attempt, sealed. Its digest is over its msgpack bytes."""

    attempt_id: str
    turns: tuple[Turn, ...]
    end_reason: EndReason
    tools: tuple[ToolRecord, ...] = ()


class SealedTrace(Record, frozen=True, kw_only=True):
    """What the coordinator keeps of a sealed trace."""

    attempt_id: str
    digest: str
    num_turns: int
    num_tokens: int
    oldest_version: int
    newest_version: int
    mean_version: float
    num_segments: int
    end_reason: EndReason
