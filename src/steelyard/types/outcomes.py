"""How things end, what they are for, and what they can change."""

import enum


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
