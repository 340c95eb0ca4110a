"""The records that cross boundaries. All frozen, all msgspec, all without behaviour.

::

    Task --Lease--> harness --GenerateRequest--> engine --GenerateResult--> Turn --> Trace
    Trace + artifact --ScoreJob--> scorer --Score--> TrainingSample --> MicroBatch --> StepReport --> Manifest

Conventions: token ids are ``int``; log-probabilities are natural logs; times are seconds since the
Unix epoch (``_at_s``) or durations in seconds (``_s``); digests are xxh3-128 in hex.
"""

from steelyard.types.attempts import ArtifactReport, AttemptBinding, AttemptFailure, Lease
from steelyard.types.generation import (
    ChatReply,
    ChatRequest,
    EngineStats,
    GenerateRequest,
    GenerateResult,
    TokenChunk,
    VersionSpan,
)
from steelyard.types.outcomes import Effects, EndReason, FinishReason, Outcome, Purpose
from steelyard.types.record import Record
from steelyard.types.sandbox import CallResult, CallStatus, SandboxCall, SandboxResult, SandboxStatus
from steelyard.types.scoring import Score, ScoreJob, Verdict
from steelyard.types.tasks import Message, Sampling, Task, TaskRef, ToolCall, ToolSpec
from steelyard.types.traces import SealedTrace, ToolRecord, Trace, Turn
from steelyard.types.training import LogRatios, MicroBatch, StepBatch, StepReport, TrainingSample
from steelyard.types.weights import FileDigest, LoadProof, Manifest, ParameterDigest, Probe

__all__ = [
    "ArtifactReport",
    "AttemptBinding",
    "AttemptFailure",
    "CallResult",
    "CallStatus",
    "ChatReply",
    "ChatRequest",
    "Effects",
    "EndReason",
    "EngineStats",
    "FileDigest",
    "FinishReason",
    "GenerateRequest",
    "GenerateResult",
    "Lease",
    "LoadProof",
    "LogRatios",
    "Manifest",
    "Message",
    "MicroBatch",
    "Outcome",
    "ParameterDigest",
    "Probe",
    "Purpose",
    "Record",
    "Sampling",
    "SandboxCall",
    "SandboxResult",
    "SandboxStatus",
    "Score",
    "ScoreJob",
    "SealedTrace",
    "StepBatch",
    "StepReport",
    "Task",
    "TaskRef",
    "TokenChunk",
    "ToolCall",
    "ToolRecord",
    "ToolSpec",
    "Trace",
    "TrainingSample",
    "Turn",
    "Verdict",
    "VersionSpan",
]
