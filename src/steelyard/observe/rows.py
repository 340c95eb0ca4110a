"""The rows of ``metrics.jsonl``: what a run says about itself, one JSON object a line.

Every row has ``at_s`` (seconds since the Unix epoch) and ``kind``. docs/metrics.md lists all fields with
their units. Durations are in seconds (``_s``) or milliseconds (``_ms``), shares are 0 to 1 (``_frac``), counts
start with ``num_``. A number that was not finite is written as ``null`` and read back as None.

Reading is tolerant, because the rows are for people: a torn last line, an unknown kind (a newer version wrote
it) or a row that lacks a field is skipped and counted, never an error.
"""

import enum
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from steelyard.metrics import MetricsFile
from steelyard.types import LogRatios


class StageName(enum.StrEnum):
    """What a run is doing, in the usual order."""

    PREPARE_POLICY = "prepare_policy"
    START = "start"
    TRAIN = "train"
    EVALUATE = "evaluate"
    REPORT = "report"
    DONE = "done"


class EvaluationLabel(enum.StrEnum):
    """Which policy was evaluated: version 0 or the last one."""

    BEFORE = "before"
    AFTER = "after"


class EvaluationMode(enum.StrEnum):
    """At the rollout temperature, or always the likeliest token."""

    SAMPLED = "sampled"
    GREEDY = "greedy"


class EvaluationSplit(enum.StrEnum):
    """Unseen tasks of the trained kinds, or of kinds that training never showed."""

    HELDOUT = "heldout"
    UNSEEN_TEMPLATES = "unseen_templates"


class Row(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    """Base of all rows. Unknown fields are ignored on reading. ``at_s``: seconds since the Unix epoch."""

    at_s: float


class StageRow(Row, frozen=True, kw_only=True, tag="stage"):
    """The run entered a stage."""

    name: StageName
    detail: str = ""


class StepRow(Row, frozen=True, kw_only=True, tag="step"):
    """One optimizer step: ``step`` counts from 0 and produced weights ``version``.

    Counts, shares and lengths are over the trajectories of its batch. ``wait_s`` is how long the trainer
    waited for that batch; the parts may overlap each other, so they need not add up to ``wall_s``.
    ``mismatch`` and ``policy_change`` are those of :class:`steelyard.types.StepReport`, for the kind of ``engine`` that
    sampled; ``mismatch.abs_p99`` should not exceed ``mismatch_bound``.
    """

    step: int
    version: int
    max_steps: int
    loss: float | None
    grad_norm: float | None
    kl: float | None
    ratio_mean: float | None
    ratio_max: float | None
    clip_frac: float | None
    entropy: float | None
    learning_rate: float
    num_tokens: int
    num_loss_tokens: int
    num_trajectories: int
    num_groups: int
    num_useful_groups: int
    num_no_signal: int
    reward_mean: float | None
    success_frac: float | None
    first_try_frac: float | None
    lag_mean: float
    lag_max: int
    age_mean_s: float
    turns_mean: float
    tokens_p50: float
    tokens_p99: float
    tokens_max: float
    wait_s: float
    assemble_s: float
    train_s: float
    publish_s: float
    load_s: float
    checkpoint_s: float
    wall_s: float
    engine: str = ""
    mismatch: LogRatios | None = None
    policy_change: LogRatios | None = None
    mismatch_bound: float | None = None


class EngineRow(Row, frozen=True, kw_only=True, tag="engine"):
    """One replica over the time since its last row.

    ``cached_frac``: prompt tokens that reuse had already computed. ``num_evicted``: running requests that gave up their
    KV, because there was no space or because weights changed under them.
    """

    replica_id: str
    decode_tokens_per_s: float
    prefill_tokens_per_s: float
    cached_frac: float
    num_running: int
    num_waiting: int
    kv_in_use_frac: float
    busy_frac: float
    num_evicted: int = 0


class RouterRow(Row, frozen=True, kw_only=True, tag="router"):
    """What stands between gateway and replicas. Waits for room are of the time since the last row, None where nobody
    came; counts are of the process so far. ``weights``: how far each replica is trusted; ``projected_kv_frac``: share
    of its KV that open requests are projected to need.
    """

    num_waiting: int
    num_open: int
    wait_p50_s: float | None
    wait_p99_s: float | None
    num_moves: int
    num_retries: int
    num_hedges: int
    num_queue_timeouts: int
    weights: dict[str, float]
    projected_kv_frac: dict[str, float]
    draining: tuple[str, ...] = ()


class EnvironmentRow(Row, frozen=True, kw_only=True, tag="environment"):
    """Tools and sandboxes over the time since the last row. Quantiles are None where nothing ran."""

    tool_p50_ms: float | None
    tool_p99_ms: float | None
    sandbox_start_p50_ms: float | None
    failure_frac: float
    timeout_frac: float


class PromptBook(msgspec.Struct, frozen=True, kw_only=True):
    """Exactly once by prompt: ``issued = trained + dropped + live``. ``dropped`` is by reason."""

    issued: int
    trained: int
    dropped: dict[str, int] = msgspec.field(default_factory=dict)
    live: int


class TokenBook(msgspec.Struct, frozen=True, kw_only=True):
    """Sampled tokens: ``recorded = trained + evaluated + rejected + in_flight + lost``; two of these by reason."""

    recorded: int
    trained: int
    evaluated: int
    rejected: dict[str, int] = msgspec.field(default_factory=dict)
    in_flight: int
    lost: dict[str, int] = msgspec.field(default_factory=dict)


class BooksRow(Row, frozen=True, kw_only=True, tag="books"):
    """The books so far. ``refused`` counts messages that came late, twice or from nowhere, by reason."""

    prompts: PromptBook
    tokens: TokenBook
    refused: dict[str, int] = msgspec.field(default_factory=dict)


class EvaluationRow(Row, frozen=True, kw_only=True, tag="evaluation"):
    """One finished evaluation. ``causes`` counts its failures by cause.

    ``solved`` and ``all_calls_valid`` hold one character for each task, in the order of the tasks: 1 or 0. With
    them two evaluations can be compared task by task.
    """

    label: EvaluationLabel
    mode: EvaluationMode
    split: EvaluationSplit
    num_tasks: int
    num_success: int
    num_all_calls_valid: int
    num_success_all_calls_valid: int
    causes: dict[str, int] = msgspec.field(default_factory=dict)
    mean_turns: float
    mean_tokens: float
    solved: str = ""
    all_calls_valid: str = ""


class PredictionRow(Row, frozen=True, kw_only=True, tag="prediction"):
    """A part of the run beside what ``allocation.calibration`` says of it.

    ``predicted_s`` is the calibration's own. ``factor``: observed over predicted by now, robustly averaged;
    ``error_frac``: what predictions times the factor were off by, typically.
    """

    term: str
    predicted_s: float
    observed_s: float
    factor: float
    error_frac: float
    num_observed: int


AnyRow = StageRow | StepRow | EngineRow | RouterRow | EnvironmentRow | BooksRow | EvaluationRow | PredictionRow
_RowT = TypeVar("_RowT", bound=Row)
_DECODER = msgspec.json.Decoder(AnyRow)


class RunRows(msgspec.Struct, frozen=True, kw_only=True):
    """All readable rows in the order written, and how many lines could not be read and why the first could not."""

    rows: tuple[AnyRow, ...]
    num_skipped: int = 0
    first_problem: str = ""


def kind_of(row: Row) -> str:
    """The ``kind`` under which a row is written."""
    return str(type(row).__struct_config__.tag)


def write_row(file: MetricsFile, row: Row) -> None:
    """Append one row. Not finite numbers become ``null``.

    Raises:
        OSError: the disk refuses.
    """
    values: dict[str, Any] = msgspec.structs.asdict(row)
    at_s = values.pop("at_s")
    file.write(at_s, kind_of(row), **values)


def read_rows(path: Path) -> RunRows:
    """Read a ``metrics.jsonl``; a missing file is a run without rows.

    Raises:
        OSError: the file is there but cannot be read.
    """
    if not path.exists():
        return RunRows(rows=())
    return decode_rows(path.read_bytes())


def decode_rows(data: bytes) -> RunRows:
    """Rows from the bytes of a ``metrics.jsonl``; see the module for what is tolerated."""
    rows: list[AnyRow] = []
    num_skipped = 0
    first_problem = ""
    for number, line in enumerate(data.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            rows.append(_DECODER.decode(line))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            num_skipped += 1
            first_problem = first_problem or f"line {number}: {error}"
    return RunRows(rows=tuple(rows), num_skipped=num_skipped, first_problem=first_problem)


def of_type(rows: Iterable[AnyRow], kind: type[_RowT]) -> list[_RowT]:
    """The rows of one kind, in order."""
    return [row for row in rows if isinstance(row, kind)]


def surviving_steps(rows: Iterable[AnyRow]) -> list[StepRow]:
    """Step rows of the surviving lineage, in order of ``step``.

    A resumed run computes the steps after its checkpoint again, so a row supersedes every earlier row with
    the same or a higher step.
    """
    steps: list[StepRow] = []
    for row in of_type(rows, StepRow):
        while steps and steps[-1].step >= row.step:
            steps.pop()
        steps.append(row)
    return steps


def finite(value: float | None) -> float | None:
    """``value``, or None where it is missing or not finite."""
    return value if value is not None and math.isfinite(value) else None
