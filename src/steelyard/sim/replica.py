"""One replica on virtual time: continuous batching whose steps take what the cost model says.

Steps are not simulated one by one. Between two changes of the batch all steps are alike but for the KV that grows, so
a *span* of steps is one event: it ends with the first sequence that ends, with a prompt that is computed, or when the
KV has grown by a few per cent, and the time of a step is taken at the span's middle. What arrives meanwhile joins at
the end of the step under way, as in an engine. A span costs O(log n), whatever the batch.

A step computes ``chunk_tokens`` of waiting prompts beside the batch, in their order: many short ones at once, or a part
of a long one.

KV is held for running sequences and, while there is room, for attempts between two turns (least recently used go
first). A running batch that outgrows the memory puts back its newest sequence whole; it is computed again later, its
tokens kept. A call is let in while the growth that running ones are expected to have still fits.
"""

import heapq
import math
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from steelyard.allocation.serving_cost import ServingCost, StepWork
from steelyard.errors import InputError
from steelyard.sim.kernel import Kernel, Timer
from steelyard.sim.padded_reads import padded_tokens, place

_KV_GROWTH = 0.04
"""A span ends when the KV that is read has grown by this share; the time of its steps is off by half of it at most."""

_MEMORY = 0.02
"""Weight of the newest call in the mean length that admission reckons with."""


@dataclass(eq=False, slots=True, kw_only=True)
class SimCall:
    """One model call. ``prompt_tokens`` is the whole context; ``on_done`` is called when the last token is sampled,
    ``on_lost``, with the number of sampled tokens, by whoever evicts it.
    """

    attempt_id: str
    prompt_tokens: int
    new_tokens: int
    on_done: Callable[[], None]
    on_lost: Callable[[int], None] | None = None
    num_sampled: int = 0
    to_prefill: int = 0
    started: int = 0
    order: int = 0
    is_over: bool = False

    @property
    def kv_tokens(self) -> int:
        """Tokens whose KV it has once its prefill is done."""
        return self.prompt_tokens + self.num_sampled


@dataclass(slots=True)
class ReplicaTotals:
    """Sums since the start.

    ``cached_tokens``: of prompts, not computed again; ``recomputed_tokens``: after being put back.
    """

    prefill_tokens: int = 0
    decode_tokens: int = 0
    cached_tokens: int = 0
    recomputed_tokens: int = 0
    num_put_back: int = 0
    busy_s: float = 0.0


@dataclass(slots=True)
class _Span:
    started_s: float
    step_s: float
    num_steps: int
    prefill_per_step: int
    timer: Timer


@dataclass(eq=False)
class SimReplica:
    """A replica.

    Args:
        max_running: sequences in a batch.
        chunk_tokens: tokens of prompts that a step computes beside the batch, over all of them.
        kv_tokens_limit: of its KV memory, where an engine sets it; else what fits beside the weights.
        block_tokens: a kept prefix is used again in whole blocks of so many tokens.
        range_tokens: see :class:`~steelyard.allocation.engine_limits.EngineLimits`.
    """

    name: str
    kernel: Kernel
    cost: ServingCost
    max_running: int = 256
    chunk_tokens: int = 2048
    kv_tokens_limit: int | None = None
    block_tokens: int = 1
    range_tokens: int = 0
    totals: ReplicaTotals = field(default_factory=ReplicaTotals)

    def __post_init__(self) -> None:
        fits = self.cost.kv_capacity_tokens
        self.kv_capacity_tokens = fits if self.kv_tokens_limit is None else min(fits, self.kv_tokens_limit)
        self._waiting: deque[SimCall] = deque()
        self._prefilling: dict[SimCall, None] = {}
        self._prefill_kv = self._prefill_left = 0
        self._running: dict[SimCall, None] = {}
        self._ends: list[tuple[int, int, SimCall]] = []
        self._kept: OrderedDict[str, int] = OrderedDict()
        self._kept_tokens = 0
        self._running_kv = 0
        self._num_steps = 0
        self._cancelled: list[SimCall] = []
        self._updates: deque[tuple[float, Callable[[], None], bool]] = deque()
        self._is_updating = False
        self._mean_new_tokens = 0.0
        self._order = 0
        self._span: _Span | None = None

    @property
    def num_running(self) -> int:
        """Sequences in the batch, those whose prompts are being computed included."""
        return len(self._running) + len(self._prefilling)

    @property
    def num_waiting(self) -> int:
        """Calls that wait for room."""
        return len(self._waiting)

    @property
    def kv_tokens(self) -> int:
        """Tokens in the KV memory, kept prefixes included."""
        return self._running_kv + self._prefill_kv + self._kept_tokens

    def submit(self, call: SimCall) -> None:
        """Take a call.

        Raises:
            InputError: its context can never fit.
        """
        whole = call.prompt_tokens + call.new_tokens
        if whole > self.kv_capacity_tokens:
            raise InputError(
                f"a call of {whole} tokens must fit into the KV memory of {self.name}: {self.kv_capacity_tokens} tokens"
            )
        self._waiting.append(call)
        self._interrupt()

    def cancel(self, call: SimCall) -> None:
        """End a call without its result; its KV is free after the step under way."""
        if call.is_over:
            return
        call.is_over = True
        if call in self._running or call in self._prefilling:
            self._cancelled.append(call)
            self._interrupt()
        else:
            self._waiting.remove(call)

    def update(self, pause_s: float, on_done: Callable[[], None], *, recompute: bool) -> None:
        """Stand still for ``pause_s`` after the step under way, while weights change; then ``on_done``, then go on.

        With ``recompute`` all KV is that of other weights: running sequences compute theirs again, what is kept goes.
        One that comes while another is under way follows it.
        """
        self._updates.append((pause_s, on_done, recompute))
        self._interrupt()

    def evict(self) -> tuple[SimCall, ...]:
        """The replica is gone: every call that is open, ended without a result."""
        open_calls = (*self._waiting, *self._running, *self._prefilling)
        for call in open_calls:
            call.is_over = True
            if call in self._running:
                call.num_sampled = self._num_steps - call.started
        if self._span is not None:
            self._span.timer.cancel()
        self._span = None
        self._waiting.clear()
        self._running.clear()
        self._prefilling.clear()
        self._kept.clear()
        self._kept_tokens = self._running_kv = self._prefill_kv = self._prefill_left = 0
        return open_calls

    def release(self, attempt_id: str) -> None:
        """The attempt has ended or moved: what is kept of it goes."""
        self._kept_tokens -= self._kept.pop(attempt_id, 0)

    def kept_tokens(self, attempt_id: str) -> int:
        """Tokens of an attempt's prefix that need not be computed again here."""
        return self._kept.get(attempt_id, 0)

    def _interrupt(self) -> None:
        """Let the batch change at the end of the step under way."""
        span = self._span
        if span is None:
            self._plan()
            return
        done = int((self.kernel.now_s() - span.started_s) / span.step_s)
        if done + 1 < span.num_steps:
            span.timer.cancel()
            span.num_steps = done + 1
            ends_s = max(self.kernel.now_s(), span.started_s + span.num_steps * span.step_s)
            span.timer = self.kernel.at(ends_s, self._on_span_end)

    def _on_span_end(self) -> None:
        span = self._span
        if span is None:
            raise AssertionError("a span that ended must have begun")
        self._span = None
        self.totals.busy_s += span.num_steps * span.step_s
        self._num_steps += span.num_steps
        self._running_kv += span.num_steps * len(self._running)
        self.totals.decode_tokens += span.num_steps * len(self._running)
        self._compute_prompts(span.num_steps * span.prefill_per_step)
        self._drop_cancelled()
        self._finish_ended()
        self._plan()

    def _compute_prompts(self, num_tokens: int) -> None:
        """So many tokens of the prompts at the front."""
        for call in tuple(self._prefilling) if num_tokens else ():
            computed = min(call.to_prefill, num_tokens)
            num_tokens -= computed
            call.to_prefill -= computed
            self._prefill_left -= computed
            self.totals.prefill_tokens += computed
            if call.to_prefill == 0:
                self._begin_decoding(call)
            if num_tokens == 0:
                return

    def _begin_decoding(self, call: SimCall) -> None:
        """The step that ends a prompt samples its first token."""
        self._stop_prefilling(call)
        call.num_sampled += 1
        self.totals.decode_tokens += 1
        call.started = self._num_steps - call.num_sampled
        self._running[call] = None
        self._running_kv += call.kv_tokens
        self._order += 1
        call.order = self._order
        heapq.heappush(self._ends, (call.started + call.new_tokens, self._order, call))

    def _drop_cancelled(self) -> None:
        for call in self._cancelled:
            if call in self._running:
                self._stop_running(call)
            elif call in self._prefilling:
                self._stop_prefilling(call)
            elif call in self._waiting:
                self._waiting.remove(call)
        self._cancelled.clear()

    def _stop_prefilling(self, call: SimCall) -> None:
        del self._prefilling[call]
        self._prefill_kv -= call.kv_tokens
        self._prefill_left -= call.to_prefill

    def _stop_running(self, call: SimCall) -> None:
        del self._running[call]
        call.num_sampled = self._num_steps - call.started
        self._running_kv -= call.kv_tokens

    def _finish_ended(self) -> None:
        ended = list[SimCall]()
        while self._ends and (self._ends[0][0] <= self._num_steps or not self._is_current(self._ends[0])):
            entry = heapq.heappop(self._ends)
            if self._is_current(entry):
                ended.append(entry[2])
        for call in ended:
            self._stop_running(call)
            call.is_over = True
            self._mean_new_tokens += (call.new_tokens - self._mean_new_tokens) * _MEMORY
            self._keep(call.attempt_id, call.kv_tokens)
        for call in ended:
            call.on_done()

    def _is_current(self, entry: tuple[int, int, SimCall]) -> bool:
        """Whether it speaks of the batch as it is: a sequence that was put back and came again has a later entry."""
        _, order, call = entry
        return call in self._running and call.order == order

    def _keep(self, attempt_id: str, num_tokens: int) -> None:
        self.release(attempt_id)
        self._kept[attempt_id] = num_tokens
        self._kept_tokens += num_tokens

    def _make_room(self, num_tokens: int) -> bool:
        """Whether ``num_tokens`` more fit, after kept prefixes have gone as needed."""
        room = self.kv_capacity_tokens - self._running_kv - self._prefill_kv - num_tokens
        while self._kept_tokens > room and self._kept:
            _, freed = self._kept.popitem(last=False)
            self._kept_tokens -= freed
        return self._kept_tokens <= room

    def _admit(self) -> None:
        """Begin with waiting calls, in order, until a step is full or one does not fit beside the batch's growth."""
        while self._waiting and self._prefill_left < self.chunk_tokens and self.num_running < self.max_running:
            call = self._waiting[0]
            kept = self._kept.pop(call.attempt_id, 0)
            self._kept_tokens -= kept
            # Those that run have, on average, half of their tokens still to come, and a token each at the least: who is
            # let in must not be put back before it has sampled.
            num_running = self.num_running
            growth = max(1.0, self._mean_new_tokens / 2) * (num_running + 1) if num_running else 1.0
            if not self._make_room(call.kv_tokens + math.ceil(growth)):
                if kept:
                    self._keep(call.attempt_id, kept)
                return
            self._waiting.popleft()
            self._begin_prefilling(call, min(kept - kept % self.block_tokens, call.kv_tokens - 1))

    def _begin_prefilling(self, call: SimCall, reused: int) -> None:
        call.to_prefill = call.kv_tokens - reused
        if call.num_sampled:
            self.totals.recomputed_tokens += call.to_prefill
        else:
            self.totals.cached_tokens += reused
        self._prefilling[call] = None
        self._prefill_kv += call.kv_tokens
        self._prefill_left += call.to_prefill

    def _put_back(self) -> None:
        """Take sequences out, the newest first, until the batch can grow by a step."""
        while self._running and not self._make_room(len(self._running)):
            if self._prefilling:
                call = next(reversed(self._prefilling))
                self._stop_prefilling(call)
            elif len(self._running) > 1:
                call = next(reversed(self._running))
                self._stop_running(call)
            else:
                return
            self._waiting.appendleft(call)
            self.totals.num_put_back += 1

    def _plan(self) -> None:
        """Begin the next span."""
        if self._span is not None or self._is_updating:
            return
        if self._updates:
            self._begin_update()
            return
        self._put_back()
        self._admit()
        num_running = len(self._running)
        if not num_running and not self._prefilling:
            return
        num_steps = self._span_steps()
        self._make_room(num_running * num_steps)
        grown = (self._read_tokens() if self.range_tokens else self._running_kv) + num_running * num_steps / 2
        chunk, pairs, num_ends = self._prompt_work(num_steps)
        work = StepWork(
            num_decoding=num_running,
            kv_tokens=grown,
            prefill_tokens=chunk,
            prefill_pairs=pairs,
            num_prompts=num_ends,
        )
        step_s = self.cost.step_s(work)
        timer = self.kernel.after(num_steps * step_s, self._on_span_end)
        self._span = _Span(self.kernel.now_s(), step_s, num_steps, chunk, timer)

    def _begin_update(self) -> None:
        pause_s, on_done, recompute = self._updates.popleft()
        self._is_updating = True

        def end() -> None:
            self._is_updating = False
            if recompute:
                self._forget_kv()
            on_done()
            self._plan()

        self.kernel.after(pause_s, end)

    def _forget_kv(self) -> None:
        self._kept.clear()
        self._kept_tokens = 0
        for call in reversed((*self._running, *self._prefilling)):
            if call in self._running:
                self._stop_running(call)
            else:
                self._stop_prefilling(call)
            self._waiting.appendleft(call)

    def _prompt_work(self, num_steps: int) -> tuple[int, float, int]:
        """Of one step at the middle of the span: tokens of prompts, the context before them in sum, prompts that end.

        A step that ends no prompt computes the output of one token all the same.
        """
        left, pairs, num_ends = self.chunk_tokens, 0.0, 0
        for call in self._prefilling:
            part = min(call.to_prefill, left)
            before = call.kv_tokens - call.to_prefill + (num_steps - 1) * part / 2
            pairs += part * (before + (part + 1) / 2)
            num_ends += part == call.to_prefill
            left -= part
            if left == 0:
                break
        chunk = self.chunk_tokens - left
        return chunk, pairs, max(num_ends, min(chunk, 1))

    def _read_tokens(self) -> int:
        """Tokens of KV that a step reads now, where what is read together is padded."""
        running = sorted(self._running, key=lambda call: place(call.order))
        lengths = [call.prompt_tokens + self._num_steps - call.started for call in running]
        return padded_tokens(lengths, len(self._kept), self.range_tokens)

    def _span_steps(self) -> int:
        limits = list[int]()
        if self._prefilling:
            # While a long prompt fills whole steps they are alike; one that it shares with others stands alone.
            limits.append(max(1, next(iter(self._prefilling)).to_prefill // self.chunk_tokens))
        if self._running:
            num_running = len(self._running)
            while not self._is_current(self._ends[0]):
                heapq.heappop(self._ends)
            free = self.kv_capacity_tokens - self.kv_tokens + self._kept_tokens
            limits += [
                self._ends[0][0] - self._num_steps,
                max(1, math.ceil(self._running_kv * _KV_GROWTH / num_running)),
                max(1, free // num_running),
            ]
        return max(1, min(limits))
