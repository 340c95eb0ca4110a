"""The routes of a vLLM server that we use, and its answers as records.

Failures are of two kinds. What the server says of one request (a status of 4xx, or an answer that lacks what was asked
for) is an :class:`EngineError`. A server that is gone, breaks off, or answers 5xx is a :class:`RemoteFailed`: others
may serve the request.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import aiohttp
import msgspec

from steelyard.errors import DeadlineExceeded, EngineError, RemoteFailed
from steelyard.inference.vllm_metrics import EngineMetrics, parse_metrics
from steelyard.types import GenerateRequest

T = TypeVar("T")

REQUEST_PREFIX = "generate-tokens-"
"""What the server puts before the ids of our requests."""

_LOWEST = -9999.0
"""The server writes this where a log-probability is NaN or minus infinity."""
_MAX_DETAIL_CHARS = 500
_GONE = (aiohttp.ClientError, OSError)
_SEED_RANGE = 1 << 63
_DATA = b"data: "
_DONE = b"[DONE]"


class Logprob(msgspec.Struct, frozen=True):
    """Of one token. ``logprob`` None: it is no number."""

    token_id: int
    logprob: float | None = None

    @property
    def is_number(self) -> bool:
        """Whether it says anything. ``-9999`` stands for NaN."""
        return self.logprob is not None and _LOWEST < self.logprob <= 0.0


class LogprobList(msgspec.Struct, frozen=True):
    """One entry per generated token."""

    content: list[Logprob] | None = None


class LabelSpan(msgspec.Struct, frozen=True):
    """Tokens ``start`` to ``end`` (not included) were sampled while the server's weights had the label ``version``."""

    version: str
    start: int
    end: int


class Choice(msgspec.Struct, frozen=True):
    """Tokens since the last chunk; ``finish_reason`` and ``weight_versions`` come with the last."""

    finish_reason: str | None = None
    token_ids: list[int] | None = None
    logprobs: LogprobList | None = None
    weight_versions: list[LabelSpan] | None = None


class PromptDetails(msgspec.Struct, frozen=True):
    """``cached_tokens``: of the prompt, found in the prefix cache."""

    cached_tokens: int | None = None


class Usage(msgspec.Struct, frozen=True):
    """Comes in a chunk of its own, last."""

    prompt_tokens_details: PromptDetails | None = None


class Failure(msgspec.Struct, frozen=True):
    """An error in the middle of a stream."""

    message: str = ""
    code: int | str | None = None


class Chunk(msgspec.Struct, frozen=True):
    """One event of a stream."""

    choices: list[Choice] = msgspec.field(default_factory=list)
    usage: Usage | None = None
    error: Failure | None = None


class _PromptToken(msgspec.Struct, frozen=True):
    logprob: float | None = None


class _Scored(msgspec.Struct, frozen=True):
    prompt_logprobs: list[dict[str, _PromptToken] | None] | None = None


class _RpcAnswer(msgspec.Struct, frozen=True):
    results: list[Any]


class _Success(msgspec.Struct, frozen=True):
    success: bool = False


class _WeightInfo(msgspec.Struct, frozen=True):
    weight_version: str


class _Model(msgspec.Struct, frozen=True):
    max_model_len: int | None = None


class _Models(msgspec.Struct, frozen=True):
    data: list[_Model] = msgspec.field(default_factory=list)


class VllmApi:
    """One vLLM server.

    Args:
        session: whose connector reaches it.
        url: base URL.
        name: how messages call it.
        call_deadline_s: for one control call; generation has its own.
    """

    def __init__(self, session: aiohttp.ClientSession, url: str, name: str, call_deadline_s: float) -> None:
        self._session = session
        self._url = url.rstrip("/")
        self._name = name
        self._call_deadline_s = call_deadline_s

    @asynccontextmanager
    async def generate(self, request: GenerateRequest, salt: str) -> AsyncIterator[AsyncIterator[Chunk]]:
        """Stream a request. Leaving the block before the end aborts it at the server.

        Args:
            salt: requests share cached prefixes only with those of the same salt.

        Raises:
            EngineError: the server refuses the request.
            RemoteFailed: the server is gone, fails, or breaks off; also while chunks are read.
        """
        what = f"request {request.request_id}"
        try:
            async with self._session.post(
                f"{self._url}/inference/v1/generate", json=_generate_body(request, salt), timeout=_NO_TIMEOUT
            ) as response:
                await self._check_status(response, what)
                yield self._chunks(response, what)
        except _GONE as error:
            raise RemoteFailed(f"{self._name}: {what}: the server broke off: {_said(error)}") from error

    async def score(self, token_ids: Sequence[int], salt: str) -> tuple[float, ...]:
        """Log-probability at temperature 1 of each token after the first, by the path that serves prompts.

        Raises:
            EngineError: the answer does not hold them.
            RemoteFailed, DeadlineExceeded: the server fails.
        """
        body = {
            "request_id": f"probe-{salt}",
            "token_ids": list(token_ids),
            "cache_salt": salt,
            "sampling_params": {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0, "detokenize": False},
        }
        scored = await self._post("/inference/v1/generate", body, _Scored)
        rows = scored.prompt_logprobs or []
        if len(rows) != len(token_ids):
            raise EngineError(
                f"{self._name}: a probe of {len(token_ids)} tokens must get as many rows, got {len(rows)}"
            )
        found = [(row or {}).get(str(token_id)) for row, token_id in zip(rows[1:], token_ids[1:], strict=True)]
        return tuple(one.logprob if one is not None and one.logprob is not None else float("nan") for one in found)

    async def call_workers(self, method: str, arguments: Mapping[str, Any], deadline_s: float) -> list[Any]:
        """Call a method of every worker; one answer each.

        Raises:
            RemoteFailed, DeadlineExceeded: it fails in a worker, or takes too long.
        """
        body = {"method": method, "kwargs": dict(arguments)}
        return (await self._post("/collective_rpc", body, _RpcAnswer, deadline_s)).results

    async def pause(self) -> None:
        """Stop computing; requests are kept as they are. Returns when no step is running."""
        await self._post("/pause?mode=keep", {}, None)

    async def resume(self) -> None:
        """Compute again."""
        await self._post("/resume", {}, None)

    async def set_label(self, label: str) -> None:
        """Stamp all tokens that are sampled from now on with ``label``."""
        await self._post("/update_weight_version", {"new_version": label}, None)

    async def label(self) -> str:
        """What tokens are stamped with now."""
        return (await self._get("/weight_info", _WeightInfo)).weight_version

    async def forget_kv(self) -> None:
        """Empty the prefix cache; running requests compute theirs again.

        Raises:
            EngineError: the server keeps some.
        """
        done = await self._post("/reset_prefix_cache?reset_running_requests=true", {}, _Success)
        if not done.success:
            raise EngineError(f"{self._name}: /reset_prefix_cache must succeed, it did not")

    async def abort(self, request_id: str) -> None:
        """End a request; its stream still gets its last chunk."""
        await self._post("/abort_requests", {"request_ids": [REQUEST_PREFIX + request_id]}, None)

    async def sleep(self, level: int) -> None:
        """Give up the memory of the KV cache and, at level 1, move the weights out of the device."""
        await self._post(f"/sleep?level={level}&mode=keep", {}, None)

    async def wake_up(self) -> None:
        """Undo :meth:`sleep`."""
        await self._post("/wake_up", {}, None)

    async def max_model_tokens(self) -> int | None:
        """The longest sequence that is served; None if the server does not say."""
        models = (await self._get("/v1/models", _Models)).data
        return models[0].max_model_len if models else None

    async def check_alive(self) -> None:
        """Return if the server says that it is well.

        Raises:
            RemoteFailed, DeadlineExceeded: it does not.
        """
        await self._get("/health", None)

    async def metrics(self) -> EngineMetrics:
        """Load and counters."""
        return parse_metrics((await self._call("GET", "/metrics", None, self._call_deadline_s)).decode())

    async def _post(
        self, path: str, body: Mapping[str, Any], answer: type[T] | None, deadline_s: float | None = None
    ) -> T:
        return self._decoded(path, await self._call("POST", path, body, deadline_s or self._call_deadline_s), answer)

    async def _get(self, path: str, answer: type[T] | None) -> T:
        return self._decoded(path, await self._call("GET", path, None, self._call_deadline_s), answer)

    def _decoded(self, path: str, data: bytes, answer: type[T] | None) -> T:
        if answer is None:
            return None  # type: ignore[return-value]
        try:
            return msgspec.json.decode(data, type=answer)
        except msgspec.MsgspecError as error:
            raise EngineError(f"{self._name}: {path} must answer as vLLM 0.32 does: {error}") from error

    async def _call(self, method: str, path: str, body: Mapping[str, Any] | None, deadline_s: float) -> bytes:
        try:
            async with (
                asyncio.timeout(deadline_s),
                self._session.request(method, self._url + path, json=body, timeout=_NO_TIMEOUT) as response,
            ):
                await self._check_status(response, path)
                return await response.read()
        except TimeoutError:
            raise DeadlineExceeded(path, (self._name,), deadline_s) from None
        except _GONE as error:
            raise RemoteFailed(f"{self._name}: {path}: no answer: {_said(error)}") from error

    async def _check_status(self, response: aiohttp.ClientResponse, what: str) -> None:
        if response.status < 400:
            return
        said = (await response.content.read(_MAX_DETAIL_CHARS)).decode(errors="replace")
        kind = EngineError if response.status < 500 else RemoteFailed
        raise kind(f"{self._name}: {what}: status {response.status}: {said}")

    async def _chunks(self, response: aiohttp.ClientResponse, what: str) -> AsyncIterator[Chunk]:
        """The events of a stream; one that ends without ``[DONE]`` was broken off."""
        async for line in response.content:
            if not line.startswith(_DATA):
                continue
            data = line[len(_DATA) :].strip()
            if data == _DONE:
                return
            try:
                chunk = msgspec.json.decode(data, type=Chunk)
            except msgspec.MsgspecError as error:
                raise EngineError(f"{self._name}: {what}: a chunk must be as vLLM 0.32 sends it: {error}") from error
            if chunk.error is not None:
                raise _stream_failure(self._name, what, chunk.error)
            yield chunk
        raise RemoteFailed(f"{self._name}: {what}: the stream ended before its end mark")


_NO_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_read=None)
"""Deadlines are ours."""


def _generate_body(request: GenerateRequest, salt: str) -> dict[str, Any]:
    """Stop tokens are exactly ours: the model's own end token counts only where it is among them."""
    sampling = request.sampling
    return {
        "request_id": request.request_id,
        "token_ids": request.prompt_token_ids,
        "stream": True,
        "stream_options": {"include_usage": True},
        "cache_salt": salt,
        "sampling_params": {
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": 1.0,
            "seed": None if sampling.seed is None else sampling.seed % _SEED_RANGE,
            "logprobs": 0,
            "ignore_eos": True,
            "stop_token_ids": request.stop_token_ids,
            "detokenize": False,
        },
    }


def _stream_failure(name: str, what: str, failure: Failure) -> Exception:
    is_refusal = isinstance(failure.code, int) and failure.code < 500
    kind = EngineError if is_refusal else RemoteFailed
    return kind(f"{name}: {what}: {failure.message[:_MAX_DETAIL_CHARS]}")


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
