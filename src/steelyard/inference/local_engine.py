"""The local engine: scheduler, key-value cache and model runner joined, behind an asynchronous front.

::

    event loop                          engine thread (all tensors)
    generate ---- command ------------> scheduler.add
                                        loop: commands -> plan -> forward passes -> commit
    future   <--- call_soon_threadsafe- finished, new tokens

:class:`EngineCore` is the synchronous half: it does one step when told to, and tests drive it by hand.
:class:`LocalEngine` runs a core in one thread. If the thread fails, every open request fails with it, at once.
"""

import asyncio
import ctypes
import gc
import logging
import math
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from steelyard.clock import Clock
from steelyard.errors import DeadlineExceeded, EngineError, IntegrityError
from steelyard.ids import IdSource
from steelyard.inference.engine import EngineHealth, LoadedVersion, OnTokens, VersionLoader
from steelyard.inference.kv_blocks import BlockTable
from steelyard.inference.model_runner import ModelRunner
from steelyard.inference.scheduler import Batch, Scheduler, result_of
from steelyard.types import EngineStats, GenerateRequest, GenerateResult, LoadProof, TokenChunk

logger = logging.getLogger(__name__)

T = TypeVar("T")

_IDLE_WAIT_S = 1.0

# Parameters of glibc's mallopt(3), and the values that keep freed memory in the process.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MAX_HEAP_CHUNK_BYTES = 32 << 20
_MAX_KEPT_BYTES = 128 << 20


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """Sizes of a local engine.

    ``max_versions`` is ``max_policy_lag + 2``. ``row_tokens`` is the longest sequence. ``kv_tokens`` bounds what is
    reserved; rows are strips of address space, of which only the written part takes memory. ``answer_deadline_s`` is
    how long the front waits for its thread beyond a request's own deadline.
    """

    max_running: int = 64
    row_tokens: int = 1024
    kv_tokens: int = 131_072
    prefill_chunk_tokens: int = 512
    max_versions: int = 3
    probe_tolerance: float = 1e-4
    answer_deadline_s: float = 30.0
    device: str = "cpu"

    @property
    def num_rows(self) -> int:
        """Twice what runs at once, or as many as ``kv_tokens`` fills: room for sequences between two turns."""
        return max(2 * self.max_running, self.kv_tokens // self.row_tokens)


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


class EngineCore:
    """One step at a time, in one thread. The thread that steps it is the only one that may call it."""

    def __init__(
        self, settings: EngineSettings, loader: VersionLoader, *, replica_id: str, clock: Clock, ids: IdSource
    ) -> None:
        self.settings = settings
        self.replica_id = replica_id
        self._loader = loader
        self._clock = clock
        self._ids = ids
        self._blocks = BlockTable(
            num_rows=settings.num_rows, row_tokens=settings.row_tokens, capacity_tokens=settings.kv_tokens
        )
        self.scheduler = Scheduler(
            self._blocks, max_running=settings.max_running, prefill_chunk_tokens=settings.prefill_chunk_tokens
        )
        self._runner = ModelRunner(
            self._blocks, max_versions=settings.max_versions, device=torch.device(settings.device)
        )
        self._proofs: dict[int, LoadProof] = {}
        self._busy_s = 0.0

    @property
    def versions(self) -> tuple[int, ...]:
        """Versions that can serve, ascending."""
        return self._runner.versions

    def add(self, request: GenerateRequest) -> None:
        """Queue a request.

        Raises:
            EngineError: its version is not held, or it can never be served.
        """
        if request.policy_version not in self._proofs:
            raise EngineError(
                f"request {request.request_id}: policy_version must be loaded in {self.replica_id}, "
                f"got {request.policy_version}, held are {self.versions}"
            )
        self.scheduler.add(request, self._clock.now_s())

    def abort(self, request_id: str) -> None:
        """End a request as cancelled."""
        self.scheduler.abort(request_id, self._clock.now_s())

    def step(self) -> tuple[list[TokenChunk], list[GenerateResult]]:
        """Compute one step for every version; returns new tokens of streaming requests, and ended requests."""
        started_s = self._clock.now_s()
        chunks: list[TokenChunk] = []
        batches = self.scheduler.plan(started_s)
        for batch in batches:
            chunks.extend(self._run_batch(batch))
        if batches:
            self._busy_s += self._clock.now_s() - started_s
        return chunks, self.take_results()

    def take_results(self) -> list[GenerateResult]:
        """Requests that have ended since the last call."""
        return [
            result_of(
                finished,
                replica_id=self.replica_id,
                load_id=self._proofs[finished.state.info.version].load_id,
            )
            for finished in self.scheduler.take_finished()
        ]

    def install(self, loaded: LoadedVersion, version: int, started_s: float) -> LoadProof:
        """Hold a loaded version after proving it; a version that is held already must be the same weights.

        Raises:
            IntegrityError: number, loaded digest or probe do not agree with the manifest; nothing is kept.
            EngineError: no room.
        """
        manifest = loaded.manifest
        if manifest.version != version:
            raise IntegrityError(f"manifest.version must be {version}, got {manifest.version}")
        held = self._proofs.get(version)
        if held is not None:
            if held.weights_digest != manifest.weights_digest:
                raise IntegrityError(
                    f"version {version} must keep weights_digest {held.weights_digest}, got {manifest.weights_digest}"
                )
            return held
        self._runner.install(version, loaded.module)
        try:
            proof = self._prove(loaded, started_s)
        except BaseException:
            self._runner.remove(version)
            raise
        self._proofs[version] = proof
        return proof

    def unload(self, version: int) -> None:
        """Forget a version and its KV.

        Raises:
            EngineError: it is not held, or requests use it.
        """
        num_using = self.scheduler.num_using(version)
        if num_using:
            raise EngineError(f"version {version} must have no open requests to be unloaded, got {num_using}")
        self._runner.remove(version)
        del self._proofs[version]
        self._blocks.drop_version(version)

    def stats(self) -> EngineStats:
        """Load and counters at this instant."""
        return EngineStats(
            replica_id=self.replica_id,
            num_running=self.scheduler.num_running,
            num_waiting=self.scheduler.num_waiting,
            kv_tokens_in_use=self._blocks.tokens_in_use,
            kv_tokens_capacity=self._blocks.capacity_tokens,
            prefill_tokens=self.scheduler.prefill_tokens,
            decode_tokens=self.scheduler.decode_tokens,
            cached_tokens=self.scheduler.cached_tokens,
            busy_s=self._busy_s,
            versions=self.versions,
        )

    def _run_batch(self, batch: Batch) -> list[TokenChunk]:
        try:
            sampled = self._runner.run(batch)
        except Exception as error:
            # What is in the cache for these sequences is unknown now; they end, and the others go on.
            logger.exception("a forward pass of version %d failed", batch.version)
            detail = f"{self.replica_id}: the forward pass failed with {type(error).__name__}: {error}"
            self.scheduler.fail([item.sequence_id for item in batch.items], self._clock.now_s(), detail)
            return []
        return self.scheduler.commit(batch, sampled, self._clock.now_s())

    def _prove(self, loaded: LoadedVersion, started_s: float) -> LoadProof:
        manifest, tolerance = loaded.manifest, self.settings.probe_tolerance
        digest = self._loader.loaded_digest(loaded.module)
        if digest != manifest.weights_digest:
            raise IntegrityError(
                f"version {manifest.version}: the digest of the loaded parameters must be {manifest.weights_digest}, "
                f"got {digest}"
            )
        found = self._runner.probe_logprobs(manifest.version, manifest.probe.sequences)
        error = probe_error(found, manifest.probe.logprobs)
        # Not "error > tolerance": a probe that gives NaN must fail too.
        if not error <= tolerance:
            raise IntegrityError(
                f"version {manifest.version}: probe log-probabilities must agree within {tolerance}, "
                f"largest difference is {error}"
            )
        return LoadProof(
            version=manifest.version,
            replica_id=self.replica_id,
            load_id=self._ids.new("load"),
            weights_digest=digest,
            probe_max_error=error,
            probe_tolerance=tolerance,
            loaded_in_s=self._clock.now_s() - started_s,
        )


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
        """See :meth:`steelyard.inference.engine.Engine.load`. Reading goes on beside generation."""
        started_s = self._clock.now_s()
        loaded = await asyncio.to_thread(self._read, version_dir)
        return await self._in_thread(lambda: self._core.install(loaded, version, started_s), f"version {version}")

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

    def _read(self, version_dir: str) -> LoadedVersion:
        """Read a version, in a thread of its own that uses no others.

        The OpenMP library keeps a pool for each thread that computes with several. With the engine's thread a second
        one would make more threads than cores, and then GNU's library stops spinning in all of them: each of the
        hundreds of parallel loops in a forward pass would put its threads to sleep and wake them again, which was
        seen to make two threads slower than one.
        """
        torch.set_num_threads(1)
        return self._loader.load(version_dir)

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


def probe_error(found: list[list[float]], expected: tuple[tuple[float, ...], ...]) -> float:
    """Largest absolute difference of two sets of log-probabilities; NaN if any number is NaN.

    Raises:
        IntegrityError: their shapes differ.
    """
    if [len(row) for row in found] != [len(row) for row in expected]:
        raise IntegrityError(
            f"probe.logprobs must hold one number for each next token, {[len(row) for row in found]}, "
            f"got {[len(row) for row in expected]}"
        )
    differences = [
        abs(left - right)
        for found_row, expected_row in zip(found, expected, strict=True)
        for left, right in zip(found_row, expected_row, strict=True)
    ]
    # max() would pass over a NaN that does not come first.
    return float("nan") if any(math.isnan(value) for value in differences) else max(differences)
