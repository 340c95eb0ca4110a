"""An engine without a model: seeded tokens, and log-probabilities that depend on the version. Imports no torch."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import xxhash

from steelyard.clock import Clock
from steelyard.errors import EngineError, SteelyardError
from steelyard.inference.engine import EngineHealth, KvRule, OnTokens
from steelyard.types import (
    EngineStats,
    FinishReason,
    GenerateRequest,
    GenerateResult,
    LoadProof,
    TokenChunk,
    VersionSpan,
)

Script = Callable[[GenerateRequest], Sequence[int]]


def fake_logprob(version: int, position: int, token_id: int) -> float:
    """What :class:`FakeEngine` records for a token at ``position`` of its sequence: in [-2, 0), exact."""
    return -(1 + _hash(version, position, token_id) % 2048) / 1024


@dataclass
class FakeEngine:
    """Implements :class:`steelyard.inference.engine.Engine`.

    Args:
        clock: for deadlines.
        replica_id: its name.
        vocab_size: seeded tokens lie below it.
        script: the tokens to answer with, by request; without one they are drawn from seed and prompt.
        failure: raised by every call while it is set, as by a dead replica.
        kv_tokens: the KV that it says it has room for; 0 says nothing.
        is_holding: while set, requests wait until :meth:`let_go`, an abort or their cancellation.

        is_streaming_first: tokens are streamed before the request is held, and not after.

    ``requests``, ``aborted``, ``released`` and ``loaded_dirs`` show what was asked of it, ``num_failed`` how many calls
    met ``failure``.
    """

    clock: Clock
    replica_id: str = "rep_fake"
    vocab_size: int = 256
    script: Script | None = None
    failure: SteelyardError | None = None
    kv_tokens: int = 0
    is_holding: bool = False
    is_streaming_first: bool = False
    is_paused: bool = False
    requests: list[GenerateRequest] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    released: list[str] = field(default_factory=list)
    loaded_dirs: dict[int, str] = field(default_factory=dict)
    _open: dict[str, asyncio.Event] = field(default_factory=dict)
    num_failed: int = 0
    _num_tokens: int = 0

    async def generate(self, request: GenerateRequest, on_tokens: OnTokens | None = None) -> GenerateResult:
        """Answer with scripted or seeded tokens, cut at a stop token or ``max_tokens``."""
        self._fail()
        first = self._version_for(request)
        self.requests.append(request)
        tokens, reason = self._tokens_for(request)
        if self.clock.now_s() >= request.deadline_at_s:
            return self._result(request, (), FinishReason.QUEUE_TIMEOUT, first)
        if self.is_streaming_first:
            self._stream(request, tokens, on_tokens)
        if self.is_holding or self.is_paused:
            await self._hold(request.request_id)
            self._fail()
        if request.request_id in self.aborted:
            return self._result(request, (), FinishReason.CANCELLED, first)
        if not self.is_streaming_first:
            self._stream(request, tokens, on_tokens)
        self._num_tokens += len(tokens)
        return self._result(request, tokens, reason, first)

    async def load(self, version_dir: str, version: int) -> LoadProof:
        """Hold a version; nothing is read."""
        self._fail()
        self.loaded_dirs[version] = version_dir
        return LoadProof(
            version=version,
            replica_id=self.replica_id,
            load_id=self.load_id(version),
            weights_digest=f"fake_{version}",
            probe_max_error=0.0,
            probe_tolerance=0.0,
            loaded_in_s=0.0,
        )

    async def update(self, version_dir: str, version: int, kv: KvRule) -> LoadProof:
        """Hold ``version`` in the place of the newest; requests that are held are answered half by each."""
        self._fail()
        if not self.loaded_dirs:
            raise EngineError(f"a version must be held to be updated to version {version}")
        del self.loaded_dirs[max(self.loaded_dirs)]
        return await self.load(version_dir, version)

    def load_id(self, version: int) -> str:
        """The load that serves a version."""
        return f"load_{self.replica_id}_{version}"

    async def unload(self, version: int) -> None:
        """Forget a version."""
        self._fail()
        if self.loaded_dirs.pop(version, None) is None:
            raise EngineError(f"version {version} must be loaded to be unloaded, held are {sorted(self.loaded_dirs)}")

    async def pause(self) -> None:
        """Hold requests from now on."""
        self._fail()
        self.is_paused = True

    async def resume(self) -> None:
        """Let held requests go on."""
        self._fail()
        self.is_paused = False
        if not self.is_holding:
            self.let_go()

    async def abort(self, request_id: str) -> None:
        """End an open request as cancelled."""
        self._fail()
        if request_id in self._open:
            self.aborted.append(request_id)
            self._open[request_id].set()

    async def release(self, attempt_id: str) -> None:
        """Note that an attempt has ended."""
        self._fail()
        self.released.append(attempt_id)

    async def health(self) -> EngineHealth:
        """Healthy unless ``failure`` is set."""
        self._fail()
        return EngineHealth(
            replica_id=self.replica_id, is_healthy=True, is_paused=self.is_paused, versions=tuple(self.loaded_dirs)
        )

    async def stats(self) -> EngineStats:
        """Open requests and tokens so far."""
        self._fail()
        return EngineStats(
            replica_id=self.replica_id,
            num_running=len(self._open),
            num_waiting=0,
            kv_tokens_in_use=0,
            kv_tokens_capacity=self.kv_tokens,
            prefill_tokens=sum(len(request.prompt_token_ids) for request in self.requests),
            decode_tokens=self._num_tokens,
            cached_tokens=0,
            busy_s=0.0,
            versions=tuple(self.loaded_dirs),
        )

    def let_go(self) -> None:
        """Stop holding; open requests are answered."""
        self.is_holding = False
        for event in self._open.values():
            event.set()

    def die(self, error: SteelyardError) -> None:
        """Fail open requests and all later calls with ``error``."""
        self.failure = error
        self.let_go()

    async def _hold(self, request_id: str) -> None:
        self._open[request_id] = asyncio.Event()
        try:
            await self._open[request_id].wait()
        finally:
            del self._open[request_id]

    def _stream(self, request: GenerateRequest, tokens: Sequence[int], on_tokens: OnTokens | None) -> None:
        if request.stream and on_tokens is not None:
            for token_id in tokens:
                on_tokens(TokenChunk(request_id=request.request_id, token_ids=(token_id,)))

    def _fail(self) -> None:
        if self.failure is not None:
            self.num_failed += 1
            raise self.failure

    def _tokens_for(self, request: GenerateRequest) -> tuple[tuple[int, ...], FinishReason]:
        limit = request.sampling.max_tokens
        wanted = self._seeded(request, limit) if self.script is None else tuple(self.script(request))
        for index, token_id in enumerate(wanted[:limit]):
            if token_id in request.stop_token_ids:
                return wanted[: index + 1], FinishReason.STOP
        return wanted[:limit], FinishReason.LENGTH

    def _seeded(self, request: GenerateRequest, limit: int) -> tuple[int, ...]:
        seed = request.sampling.seed if request.sampling.seed is not None else request.request_id
        start = len(request.prompt_token_ids)
        return tuple(_hash(seed, start + index, request.prompt_token_ids) % self.vocab_size for index in range(limit))

    def _version_for(self, request: GenerateRequest) -> int:
        may = [v for v in self.loaded_dirs if v >= request.policy_version] if request.follows_updates else []
        if not may and request.policy_version not in self.loaded_dirs:
            raise EngineError(f"request {request.request_id}: version {request.policy_version} must be loaded")
        return max(may, default=request.policy_version)

    def _result(
        self, request: GenerateRequest, tokens: tuple[int, ...], reason: FinishReason, first: int
    ) -> GenerateResult:
        """The answer, begun under version ``first``."""
        start = len(request.prompt_token_ids)
        last = self._version_for(request) if request.follows_updates else first
        change = len(tokens) // 2 if last != first else len(tokens)
        spans = (VersionSpan(start=0, version=first), VersionSpan(start=change, version=last))
        versions = [first if index < change else last for index in range(len(tokens))]
        return GenerateResult(
            request_id=request.request_id,
            token_ids=tokens,
            logprobs=tuple(
                fake_logprob(version, start + index, token)
                for index, (version, token) in enumerate(zip(versions, tokens, strict=True))
            ),
            kept_logmass=(0.0,) * len(tokens),
            version_spans=tuple(span for span in spans if span.start < len(tokens)),
            finish_reason=reason,
            replica_id=self.replica_id,
            load_id=self.load_id(last),
        )


def _hash(*parts: object) -> int:
    return int(xxhash.xxh3_64_intdigest(repr(parts).encode()))
