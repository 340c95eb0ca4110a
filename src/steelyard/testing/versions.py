"""Versions that live in memory, and an engine core that a test drives by hand."""

import copy
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from steelyard.clock import Clock
from steelyard.errors import IntegrityError
from steelyard.ids import SeededIds
from steelyard.inference.engine_core import EngineCore, EngineSettings
from steelyard.testing.tiny_model import tiny_module
from steelyard.types import GenerateRequest, GenerateResult, Manifest, Probe, Sampling, TokenChunk
from steelyard.weights.manifest import weights_digest
from steelyard.weights.parameters import parameter_digests, published_tensors
from steelyard.weights.probe import probe_logprobs, probe_sequences

VOCAB_SIZE = 512


@dataclass(frozen=True)
class VersionInMemory:
    """What :class:`MemoryVersions` gives to an engine."""

    module: Any
    manifest: Manifest


@dataclass
class MemoryVersions:
    """Implements :class:`steelyard.inference.engine.VersionLoader` over modules that a test puts in.

    ``versions`` holds them by directory name; replace an entry to publish something wrong on purpose.
    """

    versions: dict[str, VersionInMemory] = field(default_factory=dict)

    def put(self, version: int, module: Any) -> str:
        """Publish a copy of ``module``; returns its directory name."""
        sequences = probe_sequences(module.config.vocab_size)
        probe = Probe(sequences=sequences, logprobs=probe_logprobs(module, sequences), separates_parent=True)
        manifest = Manifest(
            version=version,
            step=version,
            parent_version=None,
            files=(),
            parameters=(),
            weights_digest=self.loaded_digest(module),
            model_config_digest="",
            tokenizer_digest="",
            template_digest="",
            dtype="float32",
            probe=probe,
        )
        name = f"v{version:06d}"
        self.versions[name] = VersionInMemory(copy.deepcopy(module), manifest)
        return name

    def load(self, version_dir: str) -> VersionInMemory:
        """A copy of what was put in."""
        found = self.versions.get(version_dir)
        if found is None:
            raise IntegrityError(f"version_dir must be one of {sorted(self.versions)}, got {version_dir}")
        return VersionInMemory(copy.deepcopy(found.module), found.manifest)

    def loaded_digest(self, module: Any) -> str:
        """Digest of the parameters in memory."""
        return weights_digest(parameter_digests(published_tensors(module)))


def tiny_core(
    clock: Clock, settings: EngineSettings | None = None, modules: Iterable[Any] = ()
) -> tuple[EngineCore, MemoryVersions]:
    """A core that holds ``modules`` (one tiny module where none are given) as versions 0, 1, ..."""
    loader = MemoryVersions()
    sizes = settings or EngineSettings(max_running=8, row_tokens=128, kv_tokens=2048, prefill_chunk_tokens=32)
    core = EngineCore(sizes, loader, replica_id="rep_tiny", clock=clock, ids=SeededIds(0))
    for version, module in enumerate(tuple(modules) or (tiny_module(),)):
        core.hold(core.prove(loader.load(loader.put(version, module)), version, clock.now_s()))
    return core, loader


def request_for(
    request_id: str,
    prompt: Iterable[int],
    *,
    version: int = 0,
    max_tokens: int = 16,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int | None = None,
    deadline_at_s: float = 1e12,
    stop: tuple[int, ...] = (),
    key: str | None = None,
    stream: bool = False,
    follows: bool = False,
) -> GenerateRequest:
    """A request with everything but its id and prompt filled in; attempt and key default to the id."""
    return GenerateRequest(
        request_id=request_id,
        attempt_id=key or request_id,
        sequence_key=key or request_id,
        policy_version=version,
        prompt_token_ids=tuple(prompt),
        sampling=Sampling(temperature=temperature, top_p=top_p, max_tokens=max_tokens, seed=seed),
        stop_token_ids=stop,
        deadline_at_s=deadline_at_s,
        stream=stream,
        follows_updates=follows,
    )


def run_core(core: EngineCore, requests: Iterable[GenerateRequest]) -> dict[str, GenerateResult]:
    """Add all requests and step until every one of them has ended; results by request id."""
    waiting = list(requests)
    for request in waiting:
        core.add(request)
    results: dict[str, GenerateResult] = {}
    bound = 10 + sum(len(request.prompt_token_ids) + request.sampling.max_tokens for request in waiting)
    for _ in range(bound):
        _chunks, ended = core.step()
        results.update({result.request_id: result for result in ended})
        if len(results) == len(waiting):
            return results
    missing = sorted({request.request_id for request in waiting} - set(results))
    raise AssertionError(f"after {bound} steps these requests have not ended: {missing}")


def stream_core(core: EngineCore, request: GenerateRequest) -> tuple[list[TokenChunk], GenerateResult]:
    """Like :func:`run_core` for one request, with its chunks."""
    core.add(request)
    chunks: list[TokenChunk] = []
    for _ in range(10 + len(request.prompt_token_ids) + request.sampling.max_tokens):
        new, ended = core.step()
        chunks.extend(new)
        if ended:
            return chunks, ended[0]
    raise AssertionError(f"request {request.request_id} has not ended")
