"""How a worker on another machine opens, seals and discards its attempts at the gateway: records, names and limits.

docs/gateway_protocol.md says how they are used. Model calls themselves go over the OpenAI endpoints, with the key that
opening an attempt gives.
"""

from typing import Annotated, TypeAlias

from msgspec import Meta

from steelyard.types import AttemptStanding, EndReason, Record, SealedTrace, ToolRecord

PROTOCOL_VERSION = 1
VERSION_HEADER = "Steelyard-Protocol"
CONTENT_TYPE = "application/msgpack"
ATTEMPTS_PATH = "/v1/attempts"

Id = Annotated[str, Meta(min_length=1, max_length=200)]


class OpenAttempt(Record, frozen=True, kw_only=True, tag_field="call", tag="open"):
    """The key with which a live attempt calls the policy. Asked again, the same key."""

    attempt_id: Id


class SealAttempt(Record, frozen=True, kw_only=True, tag_field="call", tag="seal"):
    """The agent is done. Asked again with the same ending, the same trace."""

    attempt_id: Id
    end_reason: EndReason
    tools: tuple[ToolRecord, ...] = ()


class DiscardAttempt(Record, frozen=True, kw_only=True, tag_field="call", tag="discard"):
    """Throw the attempt's turns away. Asked again, the same number."""

    attempt_id: Id


class AskStanding(Record, frozen=True, kw_only=True, tag_field="call", tag="standing"):
    """How far the attempt's model calls have come."""

    attempt_id: Id


AttemptCall: TypeAlias = OpenAttempt | SealAttempt | DiscardAttempt | AskStanding


class Known(Record, frozen=True, kw_only=True, tag_field="result", tag="known"):
    """The key is good, and whose it is."""

    worker_id: str


class Opened(Record, frozen=True, kw_only=True, tag_field="result", tag="opened"):
    """``api_key`` is for model calls, until ``expires_at_s`` (Unix epoch) or the attempt's end."""

    api_key: str
    expires_at_s: float


class Sealed(Record, frozen=True, kw_only=True, tag_field="result", tag="sealed"):
    """The trace is whole and durable."""

    trace: SealedTrace


class Discarded(Record, frozen=True, kw_only=True, tag_field="result", tag="discarded"):
    """``num_tokens`` sampled tokens were recorded for the attempt, and are lost."""

    num_tokens: int


class Stands(Record, frozen=True, kw_only=True, tag_field="result", tag="stands"):
    """What the gateway saw of the attempt's calls so far."""

    standing: AttemptStanding


AttemptResult: TypeAlias = Known | Opened | Sealed | Discarded | Stands
