"""Serving all jobs of one request, whole or as a stream of events.

*Consumes* pieces of text while they are sampled; *waits for* the engine, with the gateway's deadline, and for slow
readers, with another; *unblocked by* the end of the work or the client's leaving, which cancels it; *produces* bytes.
"""

import asyncio
from collections.abc import Callable
from typing import Protocol

from aiohttp import web

from steelyard.gateway.dialects.base import Asked, Job, Replies
from steelyard.gateway.failures import Failure, bad_request
from steelyard.gateway.planning import TextRequest
from steelyard.gateway.service import Completion
from steelyard.types import ChatRequest

Fail = Callable[[Exception], Failure]


class Completer(Protocol):
    """The gateway."""

    async def complete_chat(
        self,
        attempt_id: str,
        request: ChatRequest,
        on_text: Callable[[str], None] | None = None,
        deadline_at_s: float | None = None,
        on_prompt: Callable[[int], None] | None = None,
        on_reasoning: Callable[[str], None] | None = None,
    ) -> Completion: ...

    async def complete_prompt(
        self, attempt_id: str, request: TextRequest, on_text: Callable[[str], None] | None = None
    ) -> Completion: ...


class _Pieces:
    """The events of one stream, in the order in which they came about.

    What opens a choice waits for the first thing that was sampled, so that a request that fails before has its own
    status.
    """

    def __init__(self, replies: Replies) -> None:
        self._replies = replies
        self._openings: dict[int, bytes] = {}
        self.queue: asyncio.Queue[bytes | None] = asyncio.Queue()

    def prompt(self, index: int, num_tokens: int) -> None:
        self._openings[index] = self._replies.start(index, num_tokens)

    def text(self, index: int, delta: str) -> None:
        self._put(index, self._replies.text(index, delta))

    def reasoning(self, index: int, delta: str) -> None:
        self._put(index, self._replies.reasoning(index, delta))

    def end(self, index: int, completion: Completion) -> None:
        self._put(index, self._replies.end(index, completion))

    def _put(self, index: int, data: bytes) -> None:
        self.queue.put_nowait(self._openings.pop(index, b"") + data)


async def complete_all(
    completer: Completer, attempt_id: str, jobs: tuple[Job, ...], pieces: _Pieces | None = None
) -> list[Completion]:
    """All completions, each a recorded turn, sampled together. The first failure ends the others.

    Raises:
        Failure: there is no room in the context.
        SteelyardError: as of :meth:`Gateway.chat`.
    """
    if len(jobs) == 1:
        return [await _complete(completer, attempt_id, 0, jobs[0], pieces)]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(_complete(completer, attempt_id, index, job, pieces))
                for index, job in enumerate(jobs)
            ]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


async def _complete(completer: Completer, attempt_id: str, index: int, job: Job, pieces: _Pieces | None) -> Completion:
    def on_prompt(num_tokens: int) -> None:
        if pieces is not None:
            pieces.prompt(index, num_tokens)

    def on_text(delta: str) -> None:
        if pieces is not None:
            pieces.text(index, delta)

    def on_reasoning(delta: str) -> None:
        if pieces is not None:
            pieces.reasoning(index, delta)

    listener, thinker = (None, None) if pieces is None else (on_text, on_reasoning)
    if isinstance(job, ChatRequest):
        completion = await completer.complete_chat(attempt_id, job, listener, on_prompt=on_prompt, on_reasoning=thinker)
    else:
        completion = await completer.complete_prompt(attempt_id, job, listener)
    if completion.reply.context_full:
        num_tokens = completion.reply.num_prompt_tokens
        message = f"This model's maximum context length leaves no room: your messages resulted in {num_tokens} tokens."
        raise bad_request(message, "messages", "context_length_exceeded")
    if pieces is not None:
        pieces.end(index, completion)
    return completion


class EventStream:
    """Sends one answer as server-sent events. The status goes out with the first of them.

    Args:
        fail: the failure that an exception means, counted.
        on_reader_gone: called where the client left before the end.
        error_event: says one in the caller's dialect.
        write_deadline_s: how long a client may leave an event unread before it counts as gone.
        shutdown_s: how long the work may take to end once it is cancelled.
    """

    def __init__(
        self,
        request: web.BaseRequest,
        *,
        fail: Fail,
        on_reader_gone: Callable[[], None],
        error_event: Callable[[Failure], bytes],
        write_deadline_s: float,
        shutdown_s: float,
    ) -> None:
        self._request = request
        self._fail = fail
        self._on_reader_gone = on_reader_gone
        self._error_event = error_event
        self._write_deadline_s = write_deadline_s
        self._shutdown_s = shutdown_s
        headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        self._response = web.StreamResponse(headers=headers)

    async def send(self, completer: Completer, attempt_id: str, asked: Asked) -> web.StreamResponse:
        """Serve the jobs and send what they give; the end mark goes out only once all turns are recorded.

        Raises:
            Exception: what failed before anything was sent.
        """
        pieces = _Pieces(asked.replies)
        work = asyncio.ensure_future(complete_all(completer, attempt_id, asked.jobs, pieces))
        work.add_done_callback(lambda _: pieces.queue.put_nowait(None))
        try:
            while (piece := await pieces.queue.get()) is not None:
                await self._write(piece)
            await self._end(work, asked.replies)
        except (ConnectionError, TimeoutError):
            self._on_reader_gone()
        finally:
            work.cancel()
            await asyncio.wait([work], timeout=self._shutdown_s)
        return self._response

    async def _end(self, work: "asyncio.Future[list[Completion]]", replies: Replies) -> None:
        error = work.exception()
        if error is None:
            await self._write(replies.close())
        elif not self._response.prepared or not isinstance(error, Exception):
            raise error
        else:
            await self._write(self._error_event(self._fail(error)))
        await self._response.write_eof()

    async def _write(self, data: bytes) -> None:
        if not self._response.prepared:
            await self._response.prepare(self._request)
        if data:
            async with asyncio.timeout(self._write_deadline_s):
                await self._response.write(data)
