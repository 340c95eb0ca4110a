"""One call of an engine: the wait for it, its early end at a stop string, and the check of what it said."""

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

import msgspec

from steelyard.clock import Clock
from steelyard.errors import DeadlineExceeded, EngineError, SteelyardError
from steelyard.gateway.codec import TokenCodec
from steelyard.gateway.recorder import check_result
from steelyard.gateway.reply_text import ReplyStream, find_stop
from steelyard.types import FinishReason, GenerateRequest, GenerateResult, TokenChunk

_LOG = logging.getLogger(__name__)

OnText = Callable[[str], None]


class Generator(Protocol):
    """What the gateway needs of inference; an engine or a router is one."""

    async def generate(
        self, request: GenerateRequest, on_tokens: Callable[[TokenChunk], None] | None = None
    ) -> GenerateResult:
        """Sample; ``on_tokens`` is called in order where ``request.stream`` is set. Cancelling the call aborts."""
        ...

    async def abort(self, request_id: str) -> None:
        """End a request as ``cancelled``, with the tokens sampled so far; unknown ones are ignored."""
        ...


class EngineCaller:
    """Calls one engine, or the router in front of several.

    Args:
        name: how error messages call the engine.
        grace_s: how long after a request's deadline the engine may still answer before it counts as hung.
        abort_deadline_s: how long an engine may take to end a request.
    """

    def __init__(
        self, generator: Generator, clock: Clock, *, name: str, grace_s: float, abort_deadline_s: float
    ) -> None:
        self._generator = generator
        self._clock = clock
        self.name = name
        self._grace_s = grace_s
        self._abort_deadline_s = abort_deadline_s

    async def call(
        self, request: GenerateRequest, stream: ReplyStream | None = None, on_text: OnText | None = None
    ) -> GenerateResult:
        """Wait for the engine's answer, but not for ever. A cancelled caller ends the engine's work.

        Args:
            stream: gets the tokens of a streaming request; where it meets a stop string the request is ended.
            on_text: gets the text that may be shown already.

        Raises:
            DeadlineExceeded: the engine did not answer at all.
        """
        wait_s = max(0.0, request.deadline_at_s - self._clock.now_s()) + self._grace_s
        try:
            async with asyncio.timeout(wait_s):
                if stream is None:
                    return await self._generator.generate(request)
                return await self._stream(request, stream, on_text)
        except TimeoutError:
            raise DeadlineExceeded(f"the answer to {request.request_id}", (f"engine {self.name}",), wait_s) from None

    async def _stream(self, request: GenerateRequest, stream: ReplyStream, on_text: OnText | None) -> GenerateResult:
        stopped = asyncio.Event()

        def on_tokens(chunk: TokenChunk) -> None:
            delta = stream.push([token for token in chunk.token_ids if token not in request.stop_token_ids])
            if delta and on_text is not None:
                on_text(delta)
            if stream.is_stopped:
                stopped.set()

        stopper = asyncio.create_task(self._stop(request.request_id, stopped), name=f"stop-{request.request_id}")
        try:
            return await self._generator.generate(request, on_tokens)
        finally:
            stopper.cancel()
            (outcome,) = await asyncio.gather(stopper, return_exceptions=True)
            if isinstance(outcome, Exception):
                # The answer is cut at the stop string anyway; the engine only worked longer than it had to.
                _LOG.warning("could not stop %s in the engine: %r", request.request_id, outcome)

    async def _stop(self, request_id: str, stopped: asyncio.Event) -> None:
        """Waits for a stop string, or to be cancelled with the call."""
        await stopped.wait()
        async with asyncio.timeout(self._abort_deadline_s):
            await self._generator.abort(request_id)

    def check(self, request: GenerateRequest, result: GenerateResult) -> None:
        """Refuse an answer that cannot be trained on.

        Raises:
            EngineError: it breaks the engine's contract, or the engine gave up.
            DeadlineExceeded: time ran out in the engine.
        """
        if result.finish_reason not in (FinishReason.STOP, FinishReason.LENGTH):
            raise self._failure(request, result)
        check_result(request, result, self.name)

    def _failure(self, request: GenerateRequest, result: GenerateResult) -> SteelyardError:
        engine = f"engine {self.name} ({result.replica_id or 'no replica'})"
        if result.finish_reason in (FinishReason.QUEUE_TIMEOUT, FinishReason.GENERATION_TIMEOUT):
            what = f"the answer to {request.request_id} ({result.finish_reason})"
            return DeadlineExceeded(what, (engine,), result.queued_s + result.prefill_s + result.decode_s)
        return EngineError(f"{engine} ended request {request.request_id} as {result.finish_reason}: {result.detail}")


def shown_tokens(request: GenerateRequest, result: GenerateResult) -> tuple[int, ...]:
    """The sampled tokens without the stop token."""
    if result.token_ids and result.token_ids[-1] in request.stop_token_ids:
        return result.token_ids[:-1]
    return result.token_ids


def cut_at_stop(
    codec: TokenCodec, request: GenerateRequest, result: GenerateResult, stops: tuple[str, ...]
) -> tuple[GenerateResult, str] | None:
    """The answer up to its first stop string, as if the engine had stopped there, and the text before the string.

    None where there is no stop string. The tokens of the string stay: they were sampled.
    """
    cut = find_stop(codec, shown_tokens(request, result), stops) if stops else None
    if cut is None:
        return None
    shorter = msgspec.structs.replace(
        result,
        token_ids=result.token_ids[: cut.num_tokens],
        logprobs=result.logprobs[: cut.num_tokens],
        kept_logmass=result.kept_logmass[: cut.num_tokens],
        version_spans=tuple(span for span in result.version_spans if span.start < cut.num_tokens),
        finish_reason=FinishReason.STOP,
    )
    return shorter, cut.text
