"""Decides what an engine computes next. Knows no tensors and no clock: the time is passed in.

::

    add --> waiting --admit: projected KV fits--> running: prefill in chunks, then one token a step
             |  ^                                    |  |
             |  +-- evict: no space, or new weights -+  |
             |                                          |
             |  queue_timeout, cancelled                |  stop, length, generation_timeout, cancelled, engine_error
             +------------------------------------------+--> finished

One step is ``plan`` (batches, one per policy version), then the forward passes, then ``commit`` for each batch.

A projection may be wrong. When the space runs out, the running sequence of the youngest attempt gives up all of its
KV, and so on until the others can go on. It keeps its tokens and their log-probabilities, waits before those that came
after it, and computes its KV again when it is admitted. The oldest is never evicted, and any single sequence fits, so
there is always one that comes to its end.
"""

import math
from collections import Counter
from dataclasses import dataclass, field, replace

import msgspec
import xxhash

from steelyard.errors import EngineError
from steelyard.inference.conversations import Conversations
from steelyard.inference.engine import KvRule
from steelyard.inference.forecast import AnswerForecast
from steelyard.inference.kv_blocks import Admitted, BlockTable, SequenceInfo, Wait
from steelyard.types import FinishReason, GenerateRequest, GenerateResult, TokenChunk, VersionSpan

_MAX_MOVES_PER_STEP = 2


class WorkItem(msgspec.Struct, frozen=True, gc=False):
    """Part of one forward pass: ``token_ids`` of one sequence, the first at position ``start``.

    Where ``is_sampled``, the logits after the last of them give one new token, drawn with the uniform number that
    belongs to (``seed``, position of the new token).
    """

    sequence_id: str
    token_ids: tuple[int, ...]
    start: int
    is_sampled: bool
    temperature: float
    top_p: float
    seed: int


class Batch(msgspec.Struct, frozen=True):
    """Items of one forward pass, all of one version."""

    version: int
    items: tuple[WorkItem, ...]


class Sampled(msgspec.Struct, frozen=True):
    """What a batch gave: one entry for each of its sampled items, in their order."""

    token_ids: list[int]
    logprobs: list[float]
    kept_logmass: list[float]


@dataclass(slots=True)
class SequenceState:
    """One request on its way through the engine.

    ``info.prompt`` are the tokens that it was admitted with last: its prompt and, after an eviction, what it had
    sampled by then. ``num_computed`` of its tokens have their KV in the cache, ``num_held`` have space there.
    ``kv_version``: see :class:`VersionSpan`. ``is_moved``: it lost its place to new weights, not to another sequence.
    """

    request: GenerateRequest
    info: SequenceInfo
    seed: int
    stop_token_ids: frozenset[int]
    added_at_s: float
    arrival: int
    num_held: int = 0
    kv_version: int | None = None
    is_moved: bool = False
    admitted_at_s: float | None = None
    first_token_at_s: float | None = None
    num_computed: int = 0
    num_cached: int = 0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    kept_logmass: list[float] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)

    @property
    def is_prefilling(self) -> bool:
        """Whether some of what it was admitted with is still to be computed."""
        return self.num_computed < len(self.info.prompt)

    @property
    def num_known(self) -> int:
        """Tokens of prompt and answer so far."""
        return len(self.request.prompt_token_ids) + len(self.token_ids)

    def note_span(self) -> None:
        """The next token starts a new span, unless it is sampled like the one before it."""
        version, kv_version = self.info.version, self.kv_version
        if not self.spans or (self.spans[-1].version, self.spans[-1].kv_version) != (version, kv_version):
            self.spans.append(VersionSpan(start=len(self.token_ids), version=version, kv_version=kv_version))


@dataclass(frozen=True, slots=True)
class Finished:
    """A request that has ended, why and when."""

    state: SequenceState
    reason: FinishReason
    ended_at_s: float
    detail: str = ""


class Scheduler:
    """Waiting and running sequences.

    Args:
        blocks: the key-value cache's bookkeeping.
        max_running: sequences that are computed at once.
        prefill_chunk_tokens: prompt tokens that one step computes at most, over all sequences.
        step_tokens: a step costs as much as computing this many prompt tokens, whatever else is in it.
    """

    def __init__(
        self, blocks: BlockTable, *, max_running: int, prefill_chunk_tokens: int, step_tokens: int = 16
    ) -> None:
        if min(max_running, prefill_chunk_tokens, step_tokens) < 1:
            raise EngineError(
                f"max_running, prefill_chunk_tokens and step_tokens must be >= 1, got {max_running}, "
                f"{prefill_chunk_tokens} and {step_tokens}"
            )
        self._blocks = blocks
        self._max_running = max_running
        self._chunk_tokens = prefill_chunk_tokens
        self._step_tokens = step_tokens
        self._waiting: dict[str, SequenceState] = {}
        self._running: dict[str, SequenceState] = {}
        self._using: Counter[int] = Counter()
        self._finished: list[Finished] = []
        self._next_deadline_s = math.inf
        self._forecast = AnswerForecast()
        self._conversations = Conversations()
        self._num_added = 0
        self.prefill_tokens = 0
        self.decode_tokens = 0
        self.cached_tokens = 0
        self.num_evicted = 0
        self.evicted_tokens = 0

    # --- reading ----------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        """Requests that are not yet admitted."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests that are being computed."""
        return len(self._running)

    @property
    def next_deadline_s(self) -> float:
        """No request expires before this time; infinite where there is none."""
        return self._next_deadline_s

    def num_using(self, version: int) -> int:
        """Requests, waiting and running, that need a version."""
        return self._using[version]

    def num_pinned(self, version: int) -> int:
        """Those of them that need it to the end."""
        states = (*self._waiting.values(), *self._running.values())
        return sum(state.info.version == version and not state.request.follows_updates for state in states)

    # --- what comes from outside ------------------------------------------------------------------

    def add(self, request: GenerateRequest, now_s: float, version: int | None = None) -> None:
        """Queue a request, to be sampled by ``version``, or by its own where that is None.

        Raises:
            EngineError: it can never be served, or its id is in use.
        """
        self._check(request)
        prompt = request.prompt_token_ids
        version = request.policy_version if version is None else version
        self._num_added += 1
        rank, turn = self._conversations.begin_turn(request.attempt_id, request.sequence_key)
        info = SequenceInfo(
            sequence_id=request.request_id,
            sequence_key=request.sequence_key,
            attempt_id=request.attempt_id,
            version=version,
            prompt=prompt,
            projected_tokens=len(prompt) + request.sampling.max_tokens,
            max_tokens=len(prompt) + request.sampling.max_tokens,
            chain=self._blocks.chain(prompt),
            rank=rank,
            turn=turn,
        )
        self._waiting[request.request_id] = SequenceState(
            request=request,
            info=info,
            seed=seed_of(request),
            stop_token_ids=frozenset(request.stop_token_ids),
            added_at_s=now_s,
            arrival=self._num_added,
        )
        self._using[version] += 1
        self._next_deadline_s = min(self._next_deadline_s, request.deadline_at_s)

    def abort(self, request_id: str, now_s: float) -> None:
        """End a request as ``cancelled``; one that is not here is ignored."""
        state = self._waiting.get(request_id) or self._running.get(request_id)
        if state is not None:
            self._finish(state, FinishReason.CANCELLED, now_s)

    def fail(self, request_ids: list[str], now_s: float, detail: str) -> None:
        """End requests as ``engine_error``; those that are not here are ignored."""
        for request_id in request_ids:
            state = self._waiting.get(request_id) or self._running.get(request_id)
            if state is not None:
                self._finish(state, FinishReason.ENGINE_ERROR, now_s, detail)

    def fail_all(self, now_s: float, detail: str) -> None:
        """End all requests as ``engine_error``."""
        self.fail([*self._waiting, *self._running], now_s, detail)

    def release(self, attempt_id: str) -> None:
        """The attempt has ended; nothing of it is retained any longer."""
        self._conversations.release(attempt_id)
        self._blocks.release_attempt(attempt_id)

    def follow(self, version: int, kv: KvRule) -> None:
        """Requests that follow updates go on under ``version``.

        Their tokens so far stay. Where the KV of a running one is kept, nobody else may use it any longer: it belongs
        to no version. Where it is not, the sequence goes back to the queue, so that those with the same beginning
        share its computing again.
        """
        followers = [state for state in self._running.values() if state.request.follows_updates]
        for state in followers:
            if kv is KvRule.KEEP and state.num_computed:
                oldest = state.info.version if state.kv_version is None else state.kv_version
                state.kv_version = oldest
                self._blocks.set_apart(state.info.sequence_id, version)
            else:
                self._evict(state)
                state.is_moved = True
        for state in (*followers, *(held for held in self._waiting.values() if held.request.follows_updates)):
            self._using[state.info.version] -= 1
            self._using[version] += 1
            state.info = replace(state.info, version=version)

    def expire(self, now_s: float) -> None:
        """End requests whose deadline has passed: ``queue_timeout`` if never admitted, else ``generation_timeout``."""
        if now_s < self._next_deadline_s:
            return
        for state in (*self._waiting.values(), *self._running.values()):
            if state.request.deadline_at_s <= now_s:
                never_ran = state.admitted_at_s is None
                reason = FinishReason.QUEUE_TIMEOUT if never_ran else FinishReason.GENERATION_TIMEOUT
                self._finish(state, reason, now_s)
        deadlines = [held.request.deadline_at_s for held in (*self._waiting.values(), *self._running.values())]
        self._next_deadline_s = min(deadlines, default=math.inf)

    def take_finished(self) -> list[Finished]:
        """Requests that have ended since the last call."""
        finished, self._finished = self._finished, []
        return finished

    # --- one step ---------------------------------------------------------------------------------

    def plan(self, now_s: float) -> list[Batch]:
        """What to compute now: one batch per version, lowest version first; none where there is nothing to do."""
        self.expire(now_s)
        self._make_room()
        self._admit(now_s)
        self._blocks.compact(_MAX_MOVES_PER_STEP, lambda sequence_id: self._running[sequence_id].num_computed)
        by_version: dict[int, list[WorkItem]] = {}
        budget = self._chunk_tokens
        for state in self._running.values():
            if state.is_prefilling:
                num_tokens = min(budget, len(state.info.prompt) - state.num_computed)
                if num_tokens == 0:
                    continue
                budget -= num_tokens
                item = _prefill_item(state, num_tokens)
            else:
                item = _decode_item(state)
            by_version.setdefault(state.info.version, []).append(item)
        return [Batch(version, tuple(items)) for version, items in sorted(by_version.items())]

    def commit(self, batch: Batch, sampled: Sampled, now_s: float) -> list[TokenChunk]:
        """Apply the outcome of a batch; returns the new tokens of streaming requests."""
        chunks = []
        position = 0
        for item in batch.items:
            state = self._running[item.sequence_id]
            state.num_computed += len(item.token_ids)
            if item.start < len(state.info.prompt):
                self.prefill_tokens += len(item.token_ids)
                self._blocks.mark_ready(item.sequence_id, state.num_computed)
            if not item.is_sampled:
                continue
            token_id, logprob = sampled.token_ids[position], sampled.logprobs[position]
            kept_logmass = sampled.kept_logmass[position]
            position += 1
            if not (math.isfinite(logprob) and math.isfinite(kept_logmass)):
                detail = f"log-probability and kept mass must be finite, got {logprob} and {kept_logmass}"
                self._finish(state, FinishReason.ENGINE_ERROR, now_s, detail)
                continue
            self._append(state, token_id, logprob, kept_logmass, now_s)
            if state.request.stream:
                chunks.append(TokenChunk(request_id=item.sequence_id, token_ids=(token_id,)))
        return chunks

    # --- private ----------------------------------------------------------------------------------

    def _check(self, request: GenerateRequest) -> None:
        name = request.request_id
        num_prompt, num_new = len(request.prompt_token_ids), request.sampling.max_tokens
        if name in self._waiting or name in self._running:
            raise EngineError(f"request {name}: request_id must be new, but a request of this id is still open")
        if num_prompt < 1 or num_new < 1:
            raise EngineError(
                f"request {name}: prompt_token_ids and max_tokens must be >= 1, got {num_prompt} and {num_new}"
            )
        if not self._blocks.can_ever_hold(num_prompt + num_new):
            limit = min(self._blocks.row_tokens, self._blocks.capacity_tokens)
            raise EngineError(
                f"request {name}: prompt tokens + max_tokens must be <= {limit}, got {num_prompt} + {num_new}"
            )
        sampling = request.sampling
        if not (sampling.temperature >= 0.0 and math.isfinite(sampling.temperature)):
            raise EngineError(f"request {name}: temperature must be finite and >= 0, got {sampling.temperature}")
        if not 0.0 < sampling.top_p <= 1.0:
            raise EngineError(f"request {name}: top_p must be > 0 and <= 1, got {sampling.top_p}")

    def _make_room(self) -> None:
        """Give each running sequence the space that its next token needs, and evict where there is not enough."""
        for state in list(self._running.values()):
            while state.num_known > state.num_held and state.info.sequence_id in self._running:
                state.num_held = self._blocks.grow(state.info.sequence_id, state.num_known)
                if not state.num_held:
                    self._evict(max(self._running.values(), key=lambda held: (held.info.rank, held.arrival)))

    def _admit(self, now_s: float) -> None:
        """Admit conversations whose KV is retained before others, and older attempts before younger ones.

        Were new ones first, they would push out what the others come back for, and all would prefill again and
        again. No space stops admission, so that a long request is not passed for ever.
        """
        if len(self._running) >= self._max_running:
            return
        anew = {state.arrival: not self._blocks.continues(state.info) for state in self._waiting.values()}
        num_anew = sum(anew.values())
        # Sorting keeps the order of arrival among equals.
        for state in sorted(self._waiting.values(), key=lambda held: (anew[held.arrival], held.info.rank)):
            if len(self._running) >= self._max_running:
                return
            state.info = replace(state.info, projected_tokens=self._projection(state))
            is_eager = state.is_moved or self._is_worth_evicting(state)
            growth = self._conversations.growth(
                num_anew - anew[state.arrival], self._blocks.capacity_tokens, self._blocks.row_tokens
            )
            admitted = self._blocks.admit(state.info, is_eager, growth)
            if admitted is Wait.NO_SPACE:
                return
            if isinstance(admitted, Admitted):
                num_anew -= anew[state.arrival]
                self._start(state, admitted.num_cached, now_s)

    def _is_worth_evicting(self, state: SequenceState) -> bool:
        """Whether a sequence gains more by running now than it costs to compute again what it pushes out.

        Each of its tokens shares a step with those that run, and saves its share of that step's fixed cost. What it
        pushes out is taken to be as long as it is, and itself to be pushed out next. So an idle engine never waits for
        somebody who may be gone for good.
        """
        again_tokens = 2 * state.info.projected_tokens
        new_tokens = state.info.projected_tokens - state.num_known
        return len(self._running) * again_tokens < self._step_tokens * new_tokens

    def _projection(self, state: SequenceState) -> int:
        """Tokens that a sequence is projected to have in the end."""
        num_prompt, num_asked = len(state.request.prompt_token_ids), state.request.sampling.max_tokens
        num_new = self._forecast.tokens(num_asked)
        return num_prompt + (num_new if num_new > len(state.token_ids) else num_asked)

    def _start(self, state: SequenceState, num_cached: int, now_s: float) -> None:
        del self._waiting[state.info.sequence_id]
        self._running[state.info.sequence_id] = state
        state.num_computed = num_cached
        state.num_held = len(state.info.prompt)
        state.is_moved = False
        if state.admitted_at_s is None:
            state.admitted_at_s = now_s
            state.num_cached = num_cached
        self.cached_tokens += num_cached

    def _append(self, state: SequenceState, token_id: int, logprob: float, kept_logmass: float, now_s: float) -> None:
        if state.first_token_at_s is None:
            state.first_token_at_s = now_s
        state.note_span()
        state.token_ids.append(token_id)
        state.logprobs.append(logprob)
        state.kept_logmass.append(kept_logmass)
        self.decode_tokens += 1
        if token_id in state.stop_token_ids:
            self._finish(state, FinishReason.STOP, now_s)
        elif len(state.token_ids) >= state.request.sampling.max_tokens:
            self._finish(state, FinishReason.LENGTH, now_s)

    def _evict(self, state: SequenceState) -> None:
        """Put a running sequence back into the queue, at the place of its attempt: its KV goes, its tokens stay."""
        sequence_id = state.info.sequence_id
        self._blocks.discard(sequence_id)
        del self._running[sequence_id]
        known = (*state.request.prompt_token_ids, *state.token_ids)
        state.info = replace(state.info, prompt=known, chain=self._blocks.chain(known))
        self.num_evicted += 1
        self.evicted_tokens += state.num_computed
        state.num_computed = state.num_held = 0
        state.kv_version = None
        self._waiting[sequence_id] = state

    def _finish(self, state: SequenceState, reason: FinishReason, now_s: float, detail: str = "") -> None:
        sequence_id = state.info.sequence_id
        self._using[state.info.version] -= 1
        if self._waiting.pop(sequence_id, None) is None:
            del self._running[sequence_id]
            if reason in (FinishReason.STOP, FinishReason.LENGTH):
                # The last token was sampled but never fed back, so it has no KV.
                request = state.request
                self._forecast.note(len(state.token_ids), request.sampling.max_tokens)
                self._conversations.end_turn(request.attempt_id, request.sequence_key, state.num_known)
                self._blocks.retain(sequence_id, (*state.request.prompt_token_ids, *state.token_ids[:-1]))
            else:
                self._blocks.discard(sequence_id)
        self._finished.append(Finished(state, reason, now_s, detail))


def seed_of(request: GenerateRequest) -> int:
    """Seed of a request's random numbers: its own if given, else one drawn from its (random) id."""
    if request.sampling.seed is not None:
        return request.sampling.seed & 0xFFFF_FFFF_FFFF_FFFF
    return int(xxhash.xxh3_64_intdigest(request.request_id.encode()))


def result_of(finished: Finished, *, replica_id: str, load_id: str) -> GenerateResult:
    """The record that goes to the caller. Durations in seconds; never-reached phases are 0."""
    state = finished.state
    admitted_at_s = finished.ended_at_s if state.admitted_at_s is None else state.admitted_at_s
    first_token_at_s = finished.ended_at_s if state.first_token_at_s is None else state.first_token_at_s
    return GenerateResult(
        request_id=state.info.sequence_id,
        token_ids=tuple(state.token_ids),
        logprobs=tuple(state.logprobs),
        kept_logmass=tuple(state.kept_logmass),
        version_spans=tuple(state.spans),
        finish_reason=finished.reason,
        replica_id=replica_id,
        load_id=load_id,
        num_cached_tokens=state.num_cached,
        queued_s=admitted_at_s - state.added_at_s,
        prefill_s=first_token_at_s - admitted_at_s,
        decode_s=finished.ended_at_s - first_token_at_s,
        detail=finished.detail,
    )


def _prefill_item(state: SequenceState, num_tokens: int) -> WorkItem:
    start, end = state.num_computed, state.num_computed + num_tokens
    sampling = state.request.sampling
    return WorkItem(
        state.info.sequence_id, state.info.prompt[start:end], start, end == len(state.info.prompt),
        sampling.temperature, sampling.top_p, state.seed,
    )  # fmt: skip


def _decode_item(state: SequenceState) -> WorkItem:
    sampling = state.request.sampling
    return WorkItem(
        state.info.sequence_id, (state.token_ids[-1],), state.num_computed, True,
        sampling.temperature, sampling.top_p, state.seed,
    )  # fmt: skip
