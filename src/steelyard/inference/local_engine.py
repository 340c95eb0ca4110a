"""The local engine: a core (:mod:`steelyard.inference.engine_core`) in its own thread, behind an asynchronous front.

::

    event loop                          engine thread                              a thread for each load
    generate ---- command ------------> scheduler.add                              read, make ready, prove
                                        loop: commands -> plan -> forward -> commit          |
    future   <--- call_soon_threadsafe- finished, new tokens                                 |
    load, update <------------------------------------------------------------------- proven version
             ---- command ------------> hold, swap

If the engine's thread fails, every open request fails with it, at once.
"""

import asyncio
import ctypes
import gc
import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from steelyard.clock import Clock
from steelyard.errors import DeadlineExceeded, EngineError
from steelyard.inference.engine import EngineHealth, KvRule, OnTokens, VersionLoader
from steelyard.inference.engine_core import EngineCore, ProvenVersion
from steelyard.types import EngineStats, GenerateRequest, GenerateResult, LoadProof, TokenChunk

logger = logging.getLogger(__name__)

T = TypeVar("T")

_IDLE_WAIT_S = 1.0

# Parameters of glibc's mallopt(3), and the values that keep freed memory in the process.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MAX_HEAP_CHUNK_BYTES = 32 << 20
_MAX_KEPT_BYTES = 128 << 20


def prepare_process(num_threads: int) -> None:
    """Set up a process that serves a local engine: threads of the math library, garbage collector, allocator.

    What is imported by now stays for good, so the garbage collector need not look at it again and again.

    A forward pass takes and returns megabytes for each of its tensors. By default glibc gives them back to the kernel
    at once and gets them again as fresh pages, which was seen to cost 6 to 8 % of the time; so freed memory is kept,
    up to a bound. Other C libraries are left as they are.
    """
    torch.set_num_threads(num_threads)
    gc.collect()
    gc.freeze()
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _MAX_HEAP_CHUNK_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _MAX_KEPT_BYTES)


class LocalEngine:
    """An :class:`~steelyard.inference.engine.Engine` around a core in its own thread. Close it when done."""

    def __init__(self, core: EngineCore, loader: VersionLoader, clock: Clock) -> None:
        self._core = core
        self._loader = loader
        self._clock = clock
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = threading.Event()
        self._callers: dict[str, _Caller] = {}
        self._is_paused = False
        self._is_closed = False
        self._failure: str | None = None
        self._num_threads = torch.get_num_threads()
        self._thread = threading.Thread(target=self._run, name=f"engine {core.replica_id}", daemon=True)
        self._thread.start()

    async def generate(self, request: GenerateRequest, on_tokens: OnTokens | None = None) -> GenerateResult:
        """See :meth:`steelyard.inference.engine.Engine.generate`."""
        loop = asyncio.get_running_loop()
        caller = _Caller(loop, loop.create_future(), on_tokens)
        timeout_s = max(0.0, request.deadline_at_s - self._clock.now_s()) + self._core.settings.answer_deadline_s
        try:
            await self._in_thread(lambda: self._add(request, caller), "a request to be queued")
            async with asyncio.timeout(timeout_s):
                return await caller.result
        except BaseException as error:
            self._commands.append(lambda: self._withdraw(request.request_id, caller))
            self._wake.set()
            if isinstance(error, TimeoutError):
                raise DeadlineExceeded(f"request {request.request_id}", (self._core.replica_id,), timeout_s) from None
            raise

    async def load(self, version_dir: str, version: int) -> LoadProof:
        """See :meth:`steelyard.inference.engine.Engine.load`. Reading and proving go on beside generation."""
        proven = await asyncio.to_thread(self._prove, version_dir, version)
        return await self._in_thread(lambda: self._core.hold(proven), f"version {version}")

    async def update(self, version_dir: str, version: int, kv: KvRule) -> LoadProof:
        """See :meth:`steelyard.inference.engine.Engine.update`.

        The new version is read and proven beside the old one, which serves meanwhile; for a moment both are in memory.
        """
        what = f"update to version {version}"
        await self._in_thread(lambda: self._core.check_update(version), what)
        proven = await asyncio.to_thread(self._prove, version_dir, version)
        return await self._in_thread(lambda: self._core.swap(proven, kv), what)

    async def unload(self, version: int) -> None:
        """See :meth:`steelyard.inference.engine.Engine.unload`."""
        await self._in_thread(lambda: self._core.unload(version), f"unloading of version {version}")

    async def pause(self) -> None:
        """See :meth:`steelyard.inference.engine.Engine.pause`. Returns when no step is running."""
        await self._in_thread(lambda: self._set_paused(True), "pause")

    async def resume(self) -> None:
        """See :meth:`steelyard.inference.engine.Engine.resume`."""
        await self._in_thread(lambda: self._set_paused(False), "resume")

    async def abort(self, request_id: str) -> None:
        """See :meth:`steelyard.inference.engine.Engine.abort`."""
        await self._in_thread(lambda: self._core.abort(request_id), "abort")

    async def release(self, attempt_id: str) -> None:
        """See :meth:`steelyard.inference.engine.Engine.release`."""
        await self._in_thread(lambda: self._core.scheduler.release(attempt_id), "release")

    async def health(self) -> EngineHealth:
        """See :meth:`steelyard.inference.engine.Engine.health`."""
        if self._failure is not None or self._is_closed:
            detail = self._failure or "closed"
            return EngineHealth(
                replica_id=self._core.replica_id, is_healthy=False, is_paused=False, versions=(), detail=detail
            )
        return await self._in_thread(
            lambda: EngineHealth(
                replica_id=self._core.replica_id,
                is_healthy=True,
                is_paused=self._is_paused,
                versions=self._core.versions,
                max_versions=self._core.settings.max_versions,
            ),
            "health",
        )

    async def stats(self) -> EngineStats:
        """See :meth:`steelyard.inference.engine.Engine.stats`."""
        return await self._in_thread(self._core.stats, "stats")

    async def close(self) -> None:
        """End the thread; open requests end as ``engine_error``."""
        self._is_closed = True
        self._wake.set()
        await asyncio.to_thread(self._thread.join, self._core.settings.answer_deadline_s)

    def _prove(self, version_dir: str, version: int) -> ProvenVersion:
        """Read a version and prove it, in a thread of its own that uses no others.

        The OpenMP library keeps a pool for each thread that computes with several. With the engine's thread a second
        one would make more threads than cores, and then GNU's library stops spinning in all of them: each of the
        hundreds of parallel loops in a forward pass would put its threads to sleep and wake them again, which was
        seen to make two threads slower than one.
        """
        started_s = self._clock.now_s()
        torch.set_num_threads(1)
        return self._core.prove(self._loader.load(version_dir), version, started_s)

    # --- event loop side --------------------------------------------------------------------------

    async def _in_thread(self, work: Callable[[], T], what: str) -> T:
        """Run ``work`` in the engine thread, between two steps, and wait for it. Not run if cancelled before."""
        # asyncio.timeout, not wait_for: in Python 3.11 the latter loses a cancellation that comes with the result.
        done: Future[T] = Future()

        def command() -> None:
            if not done.set_running_or_notify_cancel():
                return
            try:
                answer = work()
            except BaseException as error:  # noqa: BLE001 - it is the caller's to handle, in its own thread
                done.set_exception(error)
            else:
                done.set_result(answer)

        self._post(command)
        deadline_s = self._core.settings.answer_deadline_s
        try:
            async with asyncio.timeout(deadline_s):
                return await asyncio.wrap_future(done)
        except TimeoutError:
            raise DeadlineExceeded(what, (self._core.replica_id,), deadline_s) from None

    def _post(self, command: Callable[[], None]) -> None:
        if self._failure is not None or self._is_closed:
            raise EngineError(f"engine {self._core.replica_id} must be running: {self._failure or 'closed'}")
        self._commands.append(command)
        self._wake.set()

    # --- engine thread side -----------------------------------------------------------------------

    def _run(self) -> None:
        # The number of threads is set for each thread that calls the math library, not for the process. A thread that
        # has not asked for it yet takes over, at its first computation, what another thread has set meanwhile.
        torch.set_num_threads(self._num_threads)
        torch.get_num_threads()
        try:
            while not self._is_closed:
                self._turn()
            self._end_all("the engine was closed")
        except BaseException as error:
            logger.exception("the thread of engine %s failed", self._core.replica_id)
            self._failure = f"the engine's thread failed with {type(error).__name__}: {error}"
            self._end_all(self._failure)

    def _turn(self) -> None:
        """Commands, then one step; sleeps where there is nothing to compute."""
        self._wake.clear()
        while self._commands:
            self._commands.popleft()()
        scheduler = self._core.scheduler
        has_work = scheduler.num_running + scheduler.num_waiting > 0
        if has_work and not self._is_paused:
            chunks, results = self._core.step()
        else:
            scheduler.expire(self._clock.now_s())
            chunks, results = [], self._core.take_results()
        self._deliver(chunks, results)
        if not has_work or self._is_paused:
            until_deadline_s = scheduler.next_deadline_s - self._clock.now_s()
            self._wake.wait(max(0.0, min(_IDLE_WAIT_S, until_deadline_s)))

    def _add(self, request: GenerateRequest, caller: "_Caller") -> None:
        self._core.add(request)
        self._callers[request.request_id] = caller

    def _withdraw(self, request_id: str, caller: "_Caller") -> None:
        """The caller has gone. Only its own request ends: another of the same id may have been there first."""
        if self._callers.get(request_id) is caller:
            self._core.abort(request_id)

    def _set_paused(self, is_paused: bool) -> None:
        self._is_paused = is_paused

    def _deliver(self, chunks: list[TokenChunk], results: list[GenerateResult]) -> None:
        for chunk in chunks:
            self._callers[chunk.request_id].send_tokens(chunk)
        for result in results:
            self._callers.pop(result.request_id).send_result(result)

    def _end_all(self, detail: str) -> None:
        self._is_closed = True
        while self._commands:
            self._commands.popleft()()
        self._core.scheduler.fail_all(self._clock.now_s(), detail)
        self._deliver([], self._core.take_results())


@dataclass(frozen=True)
class _Caller:
    """Who waits for a request, and in which event loop."""

    loop: asyncio.AbstractEventLoop
    result: "asyncio.Future[GenerateResult]"
    on_tokens: OnTokens | None

    def send_tokens(self, chunk: TokenChunk) -> None:
        if self.on_tokens is not None:
            self._call(self.on_tokens, chunk)

    def send_result(self, result: GenerateResult) -> None:
        self._call(self._set_result, result)

    def _set_result(self, result: GenerateResult) -> None:
        if not self.result.done():
            self.result.set_result(result)

    def _call(self, function: Callable[..., Any], argument: Any) -> None:
        try:
            self.loop.call_soon_threadsafe(function, argument)
        except RuntimeError:
            # The loop is closed: nobody waits any more, and the engine serves the others.
            logger.warning("a caller's event loop was closed before its request ended")
