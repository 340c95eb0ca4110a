"""One model call: chat request, tokens in, tokens out."""

from steelyard.types.outcomes import FinishReason
from steelyard.types.record import Record
from steelyard.types.tasks import Message, Sampling, ToolSpec


class ChatRequest(Record, frozen=True, kw_only=True):
    """One model call as a harness asks for it.

    ``max_tokens`` and ``seed`` are wishes: the attempt's binding bounds the first and, where it has a
    seed, overrides the second. ``stop`` are strings that end the text and are cut from it.
    """

    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] = ()
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None


class ChatReply(Record, frozen=True, kw_only=True):
    """What a harness sees of one model call; tokens and log-probabilities go to the trace store.

    ``finish_reason`` is ``stop`` or ``length``. ``context_full``: the prompt left no room, nothing was
    sampled or recorded, and ``message`` is empty. ``num_malformed_calls``: tool calls that could not be
    parsed and stay in the content as text.
    """

    request_id: str
    message: Message
    finish_reason: FinishReason
    num_prompt_tokens: int
    num_completion_tokens: int
    num_malformed_calls: int = 0
    context_full: bool = False


class VersionSpan(Record, frozen=True, kw_only=True):
    """From token ``start`` of a turn's generated tokens on, weights ``version`` sampled.

    ``kv_version``: where KV was kept over a change of weights, the oldest version whose KV these tokens saw; None
    where all of it is of ``version``.
    """

    start: int
    version: int
    kv_version: int | None = None


class GenerateRequest(Record, frozen=True, kw_only=True):
    """One model call. ``deadline_at_s`` bounds queueing and generation together.

    ``policy_version`` samples every token; with ``follows_updates`` (segmented mode) it is the oldest version that
    may, and the engine samples with what it serves, which may change between two tokens.

    ``sequence_key`` names the conversation whose KV may be reused (attempt and segment); reuse is
    decided by the engine on (version, equal token prefix), never on the key alone.
    """

    request_id: str
    attempt_id: str
    sequence_key: str
    policy_version: int
    prompt_token_ids: tuple[int, ...]
    sampling: Sampling
    stop_token_ids: tuple[int, ...]
    deadline_at_s: float
    stream: bool = False
    follows_updates: bool = False


class GenerateResult(Record, frozen=True, kw_only=True):
    """What an engine returns: the sampled ids, and per id the two numbers of DESIGN section 5.

    ``logprobs[i]``: log-probability of ``token_ids[i]`` after temperature over the full vocabulary.
    ``kept_logmass[i]``: log of the probability mass that top-p kept (0.0 without top-p).
    The stop token, when sampled, is the last of ``token_ids``.
    """

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    kept_logmass: tuple[float, ...]
    version_spans: tuple[VersionSpan, ...]
    finish_reason: FinishReason
    replica_id: str
    load_id: str
    num_cached_tokens: int = 0
    queued_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    detail: str = ""


class TokenChunk(Record, frozen=True, kw_only=True):
    """Tokens of a streaming request, in order, as they are sampled."""

    request_id: str
    token_ids: tuple[int, ...]


class EngineStats(Record, frozen=True, kw_only=True):
    """A replica at one instant. Counters only grow.

    ``prefill_tokens`` were computed, ``cached_tokens`` of prompts need not be, because their KV was there.
    ``num_evicted`` running requests gave up their KV, ``evicted_tokens`` in all, to compute it again later.
    """

    replica_id: str
    num_running: int
    num_waiting: int
    kv_tokens_in_use: int
    kv_tokens_capacity: int
    prefill_tokens: int
    decode_tokens: int
    cached_tokens: int
    busy_s: float
    versions: tuple[int, ...]
    num_evicted: int = 0
    evicted_tokens: int = 0
