"""Continuous batching in emulated time: which sequence has how many tokens when. Pure; all times in emulated seconds.

::

    waiting --KV and a place free--> prefilling (one at a time, in chunks) --> decoding --> ended
                                        ^--- weights change under it, KV computed again ---'

Between two changes of the batch nothing happens but steps of equal length, so those are not carried out one by one:
a *stretch* of steps is planned, and applied when it is over. Work is done per change and not per token, which is what
lets one process stand for many devices.

How many tokens a sequence samples is known when it comes. So its KV is set aside whole, and nothing is ever evicted.
"""

import heapq
import math
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from steelyard.errors import EngineError
from steelyard.inference.engine import KvRule
from steelyard.inference.time_model import TimeModel
from steelyard.types import FinishReason, GenerateRequest, VersionSpan

_MAX_STRETCH_STEPS = 256
"""The KV grows during a stretch; its time is that of its middle."""
_ROUNDING = 1e-9


@dataclass(frozen=True, kw_only=True)
class CoreSettings:
    """Sizes of one emulated engine. ``stream_every_s``: how often streamed tokens are looked for."""

    max_running: int
    kv_tokens: int
    prefill_chunk_tokens: int
    stream_every_s: float = 0.05


@dataclass(eq=False)
class Sequence:
    """One request. ``tokens`` are all that it is to sample; the first ``num_sampled`` of them it has.

    ``num_to_compute``: tokens whose KV is still to be computed before it can sample on.
    """

    request: GenerateRequest
    tokens: tuple[int, ...]
    reason: FinishReason
    version: int
    deadline_s: float
    added_s: float
    num_sampled: int = 0
    num_cached: int = 0
    num_to_compute: int = 0
    admitted_s: float | None = None
    first_token_s: float | None = None
    ended_s: float = 0.0
    is_ended: bool = False
    spans: list[VersionSpan] = field(default_factory=list)

    @property
    def kv_need(self) -> int:
        """KV tokens at its end."""
        return len(self.request.prompt_token_ids) + len(self.tokens)

    @property
    def kv_now(self) -> int:
        """KV tokens that it has."""
        return len(self.request.prompt_token_ids) + self.num_sampled - self.num_to_compute


@dataclass
class _Stretch:
    """Steps of ``step_s`` each that follow each other from ``start_s`` on; each computes ``chunk`` prompt tokens."""

    start_s: float
    step_s: float
    num_steps: int
    chunk: int


@dataclass(frozen=True)
class _Kept:
    attempt_id: str
    version: int
    tokens: tuple[int, ...]


class EmulatedCore:
    """One engine. Time only passes in :meth:`advance`."""

    def __init__(self, model: TimeModel, settings: CoreSettings) -> None:
        self._model = model
        self._settings = settings
        self._waiting: deque[Sequence] = deque()
        self._prefilling: deque[Sequence] = deque()
        self._decoding: dict[str, Sequence] = {}
        self._open: dict[str, Sequence] = {}
        self._deadlines: list[tuple[float, int, Sequence]] = []
        self._num_added = 0
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._kept_tokens = self._reserved_tokens = 0
        self._stretch: _Stretch | None = None
        self._ended: list[Sequence] = []
        self._now_s = 0.0
        self.is_paused = False
        self.prefill_tokens = self.decode_tokens = self.cached_tokens = 0
        self.busy_s = 0.0

    # --- what is seen of it -----------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        """Sequences that have KV."""
        return len(self._prefilling) + len(self._decoding)

    @property
    def num_waiting(self) -> int:
        """Sequences that have none yet."""
        return len(self._waiting)

    @property
    def kv_tokens_in_use(self) -> int:
        """KV set aside for sequences, and kept between two calls."""
        return self._reserved_tokens + self._kept_tokens

    @property
    def streaming(self) -> Iterator[Sequence]:
        """Open sequences whose tokens are wanted as they come."""
        return (one for one in self._open.values() if one.request.stream)

    def using(self, version: int) -> list[Sequence]:
        """Open sequences that sample under a version."""
        return [one for one in self._open.values() if one.version == version]

    def next_event_s(self) -> float | None:
        """When to call :meth:`advance` next; None where nothing will happen by itself."""
        times = [deadline_s for deadline_s, _, _ in self._deadlines[:1]]
        if self._stretch is not None:
            steps = self._stretch.num_steps
            if any(True for _ in self.streaming):
                steps = min(steps, max(1, math.ceil(self._settings.stream_every_s / self._stretch.step_s)))
            times.append(self._stretch.start_s + steps * self._stretch.step_s)
        return min(times, default=None)

    # --- what is done to it -----------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence; it can join at the end of the present step. Call :meth:`advance` to its time before.

        Raises:
            EngineError: it can never fit.
        """
        if sequence.kv_need > self._settings.kv_tokens:
            raise EngineError(
                f"request {sequence.request.request_id}: its {sequence.kv_need} tokens must fit into "
                f"{self._settings.kv_tokens} tokens of KV"
            )
        self._open[sequence.request.request_id] = sequence
        self._waiting.append(sequence)
        self._num_added += 1
        if math.isfinite(sequence.deadline_s):
            heapq.heappush(self._deadlines, (sequence.deadline_s, self._num_added, sequence))
        self._cut()
        self._replan()

    def abort(self, request_id: str) -> None:
        """End a request as cancelled."""
        sequence = self._open.get(request_id)
        if sequence is not None:
            self._end(sequence, FinishReason.CANCELLED)
            self._replan()

    def release(self, attempt_id: str) -> None:
        """Forget the KV that an attempt left."""
        for key in [key for key, kept in self._kept.items() if kept.attempt_id == attempt_id]:
            self._drop_kept(key)

    def pause(self) -> None:
        """Begin no further step."""
        self.is_paused = True
        self._cut()

    def resume(self) -> None:
        """Go on."""
        self.is_paused = False
        self._replan()

    def forget(self, version: int) -> None:
        """Forget the KV of a version."""
        for key in [key for key, kept in self._kept.items() if kept.version == version]:
            self._drop_kept(key)

    def update(self, version: int, kv: KvRule) -> None:
        """Sequences that follow updates sample under ``version`` from their next token on; see ``Engine.update``."""
        for sequence in self._open.values():
            if sequence.request.follows_updates and sequence.version != version:
                self._go_over(sequence, version, kv)
        self._cut()
        self._replan()

    def advance(self, now_s: float) -> list[Sequence]:
        """Let time pass; the sequences that have ended since the last call, in order."""
        while True:
            self._expire()
            stretch = self._stretch
            if stretch is None:
                break
            num_steps = math.floor((now_s - stretch.start_s) / stretch.step_s + _ROUNDING)
            if num_steps < 1:
                break
            self._apply(stretch, min(num_steps, stretch.num_steps))
            if stretch.num_steps == 0:
                self._stretch = None
            self._replan()
        self._now_s = max(self._now_s, now_s)
        self._expire()
        self._replan()
        ended, self._ended = self._ended, []
        return ended

    # --- steps ------------------------------------------------------------------------------------

    def _cut(self) -> None:
        """The batch changes: the stretch ends with the step that is on its way, or now where none is."""
        if self._stretch is not None:
            self._stretch.num_steps = min(self._stretch.num_steps, 1)
            if self._stretch.start_s >= self._now_s:
                self._stretch = None

    def _replan(self) -> None:
        """Between two steps: let in who fits, and plan the next stretch."""
        if self._stretch is not None or self.is_paused:
            return
        self._admit()
        if not self.num_running:
            return
        head = self._prefilling[0] if self._prefilling else None
        chunk, num_steps = 0, _MAX_STRETCH_STEPS
        if head is not None:
            chunk = min(head.num_to_compute, self._settings.prefill_chunk_tokens)
            num_steps = min(num_steps, head.num_to_compute // chunk)
        for one in self._decoding.values():
            num_steps = min(num_steps, len(one.tokens) - one.num_sampled)
        step_s = self._step_s(head, chunk, num_steps)
        self._stretch = _Stretch(self._now_s, step_s, num_steps, chunk)

    def _step_s(self, head: Sequence | None, chunk: int, num_steps: int) -> float:
        """One step in the middle of the stretch. Sequences of one version decode together; versions take turns."""
        by_version: dict[int, list[int]] = {}
        for one in self._decoding.values():
            sums = by_version.setdefault(one.version, [0, 0])
            sums[0] += 1
            sums[1] += one.kv_now + num_steps // 2
        if head is not None:
            by_version.setdefault(head.version, [0, 0])
        step_s = 0.0
        for version, (number, kv_tokens) in by_version.items():
            has_prompt = head is not None and head.version == version
            context_tokens = head.kv_now if head is not None and has_prompt else 0
            step_s += self._model.step_s(number, kv_tokens, chunk if has_prompt else 0, context_tokens)
        return max(step_s, _ROUNDING)

    def _apply(self, stretch: _Stretch, num_steps: int) -> None:
        self._now_s = stretch.start_s + num_steps * stretch.step_s
        stretch.start_s, stretch.num_steps = self._now_s, stretch.num_steps - num_steps
        self.busy_s += num_steps * stretch.step_s
        for one in list(self._decoding.values()):
            one.num_sampled += num_steps
            self.decode_tokens += num_steps
            if one.num_sampled >= len(one.tokens):
                self._end(one, one.reason)
        if stretch.chunk and self._prefilling:
            self._prefill(self._prefilling[0], min(num_steps * stretch.chunk, self._prefilling[0].num_to_compute))

    def _prefill(self, head: Sequence, num_tokens: int) -> None:
        head.num_to_compute -= num_tokens
        self.prefill_tokens += num_tokens
        if head.num_to_compute:
            return
        self._prefilling.popleft()
        self._decoding[head.request.request_id] = head
        # The last step of a prefill gives the distribution of the next token.
        head.num_sampled += 1
        self.decode_tokens += 1
        if head.first_token_s is None:
            head.first_token_s = self._now_s
        if head.num_sampled >= len(head.tokens):
            self._end(head, head.reason)

    # --- sequences --------------------------------------------------------------------------------

    def _admit(self) -> None:
        """In order of arrival; one that does not fit stops all behind it."""
        while self._waiting and self.num_running < self._settings.max_running:
            sequence = self._waiting[0]
            own = self._reusable(sequence)
            if self._reserved_tokens + sequence.kv_need > self._settings.kv_tokens:
                return
            self._drop_kept(sequence.request.sequence_key)
            while self.kv_tokens_in_use + sequence.kv_need > self._settings.kv_tokens:
                self._drop_kept(next(iter(self._kept)))
            self._waiting.popleft()
            self._reserved_tokens += sequence.kv_need
            sequence.admitted_s = self._now_s
            sequence.num_cached = own
            sequence.num_to_compute = len(sequence.request.prompt_token_ids) - own
            sequence.spans = [VersionSpan(start=0, version=sequence.version)]
            self.cached_tokens += own
            self._prefilling.append(sequence)

    def _reusable(self, sequence: Sequence) -> int:
        """Prompt tokens whose KV is there: of the same version, an equal prefix; the last token is always computed."""
        kept = self._kept.get(sequence.request.sequence_key)
        prompt = sequence.request.prompt_token_ids
        if kept is None or kept.version != sequence.version or prompt[: len(kept.tokens)] != kept.tokens:
            return 0
        return min(len(kept.tokens), len(prompt) - 1)

    def _go_over(self, sequence: Sequence, version: int, kv: KvRule) -> None:
        last = sequence.spans[-1] if sequence.spans else None
        oldest = None if last is None else last.version if last.kv_version is None else last.kv_version
        sequence.version = version
        if last is None:
            return
        keeps = kv is KvRule.KEEP and sequence.kv_now > 0
        span = VersionSpan(start=sequence.num_sampled, version=version, kv_version=oldest if keeps else None)
        if last.start == span.start:
            sequence.spans.pop()
        sequence.spans.append(span)
        if kv is KvRule.RECOMPUTE:
            sequence.num_to_compute = len(sequence.request.prompt_token_ids) + sequence.num_sampled
            if self._decoding.pop(sequence.request.request_id, None) is not None:
                self._prefilling.append(sequence)

    def _expire(self) -> None:
        while self._deadlines and (self._deadlines[0][0] <= self._now_s or self._deadlines[0][2].is_ended):
            _, _, sequence = heapq.heappop(self._deadlines)
            if not sequence.is_ended:
                waits = sequence.admitted_s is None
                self._end(sequence, FinishReason.QUEUE_TIMEOUT if waits else FinishReason.GENERATION_TIMEOUT)

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        request = sequence.request
        del self._open[request.request_id]
        sequence.reason, sequence.is_ended, sequence.ended_s = reason, True, self._now_s
        self._ended.append(sequence)
        if sequence.admitted_s is None:
            self._waiting.remove(sequence)
            return
        if self._decoding.pop(request.request_id, None) is None and sequence in self._prefilling:
            is_head = self._prefilling[0] is sequence
            self._prefilling.remove(sequence)
            if is_head and self._stretch is not None:
                self._stretch.chunk = 0
        self._reserved_tokens -= sequence.kv_need
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            # The last token was sampled but never fed back, so it has no KV.
            self._keep(sequence)
        self._cut()

    def _keep(self, sequence: Sequence) -> None:
        request = sequence.request
        if sequence.spans[-1].kv_version is not None:
            return
        tokens = (*request.prompt_token_ids, *sequence.tokens[: sequence.num_sampled - 1])
        self._drop_kept(request.sequence_key)
        self._kept[request.sequence_key] = _Kept(request.attempt_id, sequence.version, tokens)
        self._kept_tokens += len(tokens)

    def _drop_kept(self, sequence_key: str) -> None:
        kept = self._kept.pop(sequence_key, None)
        if kept is not None:
            self._kept_tokens -= len(kept.tokens)
