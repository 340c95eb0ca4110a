"""The records that cross boundaries. All frozen, all msgspec, all without behaviour.

::

    Task --Lease--> harness --GenerateRequest--> engine --GenerateResult--> Turn --> Trace
    Trace + artifact --ScoreJob--> scorer --Score--> TrainingSample --> MicroBatch --> StepReport --> Manifest

Conventions: token ids are ``int``; log-probabilities are natural logs; times are seconds since the
Unix epoch (``_at_s``) or durations in seconds (``_s``); digests are xxh3-128 in hex.
"""

import enum
from typing import Any

import msgspec


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all records: immutable, keyword-only, strict on the wire."""


# --- outcomes -------------------------------------------------------------------------------------


class Outcome(enum.StrEnum):
    """How an attempt ended. Only ``scored`` enters group statistics."""

    SCORED = "scored"
    INFRA_FAILED = "infra_failed"
    GRADER_FAILED = "grader_failed"
    TIMED_OUT = "timed_out"
    TRUNCATED = "truncated"
    CANCELLED = "cancelled"


class EndReason(enum.StrEnum):
    """What the agent did last. All of these are the agent's own doing and are scored."""

    SUBMITTED = "submitted"
    MAX_TURNS = "max_turns"
    CONTEXT_FULL = "context_full"
    LENGTH = "length"
    ANSWER_TIMED_OUT = "answer_timed_out"
    ANSWER_CRASHED = "answer_crashed"


class FinishReason(enum.StrEnum):
    """Why an engine stopped generating."""

    STOP = "stop"
    LENGTH = "length"
    QUEUE_TIMEOUT = "queue_timeout"
    GENERATION_TIMEOUT = "generation_timeout"
    CANCELLED = "cancelled"
    ENGINE_ERROR = "engine_error"


class Purpose(enum.StrEnum):
    """What a group is for. Evaluation groups are sampled and scored, never trained."""

    TRAIN = "train"
    EVALUATION = "evaluation"


class Effects(enum.StrEnum):
    """What a tool call can change."""

    NONE = "none"
    SANDBOX = "sandbox"
    EXTERNAL = "external"


# --- tasks and messages ---------------------------------------------------------------------------


class ToolCall(Record, frozen=True, kw_only=True):
    """A call as parsed from sampled text. ``arguments`` is the JSON text exactly as sampled."""

    id: str
    name: str
    arguments: str


class Message(Record, frozen=True, kw_only=True):
    """One chat message. ``content`` is None only for an assistant message with tool calls."""

    role: str
    content: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None


class ToolSpec(Record, frozen=True, kw_only=True):
    """A tool as shown to the model; ``parameters`` is a JSON schema."""

    name: str
    description: str
    parameters: dict[str, Any]
    effects: Effects = Effects.SANDBOX


class Task(Record, frozen=True, kw_only=True):
    """One prompt of an environment. ``public`` is what the agent's sandbox may hold; nothing private."""

    task_id: str
    environment: str
    environment_version: str
    split: str
    index: int
    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...]
    public: bytes = b""


class Sampling(Record, frozen=True, kw_only=True):
    """How to sample. ``temperature`` 0 is greedy; recorded log-probabilities are then at temperature 1."""

    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int = 256
    seed: int | None = None


# --- leases and attempts --------------------------------------------------------------------------


class Lease(Record, frozen=True, kw_only=True):
    """Permission to run one attempt until ``expires_at_s``. ``attempt_number`` is the fencing token."""

    attempt_id: str
    rollout_id: str
    group_id: str
    task_id: str
    purpose: Purpose
    member_index: int
    attempt_number: int
    policy_version: int
    sampling: Sampling
    max_turns: int
    issued_at_s: float
    expires_at_s: float


class AttemptBinding(Record, frozen=True, kw_only=True):
    """What a live attempt may ask of the policy. ``deadline_at_s`` ends its last model call."""

    policy_version: int
    sampling: Sampling
    max_context_tokens: int
    deadline_at_s: float


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
    """From token ``start`` of a turn's generated tokens on, weights ``version`` sampled."""

    start: int
    version: int


class GenerateRequest(Record, frozen=True, kw_only=True):
    """One model call. ``deadline_at_s`` bounds queueing and generation together.

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


class ArtifactReport(Record, frozen=True, kw_only=True):
    """The agent is done: the trace is sealed and the artifact is durable."""

    attempt_id: str
    attempt_number: int
    trace: SealedTrace
    artifact_digest: str


class AttemptFailure(Record, frozen=True, kw_only=True):
    """The system could not carry an attempt through. Never a reward."""

    attempt_id: str
    attempt_number: int
    outcome: Outcome
    reason: str
    detail: str = ""
    lost_tokens: int = 0


# --- sandbox --------------------------------------------------------------------------------------


class SandboxStatus(enum.StrEnum):
    """How one run inside a sandbox ended. All but ``ok`` were caused by the code that ran."""

    OK = "ok"
    CRASHED = "crashed"
    TIMED_OUT = "timed_out"
    OUTPUT_LIMIT = "output_limit"
    MEMORY_LIMIT = "memory_limit"
    KILLED = "killed"


class SandboxCall(Record, frozen=True, kw_only=True):
    """Run ``program`` (Python source, UTF-8) once, as ``__main__``, for at most ``deadline_s`` of wall time."""

    program: bytes
    stdin: bytes = b""
    deadline_s: float = 2.0


class SandboxResult(Record, frozen=True, kw_only=True):
    """What one run left. ``returncode`` is negative for a signal, None where nobody could see it.

    ``stdout`` and ``stderr`` together hold at most ``sandbox.max_output_bytes``. They are data from
    untrusted code: whatever they claim, only ``status`` and ``returncode`` come from our side.
    """

    status: SandboxStatus
    stdout: bytes
    stderr: bytes
    returncode: int | None
    duration_s: float


class CallStatus(enum.StrEnum):
    """How one call of an untrusted function ended."""

    RETURNED = "returned"
    RAISED = "raised"
    TIMED_OUT = "timed_out"
    CRASHED = "crashed"
    NOT_RUN = "not_run"


class CallResult(Record, frozen=True, kw_only=True):
    """One call of an untrusted function: ``value`` is what it returned, ``error`` the last line of what it raised.

    ``value`` is built of None, bool, int, float, str, list, tuple and dict only; it is data, never code.
    ``not_run`` follows a call that timed out or crashed and took the rest of the run with it.
    """

    status: CallStatus
    value: Any = None
    error: str = ""


# --- scoring --------------------------------------------------------------------------------------


class ScoreJob(Record, frozen=True, kw_only=True):
    """Permission to score one sealed artifact until ``expires_at_s``."""

    job_id: str
    attempt_id: str
    task_id: str
    artifact_digest: str
    end_reason: EndReason
    expires_at_s: float


class Verdict(Record, frozen=True, kw_only=True):
    """What a grader says of one artifact. ``value`` must be finite.

    ``end_reason`` is set where the answer itself timed out or crashed; it overrides the attempt's own.
    """

    value: float
    success: bool
    end_reason: EndReason | None = None
    detail: str = ""


class Score(Record, frozen=True, kw_only=True):
    """A verdict. ``value`` is finite and present exactly when ``outcome`` is ``scored``.

    ``success`` is the environment's yes or no, which evaluation counts; ``value`` is what is trained.
    ``end_reason`` is set where the grader found that the answer timed out or crashed.
    """

    job_id: str
    attempt_id: str
    outcome: Outcome
    value: float | None
    verifier_version: str
    success: bool = False
    end_reason: EndReason | None = None
    detail: str = ""
    duration_s: float = 0.0


# --- training data --------------------------------------------------------------------------------


class TrainingSample(Record, frozen=True, kw_only=True):
    """One segment of one attempt, ready for the loss.

    All sequences have one length L. ``loss_mask[i]`` is 1 where ``token_ids[i]`` was sampled;
    ``logprobs[i]`` (behaviour, 0.0 where masked) and ``versions[i]`` (-1 where masked) belong to
    that token. ``temperature`` is that of sampling.
    """

    attempt_id: str
    segment_index: int
    token_ids: tuple[int, ...]
    loss_mask: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    advantage: float
    temperature: float


class MicroBatch(Record, frozen=True, kw_only=True):
    """Rows of similar length, right-padded: every array is C-contiguous [num_rows, num_columns].

    ``token_ids`` int32; ``loss_mask`` uint8; ``logprobs`` float32; ``advantages`` and ``temperatures``
    float32 [num_rows]; ``num_tokens`` int32 [num_rows] real tokens a row. Raw little-endian bytes.
    """

    num_rows: int
    num_columns: int
    token_ids: bytes
    loss_mask: bytes
    logprobs: bytes
    advantages: bytes
    temperatures: bytes
    num_tokens: bytes
    attempt_ids: tuple[str, ...]


class StepBatch(Record, frozen=True, kw_only=True):
    """All that one optimizer step consumes, in order; kept until a checkpoint covers it.

    ``loss_denominator`` is the number of sampled tokens over the whole batch, fixed beforehand so that
    the update does not depend on how the batch is cut. The batch digest is over these msgpack bytes.
    """

    step: int
    parent_version: int
    samples: tuple[TrainingSample, ...]
    micro_batches: tuple[MicroBatch, ...]
    loss_denominator: float


class StepReport(Record, frozen=True, kw_only=True):
    """What the trainer says of one step; ``version`` is the version that it produced."""

    step: int
    version: int
    loss: float
    grad_norm: float
    kl: float
    ratio_mean: float
    ratio_max: float
    clip_frac: float
    entropy: float
    learning_rate: float
    num_tokens: int
    num_loss_tokens: int
    duration_s: float


# --- weights --------------------------------------------------------------------------------------


class FileDigest(Record, frozen=True, kw_only=True):
    """One file of a version, by name inside its directory."""

    name: str
    num_bytes: int
    digest: str


class ParameterDigest(Record, frozen=True, kw_only=True):
    """One parameter as published: digest over its contiguous bytes in ``dtype``."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    digest: str


class Probe(Record, frozen=True, kw_only=True):
    """Fixed token sequences with the trainer's own log-probabilities of each next token.

    ``sequences[i]`` has length L_i, ``logprobs[i]`` length L_i - 1. ``separates_parent`` says whether
    the parent's log-probabilities differ by more than the tolerance, so that the probe can tell them apart.
    """

    sequences: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[float, ...], ...]
    separates_parent: bool


class Manifest(Record, frozen=True, kw_only=True):
    """What a version number promises. Written last; a directory without it is no version."""

    version: int
    step: int
    parent_version: int | None
    files: tuple[FileDigest, ...]
    parameters: tuple[ParameterDigest, ...]
    weights_digest: str
    model_config_digest: str
    tokenizer_digest: str
    template_digest: str
    dtype: str
    probe: Probe


class LoadProof(Record, frozen=True, kw_only=True):
    """A replica's proof that what is in its memory is what was published."""

    version: int
    replica_id: str
    load_id: str
    weights_digest: str
    probe_max_error: float
    probe_tolerance: float
    loaded_in_s: float


class EngineStats(Record, frozen=True, kw_only=True):
    """A replica at one instant. Token counters only grow."""

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
