"""The routes of a vLLM server that we use, without a model: seeded tokens under labels, and faults on request.

Imports no torch. Its memory holds what the manifest in the reloaded directory promises, laid out as vLLM does it.
"""

import asyncio
import json
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from steelyard.inference.vllm_api import REQUEST_PREFIX, VllmApi
from steelyard.inference.vllm_parameters import FUSED
from steelyard.testing.engine import fake_logprob
from steelyard.types import Manifest, ParameterDigest
from steelyard.weights.manifest import read_manifest

Spoil = Callable[[dict[str, Any]], dict[str, Any]]
_PADDED_ROWS = 64


@dataclass
class FakeVllm:
    """A server whose faults are fields.

    ``token_s``: pause before each token. ``hold_at``: a request gets no more than so many tokens while it is set.
    ``spoil_choice`` changes a chunk's choice before it is sent. ``die_after``: break off after so many tokens of a
    request. ``is_stale``: reloads change nothing. ``probe_shift``: added to each log-probability of a prompt.
    ``status``: answer every generation with it.
    """

    vocab_size: int = 64
    token_s: float = 0.0
    spoil_choice: Spoil | None = None
    die_after: int | None = None
    is_stale: bool = False
    is_deaf_to_aborts: bool = False
    hold_at: int | None = None
    are_probes_held: bool = False
    probe_shift: float = 0.0
    status: int = 200
    label: str = "default"
    version: int = -1
    manifest: Manifest | None = None
    calls: list[str] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    aborted: set[str] = field(default_factory=set)
    num_open: int = 0
    num_held: int = 0
    _may_compute: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._may_compute.set()

    def app(self) -> web.Application:
        """The routes."""
        app = web.Application()
        app.add_routes(
            [
                web.post("/inference/v1/generate", self._generate),
                web.post("/collective_rpc", self._rpc),
                web.post("/pause", self._pause),
                web.post("/resume", self._resume),
                web.post("/update_weight_version", self._set_label),
                web.post("/reset_prefix_cache", self._reset),
                web.post("/abort_requests", self._abort),
                web.get("/v1/models", self._models),
                web.get("/health", self._health),
                web.get("/metrics", self._metrics),
            ]
        )
        return app

    def expected_logprob(self, version: int, position: int, token_id: int) -> float:
        """What a token at ``position`` of its sequence gets."""
        return fake_logprob(version, position, token_id)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        if self.status != 200:
            return web.Response(status=self.status, text="no")
        if "prompt_logprobs" in body["sampling_params"]:
            while self.are_probes_held:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            return web.json_response(self._scored(body["token_ids"]))
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        self.num_open += 1
        try:
            await self._stream(body, request, response)
        finally:
            self.num_open -= 1
        return response

    async def _stream(self, body: dict[str, Any], request: web.Request, response: web.StreamResponse) -> None:
        sampling, prompt = body["sampling_params"], body["token_ids"]
        spans: list[dict[str, Any]] = []
        for index in range(sampling["max_tokens"]):
            await asyncio.sleep(self.token_s)
            if index == self.hold_at:
                await self._hold(body["request_id"])
            await self._may_compute.wait()
            if REQUEST_PREFIX + body["request_id"] in self.aborted:
                await _send(response, _choice([], [], "abort", spans))
                break
            if self.die_after == index:
                assert request.transport is not None
                request.transport.close()
                return
            token = (prompt[0] * 7 + index * 3) % self.vocab_size
            logprob = self.expected_logprob(self.version, len(prompt) + index, token)
            if not spans or spans[-1]["version"] != self.label:
                spans.append({"version": self.label, "start": index, "end": index})
            spans[-1]["end"] = index + 1
            end = "stop" if token in sampling["stop_token_ids"] else None
            end = end or ("length" if index + 1 == sampling["max_tokens"] else None)
            choice = _choice([token], [logprob], end, spans if end else None)
            await _send(response, self.spoil_choice(choice) if self.spoil_choice else choice)
            if end:
                break
        usage = {"prompt_tokens_details": {"cached_tokens": 0}}
        await response.write(f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n".encode())

    async def _hold(self, request_id: str) -> None:
        self.num_held += 1
        while self.hold_at is not None and REQUEST_PREFIX + request_id not in self.aborted:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        self.num_held -= 1

    def _scored(self, token_ids: list[int]) -> dict[str, Any]:
        assert self.manifest is not None
        at = self.manifest.probe.sequences.index(tuple(token_ids))
        wanted = self.manifest.probe.logprobs[at]
        # JSON has no NaN: it comes as null.
        shifted = [None if math.isnan(self.probe_shift) else one + self.probe_shift for one in wanted]
        rows = [{str(token): {"logprob": one}} for token, one in zip(token_ids[1:], shifted, strict=True)]
        return {"prompt_logprobs": [None, *rows]}

    async def _rpc(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.calls.append(body["method"])
        if body["method"] == "reload_weights":
            if not self.is_stale:
                self.manifest = read_manifest(Path(body["kwargs"]["weights_path"]))
                self.version = self.manifest.version
            return web.json_response({"results": [None]})
        memory = self._memory()
        if body["method"] == "steelyard_parameters":
            shapes = {
                name: ["float32", sum(one.shape[0] for one in parts), *parts[0].shape[1:]]
                for name, parts in memory.items()
            }
            return web.json_response({"results": [shapes]})
        found = {
            name: [_described(memory[name], *run) for run in runs] for name, runs in body["kwargs"]["slices"].items()
        }
        return web.json_response({"results": [found]})

    def _memory(self) -> dict[str, list[ParameterDigest]]:
        """By name in memory: the published parameters below one another; padding as a parameter of zeros."""
        assert self.manifest is not None
        whole = {part: name for name, parts in FUSED.items() for part in parts}
        memory: dict[str, list[ParameterDigest]] = {}
        for one in self.manifest.parameters:
            path, _, kind = one.name.rpartition(".")
            prefix, _, module = path.rpartition(".")
            memory.setdefault(f"{prefix}.{whole.get(module, module)}.{kind}", []).append(one)
            missing = -one.shape[0] % _PADDED_ROWS
            if module == "embed_tokens" and missing:
                shape = (missing, *one.shape[1:])
                memory[one.name].append(ParameterDigest(name="", shape=shape, dtype=one.dtype, digest="zeros"))
        return memory

    async def _pause(self, _request: web.Request) -> web.Response:
        self.calls.append("pause")
        self._may_compute.clear()
        return web.json_response({})

    async def _resume(self, _request: web.Request) -> web.Response:
        self.calls.append("resume")
        self._may_compute.set()
        return web.json_response({})

    async def _set_label(self, request: web.Request) -> web.Response:
        self.label = (await request.json())["new_version"]
        self.calls.append("label")
        return web.json_response({})

    async def _reset(self, _request: web.Request) -> web.Response:
        self.calls.append("reset")
        return web.json_response({"success": True})

    async def _abort(self, request: web.Request) -> web.Response:
        if not self.is_deaf_to_aborts:
            self.aborted |= set((await request.json())["request_ids"])
        return web.json_response({})

    async def _models(self, _request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "policy", "max_model_len": 256}]})

    async def _health(self, _request: web.Request) -> web.Response:
        return web.Response(status=200 if self.status == 200 else self.status)

    async def _metrics(self, _request: web.Request) -> web.Response:
        return web.Response(text=f'vllm:num_requests_running{{engine="0"}} {self.num_open}.0\n')


@asynccontextmanager
async def serving_fake(fake: FakeVllm, folder: Path) -> AsyncIterator[VllmApi]:
    """Serve ``fake`` on a socket in ``folder``; gives the API on it."""
    runner = web.AppRunner(fake.app(), access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    socket_path = str(folder / "vllm.sock")
    await web.UnixSite(runner, socket_path).start()
    try:
        async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(socket_path, limit=0)) as session:
            yield VllmApi(session, "http://vllm", "vllm of rep_fake", call_deadline_s=20.0)
    finally:
        await runner.cleanup()


def _choice(
    token_ids: list[int], logprobs: list[float], end: str | None, spans: list[dict[str, Any]] | None
) -> dict[str, Any]:
    content = [{"token_id": one, "logprob": value} for one, value in zip(token_ids, logprobs, strict=True)]
    return {
        "index": 0,
        "token_ids": token_ids,
        "logprobs": {"content": content},
        "finish_reason": end,
        "weight_versions": spans,
    }


async def _send(response: web.StreamResponse, choice: dict[str, Any]) -> None:
    await response.write(f"data: {json.dumps({'choices': [choice]})}\n\n".encode())


def _described(parts: list[ParameterDigest], first: int, number: int) -> list[Any]:
    """The run of rows that is one of ``parts``: whoever asks for another run gets a digest that fits nothing."""
    at = 0
    for part in parts:
        if at == first and number in (part.shape[0], -1):
            return [part.dtype, part.digest, part.name == "", *part.shape]
        at += part.shape[0]
    return ["float32", "of no parameter", False, number]
