"""An engine without a model or a device: it takes the time that a cost model says. Imports no torch.

Tokens are seeded, log-probabilities depend on (version, position, token), and both come from no weights; what is
learnt from them means nothing. What is real: queueing, KV, batches, deadlines, versions and their spans, and that a
version is only held once its files have the digests of its manifest.
"""

import asyncio
import logging
import math
from dataclasses import dataclass, field
from typing import Protocol

from steelyard.clock import Clock
from steelyard.errors import EngineError, IntegrityError
from steelyard.ids import IdSource
from steelyard.inference.emulated_core import CoreSettings, EmulatedCore, Sequence
from steelyard.inference.emulated_tokens import LengthModel, TokenIds, emulated_logprobs, seeded_tokens
from steelyard.inference.engine import EngineHealth, KvRule, OnTokens
from steelyard.inference.time_model import TimeModel
from steelyard.types import (
    EngineStats,
    FinishReason,
    GenerateRequest,
    GenerateResult,
    LoadProof,
    Manifest,
    TokenChunk,
    VersionSpan,
)

logger = logging.getLogger(__name__)


class VersionFiles(Protocol):
    """Reads published versions. Blocking: engines call it in a thread."""

    def read(self, version_dir: str) -> tuple[Manifest, TokenIds]:
        """The manifest of a version whose files were verified, and the ids that its tokenizer can turn into text.

        Raises:
            IntegrityError: the directory does not hold what its manifest promises.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class EmulatedSettings:
    """``time_scale``: emulated seconds per second of the clock; 10 is ten times as fast as the model says.

    ``max_versions``: how many are held at a time. ``probe_tolerance`` stands in proofs; no probe is run.
    """

    core: CoreSettings
    lengths: LengthModel
    max_versions: int
    time_scale: float = 1.0
    probe_tolerance: float = 0.0


@dataclass
class _Caller:
    """Who waits for a sequence. ``num_streamed`` of its tokens were handed on."""

    sequence: Sequence
    result: asyncio.Future[GenerateResult]
    on_tokens: OnTokens | None
    num_streamed: int = 0


@dataclass
class _Held:
    """A version that can serve."""

    manifest: Manifest
    token_ids: TokenIds
    proof: LoadProof


@dataclass
class EmulatedEngine:
    """Implements :class:`steelyard.inference.engine.Engine`. One timer drives it; call :meth:`close` when done."""

    settings: EmulatedSettings
    model: TimeModel
    files: VersionFiles
    replica_id: str
    clock: Clock
    ids: IdSource
    _held: dict[int, _Held] = field(default_factory=dict)
    _callers: dict[str, _Caller] = field(default_factory=dict)
    _timer: asyncio.TimerHandle | None = None
    _failure: str = ""

    def __post_init__(self) -> None:
        self._core = EmulatedCore(self.model, self.settings.core)
        self._origin_s = self.clock.now_s()

    async def generate(self, request: GenerateRequest, on_tokens: OnTokens | None = None) -> GenerateResult:
        """See :meth:`steelyard.inference.engine.Engine.generate`."""
        self._check_alive()
        version = self._version_for(request)
        tokens, reason = seeded_tokens(request, self._held[version].token_ids, self.settings.lengths)
        self._turn()
        sequence = Sequence(
            request=request,
            tokens=tokens,
            reason=reason,
            version=version,
            deadline_s=self._emulated_s(request.deadline_at_s),
            added_s=self._emulated_s(self.clock.now_s()),
        )
        self._core.add(sequence)
        caller = _Caller(sequence, asyncio.get_running_loop().create_future(), on_tokens)
        self._callers[request.request_id] = caller
        self._turn()
        try:
            return await caller.result
        except asyncio.CancelledError:
            await self.abort(request.request_id)
            raise

    async def load(self, version_dir: str, version: int) -> LoadProof:
        """See :meth:`steelyard.inference.engine.Engine.load`."""
        self._check_alive()
        manifest, token_ids, started_s = await self._read(version_dir, version)
        held = self._held.get(version)
        if held is not None:
            if held.manifest.weights_digest != manifest.weights_digest:
                raise IntegrityError(
                    f"version {version} must keep weights_digest {held.manifest.weights_digest}, "
                    f"got {manifest.weights_digest}"
                )
            return held.proof
        if len(self._held) >= self.settings.max_versions:
            raise EngineError(
                f"{self.replica_id} must hold at most {self.settings.max_versions} versions, it holds "
                f"{sorted(self._held)} and was to load {version}"
            )
        return self._hold(manifest, token_ids, started_s)

    async def update(self, version_dir: str, version: int, kv: KvRule) -> LoadProof:
        """See :meth:`steelyard.inference.engine.Engine.update`. The new version is read beside the old one."""
        self._check_alive()
        if not self._held:
            raise EngineError(f"a version must be held to be updated to version {version}, none is")
        manifest, token_ids, started_s = await self._read(version_dir, version)
        self._turn()
        old = max(self._held)
        if old == version:
            return self._held[version].proof
        pinned = [one.request.request_id for one in self._core.using(old) if not one.request.follows_updates]
        if pinned:
            raise EngineError(f"version {old} must not be replaced while pinned requests use it, got {len(pinned)}")
        del self._held[old]
        proof = self._hold(manifest, token_ids, started_s)
        self._core.update(version, kv)
        self._core.forget(old)
        self._turn()
        return proof

    async def unload(self, version: int) -> None:
        """See :meth:`steelyard.inference.engine.Engine.unload`."""
        self._turn()
        if version not in self._held:
            raise EngineError(f"version {version} must be loaded to be unloaded, held are {sorted(self._held)}")
        num_using = len(self._core.using(version))
        if num_using:
            raise EngineError(f"version {version} must have no open requests to be unloaded, got {num_using}")
        del self._held[version]
        self._core.forget(version)

    async def pause(self) -> None:
        """See :meth:`steelyard.inference.engine.Engine.pause`."""
        self._turn()
        self._core.pause()
        self._turn()

    async def resume(self) -> None:
        """See :meth:`steelyard.inference.engine.Engine.resume`."""
        self._turn()
        self._core.resume()
        self._turn()

    async def abort(self, request_id: str) -> None:
        """See :meth:`steelyard.inference.engine.Engine.abort`."""
        self._turn()
        self._core.abort(request_id)
        self._turn()

    async def release(self, attempt_id: str) -> None:
        """See :meth:`steelyard.inference.engine.Engine.release`."""
        self._core.release(attempt_id)

    async def health(self) -> EngineHealth:
        """See :meth:`steelyard.inference.engine.Engine.health`."""
        return EngineHealth(
            replica_id=self.replica_id,
            is_healthy=not self._failure,
            is_paused=self._core.is_paused,
            versions=tuple(sorted(self._held)),
            max_versions=self.settings.max_versions,
            detail=self._failure,
        )

    async def stats(self) -> EngineStats:
        """See :meth:`steelyard.inference.engine.Engine.stats`."""
        self._turn()
        core = self._core
        return EngineStats(
            replica_id=self.replica_id,
            num_running=core.num_running,
            num_waiting=core.num_waiting,
            kv_tokens_in_use=core.kv_tokens_in_use,
            kv_tokens_capacity=self.settings.core.kv_tokens,
            prefill_tokens=core.prefill_tokens,
            decode_tokens=core.decode_tokens,
            cached_tokens=core.cached_tokens,
            busy_s=core.busy_s / self.settings.time_scale,
            versions=tuple(sorted(self._held)),
        )

    def close(self) -> None:
        """Stop the timer; open requests end as ``engine_error``."""
        self._fail("closed")

    # --- time -------------------------------------------------------------------------------------

    def _emulated_s(self, at_s: float) -> float:
        return (at_s - self._origin_s) * self.settings.time_scale

    def _turn(self) -> None:
        """Let emulated time catch up with the clock, answer who is done, and set the timer for the next event."""
        if self._failure:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        now_s = self._emulated_s(self.clock.now_s())
        ended = self._core.advance(now_s)
        for sequence in self._core.streaming:
            self._stream(self._callers.get(sequence.request.request_id))
        for sequence in ended:
            self._answer(sequence)
        next_s = self._core.next_event_s()
        if next_s is not None and math.isfinite(next_s):
            delay_s = max(0.0, next_s - now_s) / self.settings.time_scale
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._on_timer)

    def _on_timer(self) -> None:
        try:
            self._turn()
        except Exception as error:
            logger.exception("%s failed", self.replica_id)
            self._fail(f"{type(error).__name__}: {error}")

    def _fail(self, detail: str) -> None:
        self._failure = self._failure or detail
        if self._timer is not None:
            self._timer.cancel()
        for caller in self._callers.values():
            if not caller.result.done():
                sequence = caller.sequence
                caller.result.set_result(self._result(sequence, FinishReason.ENGINE_ERROR, self._failure))
        self._callers.clear()

    def _stream(self, caller: _Caller | None) -> None:
        if caller is None or caller.on_tokens is None or not caller.sequence.request.stream:
            return
        tokens = caller.sequence.tokens[caller.num_streamed : caller.sequence.num_sampled]
        if tokens:
            caller.num_streamed += len(tokens)
            caller.on_tokens(TokenChunk(request_id=caller.sequence.request.request_id, token_ids=tokens))

    def _answer(self, sequence: Sequence) -> None:
        caller = self._callers.pop(sequence.request.request_id, None)
        if caller is not None and not caller.result.done():
            self._stream(caller)
            caller.result.set_result(self._result(sequence, sequence.reason))

    # --- versions ---------------------------------------------------------------------------------

    async def _read(self, version_dir: str, version: int) -> tuple[Manifest, TokenIds, float]:
        """Verify a version's files, and take the time that loading it would."""
        started_s = self.clock.now_s()
        manifest, token_ids = await asyncio.to_thread(self.files.read, version_dir)
        if manifest.version != version:
            raise IntegrityError(f"manifest.version must be {version}, got {manifest.version}")
        left_s = self.model.load_s() / self.settings.time_scale - (self.clock.now_s() - started_s)
        await asyncio.sleep(max(0.0, left_s))
        return manifest, token_ids, started_s

    def _hold(self, manifest: Manifest, token_ids: TokenIds, started_s: float) -> LoadProof:
        proof = LoadProof(
            version=manifest.version,
            replica_id=self.replica_id,
            load_id=self.ids.new("load"),
            weights_digest=manifest.weights_digest,
            probe_max_error=0.0,
            probe_tolerance=self.settings.probe_tolerance,
            loaded_in_s=self.clock.now_s() - started_s,
        )
        self._held[manifest.version] = _Held(manifest, token_ids, proof)
        return proof

    def _version_for(self, request: GenerateRequest) -> int:
        able = [version for version in self._held if version >= request.policy_version]
        if request.follows_updates and able:
            return max(able)
        if request.policy_version not in self._held:
            raise EngineError(
                f"request {request.request_id}: policy_version must be loaded in {self.replica_id}, "
                f"got {request.policy_version}, held are {sorted(self._held)}"
            )
        return request.policy_version

    def _check_alive(self) -> None:
        if self._failure:
            raise EngineError(f"{self.replica_id} must work, but: {self._failure}")

    def _result(self, sequence: Sequence, reason: FinishReason, detail: str = "") -> GenerateResult:
        """Durations are those of the clock."""
        tokens = sequence.tokens[: sequence.num_sampled] if not detail else ()
        spans = tuple(span for span in sequence.spans if span.start < len(tokens))
        ended_s = sequence.ended_s if sequence.is_ended else self._emulated_s(self.clock.now_s())
        admitted_s = ended_s if sequence.admitted_s is None else sequence.admitted_s
        first_s = ended_s if sequence.first_token_s is None else sequence.first_token_s
        scale = self.settings.time_scale
        held = self._held.get(sequence.version)
        return GenerateResult(
            request_id=sequence.request.request_id,
            token_ids=tokens,
            logprobs=_logprobs(len(sequence.request.prompt_token_ids), tokens, spans),
            kept_logmass=(0.0,) * len(tokens),
            version_spans=spans,
            finish_reason=reason,
            replica_id=self.replica_id,
            load_id="" if held is None else held.proof.load_id,
            num_cached_tokens=sequence.num_cached,
            queued_s=(admitted_s - sequence.added_s) / scale,
            prefill_s=(first_s - admitted_s) / scale,
            decode_s=(ended_s - first_s) / scale,
            detail=detail,
        )


def _logprobs(num_prompt: int, tokens: tuple[int, ...], spans: tuple[VersionSpan, ...]) -> tuple[float, ...]:
    """Each token's under the version of its span."""
    if not tokens:
        return ()
    ends = [*(span.start for span in spans[1:]), len(tokens)]
    logprobs: list[float] = []
    for span, end in zip(spans, ends, strict=True):
        logprobs += emulated_logprobs(span.version, num_prompt + span.start, tokens[span.start : end])
    return tuple(logprobs)
