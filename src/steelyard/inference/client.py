"""An engine in another process. Imports no torch."""

from dataclasses import dataclass

import msgspec

from steelyard.clock import Clock
from steelyard.inference import engine as api
from steelyard.inference.engine import EngineHealth, KvRule, Nothing, OnTokens
from steelyard.packed_floats import packed
from steelyard.processes.channel import Client, StreamingEndpoint
from steelyard.types import (
    EngineStats,
    FinishReason,
    GenerateRequest,
    GenerateResult,
    LoadProof,
    Record,
    TokenChunk,
    VersionSpan,
)

_NOTHING = Nothing()


class _PackedResult(Record, frozen=True, kw_only=True):
    """A :class:`GenerateResult` as it arrives; its floats are looked at by the recorder's check, all at once."""

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: msgspec.Raw
    kept_logmass: msgspec.Raw
    version_spans: tuple[VersionSpan, ...]
    finish_reason: FinishReason
    replica_id: str
    load_id: str
    num_cached_tokens: int = 0
    queued_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    detail: str = ""

    def unpacked(self) -> GenerateResult:
        return GenerateResult(
            request_id=self.request_id,
            token_ids=self.token_ids,
            logprobs=packed(self.logprobs),
            kept_logmass=packed(self.kept_logmass),
            version_spans=self.version_spans,
            finish_reason=self.finish_reason,
            replica_id=self.replica_id,
            load_id=self.load_id,
            num_cached_tokens=self.num_cached_tokens,
            queued_s=self.queued_s,
            prefill_s=self.prefill_s,
            decode_s=self.decode_s,
            detail=self.detail,
        )


_GENERATE: StreamingEndpoint[GenerateRequest, _PackedResult, TokenChunk] = StreamingEndpoint(
    api.GENERATE.name, GenerateRequest, _PackedResult, TokenChunk
)


@dataclass(frozen=True, kw_only=True)
class ClientDeadlines:
    """How long to wait for an answer, in seconds. ``answer_s`` is added to a generation request's own deadline."""

    answer_s: float = 35.0
    load_s: float = 60.0


class EngineClient:
    """:class:`steelyard.inference.engine.Engine` over a connection.

    Every method raises, beside what the engine raises: DeadlineExceeded where no answer comes in time, RemoteFailed
    or ProcessDied where the other process has gone; the latter two at once.
    """

    def __init__(self, client: Client, clock: Clock, deadlines: ClientDeadlines) -> None:
        self._client = client
        self._clock = clock
        self._deadlines = deadlines

    async def generate(self, request: GenerateRequest, on_tokens: OnTokens | None = None) -> GenerateResult:
        """See :meth:`steelyard.inference.engine.Engine.generate`."""
        left_s = max(0.0, request.deadline_at_s - self._clock.now_s())
        result = await self._client.call_streaming(
            _GENERATE, request, on_tokens or _ignore, deadline_s=left_s + self._deadlines.answer_s
        )
        return result.unpacked()

    async def load(self, version_dir: str, version: int) -> LoadProof:
        """See :meth:`steelyard.inference.engine.Engine.load`."""
        request = api.LoadRequest(version_dir=version_dir, version=version)
        return await self._client.call(api.LOAD, request, deadline_s=self._deadlines.load_s)

    async def update(self, version_dir: str, version: int, kv: KvRule) -> LoadProof:
        """See :meth:`steelyard.inference.engine.Engine.update`."""
        request = api.UpdateRequest(version_dir=version_dir, version=version, kv=kv)
        return await self._client.call(api.UPDATE, request, deadline_s=self._deadlines.load_s)

    async def unload(self, version: int) -> None:
        """See :meth:`steelyard.inference.engine.Engine.unload`."""
        await self._client.call(api.UNLOAD, api.VersionRef(version=version), deadline_s=self._deadlines.answer_s)

    async def pause(self) -> None:
        """See :meth:`steelyard.inference.engine.Engine.pause`."""
        await self._client.call(api.PAUSE, _NOTHING, deadline_s=self._deadlines.answer_s)

    async def resume(self) -> None:
        """See :meth:`steelyard.inference.engine.Engine.resume`."""
        await self._client.call(api.RESUME, _NOTHING, deadline_s=self._deadlines.answer_s)

    async def abort(self, request_id: str) -> None:
        """See :meth:`steelyard.inference.engine.Engine.abort`."""
        await self._client.call(api.ABORT, api.RequestRef(request_id=request_id), deadline_s=self._deadlines.answer_s)

    async def release(self, attempt_id: str) -> None:
        """See :meth:`steelyard.inference.engine.Engine.release`."""
        await self._client.call(api.RELEASE, api.AttemptRef(attempt_id=attempt_id), deadline_s=self._deadlines.answer_s)

    async def health(self) -> EngineHealth:
        """See :meth:`steelyard.inference.engine.Engine.health`."""
        return await self._client.call(api.HEALTH, _NOTHING, deadline_s=self._deadlines.answer_s)

    async def stats(self) -> EngineStats:
        """See :meth:`steelyard.inference.engine.Engine.stats`."""
        return await self._client.call(api.STATS, _NOTHING, deadline_s=self._deadlines.answer_s)


def _ignore(_chunk: object) -> None:
    """Streamed tokens that nobody asked for."""
