"""Records every model call by the side, before its answer is returned.

*Consumes* engine results; *waits for* nothing but the page cache, and for the disk when it seals; *produces*
turns in the trace store, lines in the ledger, and sealed traces.

A turn is recorded at the moment when its ledger line is whole. Its trace frame is written just before; a crash
between the two leaves a frame that was never answered and never counted, and ``discard`` leaves it out.
"""

import logging
import math
from typing import Protocol

from steelyard.clock import Clock
from steelyard.errors import EngineError, IntegrityError, Refused, StorageFailed
from steelyard.gateway.history import History, Kind, RecordedTurn
from steelyard.gateway.renderer import Prompt
from steelyard.metrics import Counters
from steelyard.packed_floats import PackedFloats
from steelyard.types import (
    AttemptStanding,
    EndReason,
    FinishReason,
    GenerateRequest,
    GenerateResult,
    Message,
    SealedTrace,
    ToolRecord,
    Trace,
    Turn,
)

_LOG = logging.getLogger(__name__)
_MAX_CLOSED = 1 << 16


class TurnStore(Protocol):
    """Where turns go; see ``steelyard.traces.store.TraceStore``."""

    def append(self, turn: Turn) -> int: ...
    def retract(self, attempt_id: str, num_bytes: int) -> None: ...
    def open_turns(self, attempt_id: str) -> tuple[Turn, ...]: ...
    def is_sealed(self, attempt_id: str) -> bool: ...
    async def seal(
        self, attempt_id: str, end_reason: EndReason, tools: tuple[ToolRecord, ...], bound_version: int
    ) -> SealedTrace: ...
    def read_now(self, attempt_id: str) -> tuple[Trace, str]: ...


class Ledger(Protocol):
    """Where recorded tokens are counted; see ``steelyard.traces.ledger.TokenLedger``."""

    def add(self, attempt_id: str, request_id: str, num_tokens: int) -> None: ...
    def recorded(self, attempt_id: str) -> int: ...
    def sync(self) -> None: ...


class AttemptLog:
    """What this process knows of one open attempt."""

    def __init__(self, attempt_id: str, policy_version: int) -> None:
        self.attempt_id = attempt_id
        self.policy_version = policy_version
        self.history = History()
        self.num_calls = 0
        self.num_open_calls = 0
        self.num_tokens = 0
        self.is_closed = False
        self.limit: EndReason | None = None
        self.failure: str | None = None


class Recorder:
    """Keeps the turns of all open attempts. Once an attempt is sealed or discarded, nothing is added to it."""

    def __init__(self, store: TurnStore, ledger: Ledger, counters: Counters, clock: Clock) -> None:
        self._store = store
        self._ledger = ledger
        self._counters = counters
        self._clock = clock
        self._logs: dict[str, AttemptLog] = {}
        self._closed: dict[str, None] = {}

    def open(self, attempt_id: str, policy_version: int) -> AttemptLog:
        """The attempt's log, begun at its first call.

        Raises:
            Refused: the attempt was sealed or discarded, or its gateway died under it (``late``).
        """
        log = self._logs.get(attempt_id)
        if log is not None:
            return log
        if attempt_id in self._closed or self._store.is_sealed(attempt_id) or self._store.open_turns(attempt_id):
            raise Refused("late", f"attempt {attempt_id} has ended; its trace takes no more turns")
        log = self._logs[attempt_id] = AttemptLog(attempt_id, policy_version)
        return log

    def standing(self, attempt_id: str) -> AttemptStanding:
        """How far the calls of an open attempt have come; an attempt without calls stands at the beginning."""
        log = self._logs.get(attempt_id)
        if log is None:
            return AttemptStanding()
        return AttemptStanding(num_turns=log.history.num_turns, limit=log.limit, failure=log.failure)

    def record(
        self,
        log: AttemptLog,
        request: GenerateRequest,
        result: GenerateResult,
        *,
        kind: Kind,
        prompt: Prompt,
        parent: RecordedTurn | None,
        reply: Message,
        break_reason: str | None,
        started_at_s: float,
    ) -> Turn:
        """Record one model call; when this returns, its tokens are in the trace store and in the ledger.

        Args:
            result: checked by :func:`check_result`.
            parent: the turn that the prompt extends; None for a first prompt.
            break_reason: why the prompt does not extend the tokens of ``parent``, where it does not.

        Raises:
            Refused: the attempt ended while the engine worked (``late``).
            StorageFailed: the disk refused; nothing is recorded.
        """
        if log.is_closed:
            self._counters.add("gateway.unrecorded_tokens", len(result.token_ids))
            raise Refused("late", f"attempt {log.attempt_id} ended before request {request.request_id} was answered")
        history = log.history
        segment = history.place(prompt, parent if break_reason is None else None)
        turn = Turn(
            request_id=request.request_id,
            attempt_id=log.attempt_id,
            turn_index=history.num_turns,
            segment_index=len(history.segments) if segment is None else segment.index,
            prompt_token_ids=request.prompt_token_ids,
            token_ids=result.token_ids,
            logprobs=result.logprobs,
            kept_logmass=result.kept_logmass,
            version_spans=result.version_spans,
            sampling=request.sampling,
            finish_reason=result.finish_reason,
            replica_id=result.replica_id,
            load_id=result.load_id,
            num_cached_tokens=result.num_cached_tokens,
            started_at_s=started_at_s,
            ended_at_s=self._clock.now_s(),
        )
        try:
            self._write(turn)
        except StorageFailed:
            self._counters.add("gateway.unrecorded_tokens", len(turn.token_ids))
            raise
        history.add(segment, kind, prompt, result.token_ids, reply)
        log.num_tokens += len(turn.token_ids)
        if segment is None:
            no_parent = "first" if turn.turn_index == 0 else "history_edited"
            self._counters.add(f"gateway.segments.{break_reason or ('forked' if parent else no_parent)}")
        self._counters.add("gateway.recorded_turns")
        self._counters.add("gateway.recorded_tokens", len(turn.token_ids))
        return turn

    async def seal(
        self, attempt_id: str, end_reason: EndReason, tools: tuple[ToolRecord, ...], bound_version: int | None
    ) -> SealedTrace:
        """Make the attempt's trace whole and durable. From here on nothing is added to it.

        Args:
            bound_version: the attempt's policy version, reported where nothing was sampled; None where the
                attempt is not alive.

        Raises:
            Refused: the attempt was discarded, is not alive, or its gateway died under it (``late``), or was sealed
                with another ending (``double``).
            IntegrityError: the sealed trace does not hold what was counted.
            StorageFailed: the disk refused; sealing may be tried again.
        """
        log = self._logs.get(attempt_id)
        if attempt_id in self._closed and not self._store.is_sealed(attempt_id):
            raise Refused("late", f"attempt {attempt_id} was discarded and cannot be sealed")
        if log is not None:
            log.is_closed = True
            bound_version = log.policy_version
        elif not self._store.is_sealed(attempt_id) and self._left_by_another(attempt_id):
            # A power cut may have taken some of its turns, and nobody knows how many there were.
            raise Refused("late", f"the gateway of attempt {attempt_id} died under it; it cannot be sealed")
        if bound_version is None:
            raise Refused("late", f"attempt {attempt_id} is not alive and cannot be sealed")
        sealed = await self._store.seal(attempt_id, end_reason, tools, bound_version)
        counted = self._ledger.recorded(attempt_id)
        num_turns = sealed.num_turns if log is None else log.history.num_turns
        if (sealed.num_turns, sealed.num_tokens) != (num_turns, counted):
            raise IntegrityError(
                f"the sealed trace of {attempt_id} must hold {num_turns} turns and {counted} tokens as counted,"
                f" but holds {sealed.num_turns} and {sealed.num_tokens}"
            )
        self._close(attempt_id)
        return sealed

    def discard(self, attempt_id: str) -> int:
        """Throw the attempt away, whether open, sealed or left by a dead process.

        Returns:
            Its recorded tokens, which are now lost. The files stay until the sweep. Doing it again gives the
            same number, after a power cut too.

        Raises:
            StorageFailed: the disk refused to keep the count.
        """
        log = self._logs.get(attempt_id)
        if log is not None:
            log.is_closed = True
        was_closed = attempt_id in self._closed  # then its files may be gone
        self._close(attempt_id)
        if self._store.is_sealed(attempt_id):
            trace, _ = self._store.read_now(attempt_id)
            return sum(len(turn.token_ids) for turn in trace.turns)
        counted = self._ledger.recorded(attempt_id)
        held = sum(len(turn.token_ids) for turn in self._store.open_turns(attempt_id))
        if held < counted and not was_closed:
            _LOG.warning("open trace %s holds %d of %d recorded tokens; all are lost", attempt_id, held, counted)
        # Frames beyond the count were never recorded: a kill leaves one of them, a power cut can leave several.
        if counted:
            self._ledger.sync()  # the journal books these as lost, so a power cut must not take them from the count
        return counted

    def count_unrecorded(self, num_tokens: int) -> None:
        """Tokens that an engine sampled and that no turn holds; they are outside the books."""
        self._counters.add("gateway.unrecorded_tokens", num_tokens)

    def _left_by_another(self, attempt_id: str) -> bool:
        return bool(self._ledger.recorded(attempt_id) or self._store.open_turns(attempt_id))

    def _write(self, turn: Turn) -> None:
        num_bytes = self._store.append(turn)
        try:
            self._ledger.add(turn.attempt_id, turn.request_id, len(turn.token_ids))
        except StorageFailed:
            self._store.retract(turn.attempt_id, num_bytes)
            raise

    def _close(self, attempt_id: str) -> None:
        self._logs.pop(attempt_id, None)
        self._closed[attempt_id] = None
        if len(self._closed) > _MAX_CLOSED:
            del self._closed[next(iter(self._closed))]


def check_result(request: GenerateRequest, result: GenerateResult, engine: str) -> None:
    """Refuse an engine's answer that cannot be trained on; nothing is ever filled in.

    Raises:
        EngineError: names engine, replica and request, and what must hold.
    """
    fault = _fault_of(request, result)
    if fault is not None:
        replica = result.replica_id or "unnamed replica"
        raise EngineError(f"engine {engine} ({replica}) broke its contract for request {request.request_id}: {fault}")


def _fault_of(request: GenerateRequest, result: GenerateResult) -> str | None:
    num_tokens = len(result.token_ids)
    if result.request_id != request.request_id:
        return f"request_id must be the one asked for, not {result.request_id!r}"
    if num_tokens == 0:
        return "token_ids must hold the sampled tokens, but is empty"
    if len(result.logprobs) != num_tokens or len(result.kept_logmass) != num_tokens:
        return (
            f"logprobs and kept_logmass must have one number for each of {num_tokens} token_ids,"
            f" but have {len(result.logprobs)} and {len(result.kept_logmass)}"
        )
    if num_tokens > request.sampling.max_tokens:
        return f"token_ids must be at most max_tokens = {request.sampling.max_tokens}, but are {num_tokens}"
    if min(result.token_ids) < 0:
        return f"token_ids must not be negative, but hold {min(result.token_ids)}"
    if result.finish_reason is FinishReason.STOP and result.token_ids[-1] not in request.stop_token_ids:
        return f"the last token must be one of stop_token_ids after finish reason stop, not {result.token_ids[-1]}"
    return (
        _logprob_fault(result.logprobs, "logprobs")
        or _logprob_fault(result.kept_logmass, "kept_logmass")
        or (_span_fault(request, result))
    )


def _logprob_fault(values: tuple[float, ...] | PackedFloats, field: str) -> str | None:
    if isinstance(values, PackedFloats) and values.are_log_masses():
        return None
    # The sum of numbers that are finite and at most 0 is finite, unless it overflows; no other check is as fast.
    if not any(values) or (math.isfinite(sum(values)) and max(values) <= 0.0):
        return None
    for position, value in enumerate(values):
        if not (math.isfinite(value) and value <= 0.0):
            return f"{field}[{position}] must be finite and at most 0, not {value}"
    return None


def _span_fault(request: GenerateRequest, result: GenerateResult) -> str | None:
    starts = [span.start for span in result.version_spans]
    if not starts or starts[0] != 0 or starts != sorted(set(starts)) or starts[-1] >= len(result.token_ids):
        return f"version_spans must start at 0 and grow within {len(result.token_ids)} tokens, but start at {starts}"
    versions = {span.version for span in result.version_spans}
    if request.follows_updates:
        if min(versions) < request.policy_version:
            return (
                f"no token may come from before version {request.policy_version}, but they come from {sorted(versions)}"
            )
    elif versions != {request.policy_version}:
        return f"all tokens must come from version {request.policy_version}, but come from {sorted(versions)}"
    return None
