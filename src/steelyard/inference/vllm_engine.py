"""A vLLM server as an :class:`~steelyard.inference.engine.Engine`. Imports no torch.

::

    generate --token ids--> /inference/v1/generate --ids, log-probabilities, label of the weights--> GenerateResult
    load, update --> WeightLoader: pause, reload in place, digest, label, resume, probe

The server stamps each token with the label of the weights in its memory. A label is of one load and never comes twice,
so that a result can only name a version that was proven there. One version is held at a time.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from steelyard.clock import Clock
from steelyard.errors import DeadlineExceeded, EngineError, IntegrityError, SteelyardError
from steelyard.ids import IdSource
from steelyard.inference.engine import EngineHealth, KvRule, OnTokens
from steelyard.inference.vllm_api import VllmApi
from steelyard.inference.vllm_loading import VersionReader, WeightLoader
from steelyard.inference.vllm_request import Load, RunningRequest, unsampled
from steelyard.inference.vllm_stream import RequestStream
from steelyard.types import (
    EngineStats,
    FinishReason,
    GenerateRequest,
    GenerateResult,
    LoadProof,
    Manifest,
)

_MIN_TEMPERATURE = 0.01
"""Below it vLLM samples at another temperature than was asked for."""


@dataclass(frozen=True, kw_only=True)
class VllmSettings:
    """``probe_tolerance`` in nats. ``change_deadline_s`` bounds each step of a change of weights.

    ``abort_deadline_s``: how long the server may take to send the last chunk of a request that we end.
    """

    probe_tolerance: float
    change_deadline_s: float = 60.0
    abort_deadline_s: float = 5.0


@dataclass
class _Serving:
    """What is in memory. Without a proof it serves requests, whose results wait for the proof."""

    load: Load
    manifest: Manifest
    version_dir: str
    proof: LoadProof | None = None

    @property
    def vocabulary_size(self) -> int:
        """Rows of the embedding: the first published parameter whose name says so."""
        return next(one.shape[0] for one in self.manifest.parameters if "embed" in one.name)


class VllmEngine:
    """Drives one server. Whoever starts the server watches it."""

    def __init__(
        self,
        api: VllmApi,
        reader: VersionReader,
        settings: VllmSettings,
        *,
        replica_id: str,
        clock: Clock,
        ids: IdSource,
    ) -> None:
        self._api = api
        self._loader = WeightLoader(
            api, reader, tolerance=settings.probe_tolerance, deadline_s=settings.change_deadline_s
        )
        self._settings = settings
        self._replica_id = replica_id
        self._clock = clock
        self._ids = ids
        self._loads: list[Load] = []
        self._serving: _Serving | None = None
        self._failure = ""
        self._is_paused = False
        self._open: dict[str, RequestStream] = {}
        self._changing = asyncio.Lock()
        # Cleared while the server stands still for new weights: requests wait to be sent.
        self._may_send = asyncio.Event()
        self._may_send.set()
        # Cleared while weights serve that are not proven yet: results wait.
        self._is_settled = asyncio.Event()
        self._is_settled.set()
        self._max_tokens: int | None = None
        self._busy_since_s: float | None = None
        self._busy_s = 0.0

    async def generate(self, request: GenerateRequest, on_tokens: OnTokens | None = None) -> GenerateResult:
        """See :meth:`steelyard.inference.engine.Engine.generate`.

        Raises:
            EngineError: beside that, the server's answer lacks ids, log-probabilities or the label of the weights.
            RemoteFailed: the server is gone before the first token.
        """
        try:
            async with asyncio.timeout(max(0.0, request.deadline_at_s - self._clock.now_s())):
                await self._may_send.wait()
        except TimeoutError:
            return unsampled(request, self._replica_id, FinishReason.QUEUE_TIMEOUT)
        running = RunningRequest(request, self._load_for(request), self._replica_id)
        stream = RequestStream(self._api, running, self._clock, self._settings.abort_deadline_s)
        self._begin(stream)
        try:
            await stream.run(on_tokens)
            await self._wait_until_settled(request)
            return self._result(stream)
        finally:
            self._end(stream)

    async def load(self, version_dir: str, version: int) -> LoadProof:
        """See :meth:`steelyard.inference.engine.Engine.load`. Another version must be unloaded first."""
        async with self._changing:
            manifest = await self._loader.read(version_dir, version)
            held = self._serving
            if held is not None and held.load.version == version:
                return _same(held, manifest)
            if held is not None:
                raise EngineError(
                    f"{self._replica_id}: vllm holds one version at a time; version {held.load.version} must be "
                    f"unloaded, or updated, before version {version} is loaded"
                )
            return await self._change(version_dir, manifest, KvRule.RECOMPUTE)

    async def update(self, version_dir: str, version: int, kv: KvRule) -> LoadProof:
        """See :meth:`steelyard.inference.engine.Engine.update`."""
        async with self._changing:
            held = self._serving
            if held is None:
                raise EngineError(f"{self._replica_id}: a version must be loaded to be updated, none is")
            manifest = await self._loader.read(version_dir, version)
            if held.load.version == version:
                return _same(held, manifest)
            self._refuse_pinned(f"version {held.load.version} to be updated")
            if self._is_paused and self._open:
                raise EngineError(f"{self._replica_id}: must be resumed to be updated with open requests, is paused")
            return await self._change(version_dir, manifest, kv)

    async def unload(self, version: int) -> None:
        """See :meth:`steelyard.inference.engine.Engine.unload`. The memory stays taken; nothing serves from it."""
        async with self._changing:
            if self._serving is None or self._serving.load.version != version:
                raise EngineError(f"{self._replica_id}: version {version} must be held to be unloaded, it is not")
            if self._open:
                num = len(self._open)
                raise EngineError(f"version {version} must have no open requests to be unloaded, got {num}")
            self._serving = None

    async def pause(self) -> None:
        """See :meth:`steelyard.inference.engine.Engine.pause`."""
        async with self._changing:
            await self._api.pause()
            self._is_paused = True

    async def resume(self) -> None:
        """See :meth:`steelyard.inference.engine.Engine.resume`."""
        async with self._changing:
            await self._api.resume()
            self._is_paused = False

    async def abort(self, request_id: str) -> None:
        """See :meth:`steelyard.inference.engine.Engine.abort`."""
        stream = self._open.get(request_id)
        if stream is not None:
            stream.cut(FinishReason.CANCELLED)

    async def release(self, attempt_id: str) -> None:
        """See :meth:`steelyard.inference.engine.Engine.release`: vLLM's prefix cache forgets what is used least."""

    async def sleep(self, level: int = 1) -> None:
        """Give the device's memory to others: at level 1 weights go to host memory, at 2 they go away.

        Raises:
            EngineError: requests are open.
        """
        async with self._changing:
            if self._open:
                raise EngineError(f"{self._replica_id}: must have no open requests to sleep, got {len(self._open)}")
            self._may_send.clear()
            await self._api.sleep(level)

    async def wake_up(self) -> LoadProof | None:
        """Undo :meth:`sleep`, and prove again what is held: it was moved, or is read anew from the version's files.

        Raises:
            IntegrityError: memory does not hold what was published.
        """
        async with self._changing:
            await self._api.wake_up()
            held = self._serving
            if held is None:
                self._may_send.set()
                return None
            return await self._change(held.version_dir, held.manifest, KvRule.RECOMPUTE)

    async def health(self) -> EngineHealth:
        """See :meth:`steelyard.inference.engine.Engine.health`."""
        detail = self._failure
        if not detail:
            try:
                await self._api.check_alive()
            except SteelyardError as error:
                detail = str(error)
        return EngineHealth(
            replica_id=self._replica_id,
            is_healthy=not detail,
            is_paused=self._is_paused,
            versions=() if detail else self._proven_versions(),
            max_versions=1,
            detail=detail,
        )

    async def stats(self) -> EngineStats:
        """See :meth:`steelyard.inference.engine.Engine.stats`; from the server's own metrics."""
        metrics = await self._api.metrics()
        busy_s = self._busy_s
        if self._busy_since_s is not None:
            busy_s += self._clock.now_s() - self._busy_since_s
        return EngineStats(
            replica_id=self._replica_id,
            num_running=metrics.num_running,
            num_waiting=metrics.num_waiting,
            kv_tokens_in_use=round(metrics.kv_in_use_frac * metrics.kv_tokens_capacity),
            kv_tokens_capacity=metrics.kv_tokens_capacity,
            prefill_tokens=metrics.prefill_tokens,
            decode_tokens=metrics.decode_tokens,
            cached_tokens=metrics.cached_tokens,
            busy_s=busy_s,
            versions=self._proven_versions(),
        )

    def _proven_versions(self) -> tuple[int, ...]:
        serving = self._serving
        return () if serving is None or serving.proof is None else (serving.load.version,)

    # --- requests ---------------------------------------------------------------------------------

    def _load_for(self, request: GenerateRequest) -> Load:
        """The load that serves ``request``.

        Raises:
            EngineError: none does, or the server cannot sample as asked.
        """
        what = f"request {request.request_id}"
        if self._failure:
            raise EngineError(f"{self._replica_id}: {what} cannot be served: {self._failure}")
        held = self._serving
        version = None if held is None else held.load.version
        fits = version is not None and (
            version >= request.policy_version if request.follows_updates else version == request.policy_version
        )
        if held is None or not fits:
            got = f"got {request.policy_version}, held are {() if version is None else (version,)}"
            raise EngineError(f"{what}: policy_version must be loaded in {self._replica_id}, {got}")
        sampling = request.sampling
        if sampling.top_p < 1.0:
            raise EngineError(
                f"{what}: sampling.top_p must be 1 on vllm, got {sampling.top_p}: it cannot return both the "
                "log-probability over the full vocabulary and the kept mass"
            )
        if 0.0 < sampling.temperature < _MIN_TEMPERATURE:
            got = f"got {sampling.temperature}"
            raise EngineError(f"{what}: sampling.temperature must be 0 or >= {_MIN_TEMPERATURE} on vllm, {got}")
        self._check_prompt(request, held.vocabulary_size)
        return held.load

    def _check_prompt(self, request: GenerateRequest, vocabulary_size: int) -> None:
        """A token id outside the vocabulary would end the whole server."""
        ids = request.prompt_token_ids
        if not ids or min(ids) < 0 or max(ids) >= vocabulary_size:
            raise EngineError(
                f"request {request.request_id}: prompt_token_ids must be one or more ids below {vocabulary_size}, "
                f"got {f'{min(ids)} to {max(ids)}' if ids else 'none'}"
            )
        if self._max_tokens is not None and len(ids) >= self._max_tokens:
            raise EngineError(
                f"request {request.request_id}: prompt_token_ids must be fewer than max_model_len "
                f"({self._max_tokens}), got {len(ids)}"
            )

    def _result(self, stream: RequestStream) -> GenerateResult:
        running = stream.running
        request = running.request
        if running.finish is None:
            raise EngineError(f"{self._replica_id} (vllm): request {request.request_id} must end with a finish reason")
        if running.is_spoilt:
            return unsampled(request, self._replica_id, running.finish, running.detail)
        loads = self._loads[self._loads.index(running.load) :]
        try:
            spans = running.spans(loads)
        except EngineError as error:
            if running.finish is not FinishReason.ENGINE_ERROR:
                raise
            # A server that broke off while weights changed: nobody knows who sampled these tokens.
            return unsampled(request, self._replica_id, running.finish, f"{running.detail}; {error}")
        if not request.follows_updates:
            self._check_pinned(request, {span.version for span in spans})
        return GenerateResult(
            request_id=request.request_id,
            token_ids=tuple(running.token_ids),
            logprobs=tuple(running.logprobs),
            kept_logmass=(0.0,) * len(running.token_ids),
            version_spans=spans,
            finish_reason=running.finish,
            replica_id=self._replica_id,
            load_id=running.load.load_id,
            num_cached_tokens=running.num_cached_tokens,
            prefill_s=stream.prefill_s,
            decode_s=stream.decode_s,
            detail=running.detail,
        )

    def _check_pinned(self, request: GenerateRequest, sampled: set[int]) -> None:
        wrong = sampled - {request.policy_version}
        if wrong:
            raise EngineError(
                f"{self._replica_id} (vllm): request {request.request_id} must be sampled by version "
                f"{request.policy_version}, got {sorted(wrong)}"
            )

    def _begin(self, stream: RequestStream) -> None:
        request_id = stream.running.request.request_id
        if request_id in self._open:
            raise EngineError(f"{self._replica_id}: request {request_id} must have an id of its own")
        if not self._open:
            self._busy_since_s = self._clock.now_s()
        self._open[request_id] = stream

    def _end(self, stream: RequestStream) -> None:
        del self._open[stream.running.request.request_id]
        if not self._open and self._busy_since_s is not None:
            self._busy_s += self._clock.now_s() - self._busy_since_s
            self._busy_since_s = None

    async def _wait_until_settled(self, request: GenerateRequest) -> None:
        """Results that may hold tokens of a load wait until it is proven, so that none is handed out before."""
        deadline_s = self._settings.change_deadline_s
        try:
            async with asyncio.timeout(deadline_s):
                await self._is_settled.wait()
        except TimeoutError:
            what = f"the proof of the weights that sampled request {request.request_id}"
            raise DeadlineExceeded(what, (self._replica_id,), deadline_s) from None

    # --- changes of weights -----------------------------------------------------------------------

    async def _change(self, version_dir: str, manifest: Manifest, kv: KvRule) -> LoadProof:
        started_s = self._clock.now_s()
        if self._max_tokens is None:
            self._max_tokens = await self._api.max_model_tokens()
        kept_kv = kv is KvRule.KEEP and bool(self._open)
        load = Load(version=manifest.version, load_id=self._ids.new("load"), kept_kv=kept_kv)
        async with self._unproven(manifest.version):
            async with self._standing_still():
                self._serving = None
                digest = await self._loader.replace(version_dir, manifest, load)
                self._forget_old_loads()
                self._loads.append(load)
                self._serving = serving = _Serving(load, manifest, version_dir)
            error = await self._loader.probe(manifest, load)
            serving.proof = LoadProof(
                version=manifest.version,
                replica_id=self._replica_id,
                load_id=load.load_id,
                weights_digest=digest,
                probe_max_error=error,
                probe_tolerance=self._settings.probe_tolerance,
                loaded_in_s=self._clock.now_s() - started_s,
            )
        self._failure = ""
        return serving.proof

    @asynccontextmanager
    async def _standing_still(self) -> AsyncIterator[None]:
        """The server computes nothing, and no request is sent to it. It goes on afterwards, whatever happened."""
        self._may_send.clear()
        try:
            await self._api.pause()
            yield
        finally:
            self._may_send.set()
            await self._api.resume()

    @asynccontextmanager
    async def _unproven(self, version: int) -> AsyncIterator[None]:
        """Until the end of the block results wait. A failure leaves memory unknown: nothing is held then."""
        self._is_settled.clear()
        try:
            yield
            if self._is_paused:
                await self._api.pause()
        except BaseException as error:
            self._serving = None
            self._failure = f"version {version} could not be loaded: {type(error).__name__}: {error}"
            for stream in self._open.values():
                stream.spoil(f"{self._replica_id}: {self._failure}")
            raise
        finally:
            self._is_settled.set()

    def _forget_old_loads(self) -> None:
        """Loads that no open request was sent under are never asked for again."""
        needed = [self._loads.index(one.running.load) for one in self._open.values()]
        del self._loads[: min(needed, default=len(self._loads))]

    def _refuse_pinned(self, what: str) -> None:
        pinned = [name for name, one in self._open.items() if not one.running.request.follows_updates]
        if pinned:
            raise EngineError(f"{self._replica_id}: {what} must be used by no pinned request, got {', '.join(pinned)}")


def _same(held: _Serving, manifest: Manifest) -> LoadProof:
    if held.manifest.weights_digest != manifest.weights_digest:
        raise IntegrityError(
            f"version {manifest.version} must keep weights_digest {held.manifest.weights_digest}, "
            f"got {manifest.weights_digest}"
        )
    if held.proof is None:
        raise EngineError(f"version {manifest.version} must be proven before it is loaded again")
    return held.proof
