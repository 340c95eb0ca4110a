"""One open request at a vLLM server: its stream, its deadline, and how it is ended before its time."""

import asyncio
import logging

from steelyard.clock import Clock
from steelyard.errors import DeadlineExceeded, RemoteFailed, SteelyardError
from steelyard.inference.engine import OnTokens
from steelyard.inference.vllm_api import VllmApi
from steelyard.inference.vllm_request import RunningRequest
from steelyard.types import FinishReason, TokenChunk

logger = logging.getLogger(__name__)


class RequestStream:
    """Reads one stream into ``running``.

    Args:
        abort_deadline_s: how long the server may take to send the last chunk of a request that we end.
    """

    def __init__(self, api: VllmApi, running: RunningRequest, clock: Clock, abort_deadline_s: float) -> None:
        self.running = running
        self._api = api
        self._clock = clock
        self._abort_deadline_s = abort_deadline_s
        self._is_cut = asyncio.Event()
        self._sent_s = clock.now_s()
        self._first_s: float | None = None
        self._last_s: float | None = None

    @property
    def prefill_s(self) -> float:
        """Until the first token. The server does not say how much of it was waiting."""
        return 0.0 if self._first_s is None else self._first_s - self._sent_s

    @property
    def decode_s(self) -> float:
        """From the first token to the last."""
        return 0.0 if self._first_s is None or self._last_s is None else self._last_s - self._first_s

    def cut(self, reason: FinishReason) -> None:
        """End the request soon. One that has ended already is left alone."""
        if self.running.finish is None and self.running.cut is None:
            self.running.cut = reason
            self._is_cut.set()

    def spoil(self, detail: str) -> None:
        """Its tokens must not be used: nobody can say which weights sampled them."""
        self.running.spoil(detail)
        self._is_cut.set()

    async def run(self, on_tokens: OnTokens | None) -> None:
        """Read to the end, the deadline, or a cut. Cancelling it closes the stream, which aborts the request.

        Raises:
            EngineError: the server refuses, or what it sends is not what was asked for.
            RemoteFailed: the server is gone and has sent no token.
        """
        left_s = max(0.0, self.running.request.deadline_at_s - self._clock.now_s())
        reading = asyncio.create_task(self._read(on_tokens), name="read a stream of vllm")
        cut = asyncio.create_task(self._is_cut.wait(), name="wait for an abort")
        try:
            await asyncio.wait({reading, cut}, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                self.cut(FinishReason.GENERATION_TIMEOUT if self.running.token_ids else FinishReason.QUEUE_TIMEOUT)
                await self._ask_to_end(reading)
            if reading.done() and (error := reading.exception()) is not None:
                self._broke_off(error)
            if self.running.finish is None and self.running.cut is not None:
                self.running.end(self.running.cut)
        finally:
            for task in (reading, cut):
                task.cancel()
            await asyncio.gather(reading, cut, return_exceptions=True)

    async def _read(self, on_tokens: OnTokens | None) -> None:
        request = self.running.request
        async with self._api.generate(request, self.running.load.label) as chunks:
            async for chunk in chunks:
                new = self.running.take(chunk)
                if not new:
                    continue
                self._last_s = self._clock.now_s()
                if self._first_s is None:
                    self._first_s = self._last_s
                if request.stream and on_tokens is not None:
                    on_tokens(TokenChunk(request_id=request.request_id, token_ids=new))

    async def _ask_to_end(self, reading: "asyncio.Task[None]") -> None:
        """So that the last chunk comes, which says which weights sampled what. Without it the stream is just closed."""
        request_id = self.running.request.request_id
        try:
            await self._api.abort(request_id)
        except SteelyardError as error:
            logger.warning("request %s could not be aborted: %s", request_id, error)
            return
        await asyncio.wait({reading}, timeout=self._abort_deadline_s)

    def _broke_off(self, error: BaseException) -> None:
        """Where nothing has come the error is the caller's; else what has come is the result."""
        running = self.running
        if not isinstance(error, RemoteFailed | DeadlineExceeded) or not (running.token_ids or running.cut):
            raise error
        if running.finish is None:
            running.end(running.cut or FinishReason.ENGINE_ERROR, str(error))
