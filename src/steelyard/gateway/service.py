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

import asyncio
import contextlib
import math

import msgspec
import xxhash

from steelyard.clock import Clock
from steelyard.errors import InputError, Refused, SteelyardError
from steelyard.gateway.capability import AttemptDirectory
from steelyard.gateway.engine_call import EngineCaller, Generator, OnText, cut_at_stop, shown_tokens
from steelyard.gateway.history import Kind, RecordedTurn, Segment
from steelyard.gateway.recorder import AttemptLog, Recorder, check_result
from steelyard.gateway.renderer import Prompt, Renderer
from steelyard.gateway.reply_text import ReplyStream
from steelyard.gateway.tool_calls import HermesParser, ParsedText
from steelyard.ids import IdSource
from steelyard.metrics import Counters
from steelyard.types import (
    AttemptBinding,
    ChatReply,
    ChatRequest,
    FinishReason,
    GenerateRequest,
    GenerateResult,
    Message,
    Sampling,
    Turn,
)

_ROLES = ("system", "user", "assistant", "tool")
_SEED_BITS = 31


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


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """A reply with the recorded turn that it came from; ``turn`` is None where the context was full."""

    reply: ChatReply
    turn: Turn | None


class _Planned(msgspec.Struct, kw_only=True):
    """One call on its way: what was asked and what it extends."""

    kind: Kind
    prompt: Prompt
    parent: RecordedTurn | None
    break_reason: str | None
    reads_calls: bool
    stops: tuple[str, ...]
    max_tokens: int | None
    seed: int | None
    deadline_at_s: float | None


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
        self._limits = limits or GatewayLimits()
        self._engine = EngineCaller(
            generator,
            clock,
            name=engine_name,
            grace_s=self._limits.grace_s,
            abort_deadline_s=self._limits.abort_deadline_s,
        )
        self._parser = HermesParser()
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
    ) -> Completion:
        """As :meth:`chat`, with the turn; ``on_text`` gets the content in pieces while it is sampled."""
        binding, log = self._admit(attempt_id)
        messages = normal_messages(request.messages)
        parent = log.history.find_chat(messages)
        if parent is None:
            prompt, break_reason = self._renderer.first_prompt(messages, request.tools), None
        else:
            extension = self._renderer.extend(parent.as_previous(), messages, request.tools, parent.closed_text)
            prompt, break_reason = extension.prompt, extension.break_reason
        planned = _Planned(
            kind="chat",
            prompt=prompt,
            parent=parent,
            break_reason=break_reason,
            reads_calls=bool(request.tools),
            stops=request.stop,
            max_tokens=request.max_tokens,
            seed=request.seed,
            deadline_at_s=deadline_at_s,
        )
        return await self._serve(log, binding, planned, on_text)

    async def complete_prompt(
        self,
        attempt_id: str,
        prompt: str | tuple[int, ...],
        *,
        max_tokens: int | None = None,
        stop: tuple[str, ...] = (),
        seed: int | None = None,
        on_text: OnText | None = None,
    ) -> Completion:
        """Continue a prompt that the caller rendered, as text (control strings count) or as token ids.

        Raises:
            As :meth:`chat`.
        """
        binding, log = self._admit(attempt_id)
        parent, break_reason = None, None
        if not prompt:
            raise InputError("prompt must not be empty")
        if isinstance(prompt, str):
            parent = log.history.find_text(prompt)
            if parent is None:
                made = self._renderer.text_prompt(prompt)
            else:
                extension = self._renderer.text_extension(parent.as_previous(), parent.reply_text, prompt)
                made, break_reason = extension.prompt, extension.break_reason
        else:
            num_ids = self._renderer.codec.num_ids
            if min(prompt) < 0 or max(prompt) >= num_ids:
                raise InputError(f"prompt must hold token ids from 0 to {num_ids - 1}")
            parent = log.history.find_tokens(prompt)
            made = Prompt(token_ids=prompt, text=self._renderer.codec.decode(prompt), messages=())
        planned = _Planned(
            kind="text",
            prompt=made,
            parent=parent,
            break_reason=break_reason,
            reads_calls=False,
            stops=stop,
            max_tokens=max_tokens,
            seed=seed,
            deadline_at_s=None,
        )
        return await self._serve(log, binding, planned, on_text)

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
        if log.num_open_calls >= self._limits.max_open_calls_per_attempt:
            raise Overloaded(f"attempt {attempt_id} has {log.num_open_calls} open calls", is_attempts_fault=True)
        if self._num_open_calls >= self._limits.max_open_calls:
            raise Overloaded(f"the gateway has {self._num_open_calls} open calls", is_attempts_fault=False)
        return binding, log

    async def _serve(
        self, log: AttemptLog, binding: AttemptBinding, planned: _Planned, on_text: OnText | None
    ) -> Completion:
        started_at_s = self._clock.now_s()
        room = binding.max_context_tokens - len(planned.prompt.token_ids)
        if room < 1:
            self._counters.add("gateway.context_full")
            return Completion(reply=self._context_full(planned.prompt), turn=None)
        stream = self._stream(planned, on_text)
        request = self._request(log, binding, planned, room, started_at_s, is_streaming=stream is not None)
        log.num_calls += 1
        log.num_open_calls += 1
        self._num_open_calls += 1
        try:
            result = await self._engine.call(request, stream, on_text)
        finally:
            log.num_open_calls -= 1
            self._num_open_calls -= 1
        result, text = self._finish(request, result, planned.stops)
        parsed = self._parse(text, planned)
        message = Message(role="assistant", content=parsed.content, tool_calls=parsed.tool_calls)
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
        if stream is not None and on_text is not None and (rest := stream.finish(message.content or "")):
            on_text(rest)
        if planned.kind == "chat":
            asyncio.get_running_loop().call_soon(self._close_ahead, log.history.segments[turn.segment_index])
        return Completion(reply=_reply(turn, message, parsed.num_malformed), turn=turn)

    def _request(
        self,
        log: AttemptLog,
        binding: AttemptBinding,
        planned: _Planned,
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
                now_s + self._limits.turn_deadline_s,
                math.inf if planned.deadline_at_s is None else planned.deadline_at_s,
            ),
            stream=is_streaming,
            follows_updates=binding.follows_updates,
        )

    def _stream(self, planned: _Planned, on_text: OnText | None) -> ReplyStream | None:
        """Only a streamed reply and stop strings need the tokens while they are sampled."""
        if on_text is None and not planned.stops:
            return None
        opening = self._parser.opening if planned.reads_calls else None
        return ReplyStream(self._renderer.codec, planned.stops, opening)

    def _finish(
        self, request: GenerateRequest, result: GenerateResult, stops: tuple[str, ...]
    ) -> tuple[GenerateResult, str]:
        """The engine's answer, checked and cut at a stop string, with the text that may be shown.

        Raises:
            EngineError: it cannot be trained on, or the engine gave up.
            DeadlineExceeded: time ran out in the engine.
        """
        cut = cut_at_stop(self._renderer.codec, request, result, stops)
        try:
            if cut is None:
                self._engine.check(request, result)
                return result, self._renderer.codec.decode(shown_tokens(request, result))
            check_result(
                msgspec.structs.replace(request, stop_token_ids=cut[0].token_ids[-1:]), cut[0], self._engine.name
            )
        except SteelyardError:
            self._recorder.count_unrecorded(len(result.token_ids))
            raise
        self._recorder.count_unrecorded(len(result.token_ids) - len(cut[0].token_ids))
        return cut

    def _close_ahead(self, segment: Segment) -> None:
        """Between two calls: make what the next one will need of the template, so that it waits for less."""
        newest = segment.turns[-1]
        with contextlib.suppress(InputError):  # a template that refuses this is reported to whoever extends it
            newest.closed_text = self._renderer.closed_text(newest.as_previous())

    def _parse(self, text: str, planned: _Planned) -> ParsedText:
        if not planned.reads_calls:
            return ParsedText(content=text)
        parsed = self._parser.parse(text, lambda: self._ids.new("call"))
        if parsed.num_malformed:
            self._counters.add("gateway.malformed_calls", parsed.num_malformed)
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


def normal_messages(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """Messages in the one form in which they are compared: content is None only beside tool calls.

    Raises:
        InputError: there are none, or one has an unknown role or lacks what its role needs.
    """
    if not messages:
        raise InputError("messages must hold at least one message")
    return tuple(_normal_message(index, message) for index, message in enumerate(messages))


def _normal_message(index: int, message: Message) -> Message:
    if message.role not in _ROLES:
        raise InputError(f"messages[{index}].role must be one of {', '.join(_ROLES)}, not {message.role!r}")
    if message.tool_calls and message.role != "assistant":
        raise InputError(f"messages[{index}].tool_calls may stand only in an assistant message, not in {message.role}")
    content = message.content or (None if message.tool_calls else "")
    return message if content == message.content else msgspec.structs.replace(message, content=content)


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
