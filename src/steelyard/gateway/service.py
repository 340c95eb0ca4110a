"""The gateway's core: a chat request in, prompt tokens to the engine, a recorded turn, a reply out.

::

    chat(attempt_id, ChatRequest)                     complete(attempt_id, text or token ids)
        binding of the attempt  -> version, sampling, context, deadline
        recorded turn to extend -> prompt tokens (renderer)
        room in the context     -> or the answer "context full"
        engine                  -> tokens, log-probabilities, versions, checked
        recorder                -> Turn in the trace store, tokens in the ledger
        parser                  -> content and tool calls -> reply

Which sampling is used: ``temperature`` and ``top_p`` are the attempt's binding's, whatever the request says,
since the loss needs the ones that were planned; ``max_tokens`` is the smallest of request, binding and room;
``seed`` is derived from the binding's seed, or else from the request's and the attempt id, and from the number
of the call, so that siblings differ although their harness asks for one seed. The recorded sampling is what was used.
"""

import math
from collections.abc import Callable

import msgspec
import xxhash

from steelyard.clock import Clock
from steelyard.errors import InputError, Refused, SteelyardError
from steelyard.gateway.capability import AttemptDirectory
from steelyard.gateway.engine_call import EngineCaller, Generator, OnPieces, cut_at_stop, shown_tokens
from steelyard.gateway.planning import Planned, TextRequest, plan_chat, plan_text
from steelyard.gateway.recorder import AttemptLog, Recorder, check_result
from steelyard.gateway.renderer import Prompt, Renderer
from steelyard.gateway.reply_reader import ParsedReply
from steelyard.gateway.reply_text import Pieces, ReplyStream
from steelyard.ids import IdSource
from steelyard.metrics import Counters
from steelyard.types import (
    AttemptBinding,
    AttemptStanding,
    ChatReply,
    ChatRequest,
    EndReason,
    FinishReason,
    GenerateRequest,
    GenerateResult,
    Message,
    Sampling,
    Turn,
)

_SEED_BITS = 31

OnText = Callable[[str], None]


class GatewayLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds on what one gateway takes on.

    ``grace_s``: how long after a request's deadline an engine may still answer before it counts as hung.
    """

    max_open_calls: int = 4096
    max_open_calls_per_attempt: int = 16
    turn_deadline_s: float = 60.0
    grace_s: float = 5.0
    abort_deadline_s: float = 2.0


class Overloaded(SteelyardError):
    """Too many open calls. ``is_attempts_fault``: this attempt's own, not those of all together."""

    def __init__(self, detail: str, *, is_attempts_fault: bool, retry_after_s: float = 1.0) -> None:
        self.is_attempts_fault = is_attempts_fault
        self.retry_after_s = retry_after_s
        super().__init__(detail)


class TurnsUsedUp(SteelyardError):
    """The attempt has made as many model calls as it may."""


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """A reply with the recorded turn that it came from; ``turn`` is None where the context was full.

    ``stop``: the stop string that ended it, None where none did.
    """

    reply: ChatReply
    turn: Turn | None
    stop: str | None = None


class Gateway:
    """Serves model calls of live attempts; used in-process by harnesses and behind HTTP alike.

    Args:
        engine_name: how error messages call the engine.
    """

    def __init__(
        self,
        renderer: Renderer,
        generator: Generator,
        recorder: Recorder,
        directory: AttemptDirectory,
        *,
        ids: IdSource,
        clock: Clock,
        counters: Counters,
        limits: GatewayLimits | None = None,
        engine_name: str = "local",
    ) -> None:
        self._renderer = renderer
        self._recorder = recorder
        self._directory = directory
        self._ids = ids
        self._clock = clock
        self._counters = counters
        self.limits = limits or GatewayLimits()
        self._engine = EngineCaller(
            generator,
            clock,
            name=engine_name,
            grace_s=self.limits.grace_s,
            abort_deadline_s=self.limits.abort_deadline_s,
        )
        self._num_open_calls = 0

    async def chat(self, attempt_id: str, request: ChatRequest, deadline_at_s: float | None = None) -> ChatReply:
        """Answer one chat request of a live attempt; the turn is recorded before this returns.

        Args:
            deadline_at_s: the caller's own deadline, where it is before the attempt's.

        Raises:
            InputError: the messages are not a conversation, or the template refuses them.
            Refused: the attempt is not alive, or ended meanwhile.
            Overloaded: too many open calls.
            DeadlineExceeded: the engine did not answer in time.
            EngineError: the engine failed or broke its contract.
            StorageFailed: the turn could not be recorded.
        """
        return (await self.complete_chat(attempt_id, request, deadline_at_s=deadline_at_s)).reply

    async def complete_chat(
        self,
        attempt_id: str,
        request: ChatRequest,
        on_text: OnText | None = None,
        deadline_at_s: float | None = None,
        on_prompt: Callable[[int], None] | None = None,
        on_reasoning: OnText | None = None,
    ) -> Completion:
        """As :meth:`chat`, with the turn.

        Args:
            on_text: gets the content in pieces while it is sampled.
            on_prompt: gets the number of prompt tokens before anything is sampled.
            on_reasoning: gets the reasoning in pieces while it is sampled.
        """
        binding, log = self._admit(attempt_id)
        planned = plan_chat(self._renderer, log.history, request)
        planned.deadline_at_s = deadline_at_s
        if on_prompt is not None:
            on_prompt(len(planned.prompt.token_ids))
        return await self._serve(log, binding, planned, _on_pieces(on_text, on_reasoning))

    def count_prompt(self, attempt_id: str, request: ChatRequest) -> int:
        """The number of prompt tokens that :meth:`chat` would use. Raises as it does."""
        _, log = self._admit(attempt_id)
        return len(plan_chat(self._renderer, log.history, request).prompt.token_ids)

    def standing(self, attempt_id: str) -> AttemptStanding:
        """How far the model calls of an open attempt have come."""
        return self._recorder.standing(attempt_id)

    async def complete_prompt(self, attempt_id: str, request: TextRequest, on_text: OnText | None = None) -> Completion:
        """Continue a prompt. Raises as :meth:`chat`."""
        binding, log = self._admit(attempt_id)
        return await self._serve(
            log, binding, plan_text(self._renderer, log.history, request), _on_pieces(on_text, None)
        )

    def text_of(self, token_ids: tuple[int, ...]) -> str:
        """The text of sampled tokens."""
        return self._renderer.codec.decode(token_ids)

    def is_stop(self, token_id: int) -> bool:
        """Whether the token ends generation and is not shown."""
        return token_id in self._renderer.stop_token_ids

    def _admit(self, attempt_id: str) -> tuple[AttemptBinding, AttemptLog]:
        binding = self._directory.binding(attempt_id)
        if binding is None:
            raise Refused("late", f"attempt {attempt_id} is not alive")
        if self._clock.now_s() >= binding.deadline_at_s:
            raise Refused("expired", f"the deadline of attempt {attempt_id} has passed")
        log = self._recorder.open(attempt_id, binding.policy_version)
        if binding.max_turns is not None and log.history.num_turns + log.num_open_calls >= binding.max_turns:
            log.limit = EndReason.MAX_TURNS
            raise TurnsUsedUp(f"attempt {attempt_id} may make at most {binding.max_turns} model calls")
        if log.num_open_calls >= self.limits.max_open_calls_per_attempt:
            raise Overloaded(f"attempt {attempt_id} has {log.num_open_calls} open calls", is_attempts_fault=True)
        if self._num_open_calls >= self.limits.max_open_calls:
            log.failure = f"the gateway has {self._num_open_calls} open calls"
            raise Overloaded(log.failure, is_attempts_fault=False)
        return binding, log

    async def _serve(
        self, log: AttemptLog, binding: AttemptBinding, planned: Planned, on_pieces: OnPieces | None
    ) -> Completion:
        started_at_s = self._clock.now_s()
        room = binding.max_context_tokens - len(planned.prompt.token_ids)
        if room < 1:
            self._counters.add("gateway.context_full")
            log.limit = EndReason.CONTEXT_FULL
            return Completion(reply=self._context_full(planned.prompt), turn=None)
        stream = self._stream(planned, on_pieces)
        request = self._request(log, binding, planned, room, started_at_s, is_streaming=stream is not None)
        log.num_calls += 1
        log.num_open_calls += 1
        self._num_open_calls += 1
        try:
            result = await self._engine.call(request, stream, None if planned.opening else on_pieces)
            completion = self._record(log, planned, request, result, started_at_s)
        except Refused:
            raise
        except SteelyardError as error:
            log.failure = str(error)
            raise
        finally:
            log.num_open_calls -= 1
            self._num_open_calls -= 1
        log.failure = None
        if stream is not None and on_pieces is not None:
            on_pieces(stream.finish(completion.reply.message))
        return completion

    def _record(
        self,
        log: AttemptLog,
        planned: Planned,
        request: GenerateRequest,
        result: GenerateResult,
        started_at_s: float,
    ) -> Completion:
        """The engine's answer, checked, recorded and read."""
        result, text, stop = self._finish(request, result, planned)
        parsed = self._parse(text, planned)
        message = Message(
            role="assistant", content=parsed.content, tool_calls=parsed.tool_calls, reasoning=parsed.reasoning
        )
        turn = self._recorder.record(
            log,
            request,
            result,
            kind=planned.kind,
            prompt=planned.prompt,
            parent=planned.parent,
            reply=message,
            break_reason=planned.break_reason,
            started_at_s=started_at_s,
        )
        return Completion(reply=_reply(turn, message, parsed.num_malformed), turn=turn, stop=stop)

    def _request(
        self,
        log: AttemptLog,
        binding: AttemptBinding,
        planned: Planned,
        room: int,
        now_s: float,
        *,
        is_streaming: bool,
    ) -> GenerateRequest:
        bound = binding.sampling
        wished = bound.max_tokens if planned.max_tokens is None else planned.max_tokens
        if wished < 1:
            raise InputError(f"max_tokens must be at least 1, not {wished}")
        segment = planned.parent.segment.index if planned.parent is not None else len(log.history.segments)
        return GenerateRequest(
            request_id=self._ids.new("req"),
            attempt_id=log.attempt_id,
            sequence_key=f"{log.attempt_id}/{segment}",
            policy_version=binding.policy_version,
            prompt_token_ids=planned.prompt.token_ids,
            sampling=Sampling(
                temperature=bound.temperature,
                top_p=bound.top_p,
                max_tokens=min(wished, bound.max_tokens, room),
                seed=_seed(bound.seed, planned.seed, log),
            ),
            stop_token_ids=self._renderer.stop_token_ids,
            deadline_at_s=min(
                binding.deadline_at_s,
                now_s + self.limits.turn_deadline_s,
                math.inf if planned.deadline_at_s is None else planned.deadline_at_s,
            ),
            stream=is_streaming,
            follows_updates=binding.follows_updates,
        )

    def _stream(self, planned: Planned, on_pieces: OnPieces | None) -> ReplyStream | None:
        """Only a streamed reply and stop strings need the tokens while they are sampled."""
        if on_pieces is None and not planned.all_stops:
            return None
        reader = self._renderer.reader if planned.kind == "chat" else None
        return ReplyStream(
            self._renderer.codec, planned.all_stops, reader, reads_calls=planned.reads_calls, is_open=planned.is_open
        )

    def _finish(
        self, request: GenerateRequest, result: GenerateResult, planned: Planned
    ) -> tuple[GenerateResult, str, str | None]:
        """The engine's answer, checked and cut at a stop string, the text that may be shown, and that string.

        Raises:
            EngineError: it cannot be trained on, or the engine gave up.
            DeadlineExceeded: time ran out in the engine.
        """
        found = cut_at_stop(self._renderer.codec, request, result, planned.all_stops)
        try:
            if found is None:
                self._engine.check(request, result)
                text = self._renderer.codec.decode(shown_tokens(request, result))
                return result, planned.opening + text, None
            shorter, cut = found
            check_result(
                msgspec.structs.replace(request, stop_token_ids=shorter.token_ids[-1:]), shorter, self._engine.name
            )
        except SteelyardError:
            self._recorder.count_unrecorded(len(result.token_ids))
            raise
        self._recorder.count_unrecorded(len(result.token_ids) - len(shorter.token_ids))
        text = planned.opening + cut.text
        return (shorter, text, cut.stop) if cut.stop in planned.stops else (shorter, text + cut.stop, None)

    def _parse(self, text: str, planned: Planned) -> ParsedReply:
        if planned.kind == "text":
            return ParsedReply(content=text)
        parsed = self._renderer.reader.read(
            text,
            lambda: self._renderer.call_id(self._ids.new("call")),
            reads_calls=planned.reads_calls,
            is_open=planned.is_open,
        )
        if parsed.num_malformed:
            self._counters.add("gateway.malformed_calls", parsed.num_malformed)
        if planned.is_single and len(parsed.tool_calls) > 1:  # the form of its calls has no end to stop at
            self._counters.add("gateway.calls_left_out", len(parsed.tool_calls) - 1)
            return msgspec.structs.replace(parsed, tool_calls=parsed.tool_calls[:1])
        return parsed

    def _context_full(self, prompt: Prompt) -> ChatReply:
        return ChatReply(
            request_id=self._ids.new("req"),
            message=Message(role="assistant", content=""),
            finish_reason=FinishReason.LENGTH,
            num_prompt_tokens=len(prompt.token_ids),
            num_completion_tokens=0,
            context_full=True,
        )


def _on_pieces(on_text: OnText | None, on_reasoning: OnText | None) -> OnPieces | None:
    """One callback for both, each of which is called for text only; None where nobody listens."""
    if on_text is None and on_reasoning is None:
        return None

    def show(pieces: Pieces) -> None:
        if pieces.reasoning and on_reasoning is not None:
            on_reasoning(pieces.reasoning)
        if pieces.content and on_text is not None:
            on_text(pieces.content)

    return show


def _reply(turn: Turn, message: Message, num_malformed: int) -> ChatReply:
    return ChatReply(
        request_id=turn.request_id,
        message=message,
        finish_reason=turn.finish_reason,
        num_prompt_tokens=len(turn.prompt_token_ids),
        num_completion_tokens=len(turn.token_ids),
        num_malformed_calls=num_malformed,
    )


def _seed(bound: int | None, wished: int | None, log: AttemptLog) -> int | None:
    """A seed for this call: fixed by (binding seed, call), else by (request seed, attempt, call), else None."""
    if bound is None and wished is None:
        return None
    origin = f"{bound}" if bound is not None else f"{wished}/{log.attempt_id}"
    return xxhash.xxh3_64_intdigest(f"{origin}/{log.num_calls}".encode()) & ((1 << _SEED_BITS) - 1)
