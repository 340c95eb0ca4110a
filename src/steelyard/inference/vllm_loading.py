"""Bringing a version into a vLLM server's memory, and proving that it is there.

::

    read the directory (files, config, tokenizer)       nothing has changed yet
    pause -> label -> reload in place -> digests of what is in memory -> KV forgotten or kept -> resume
    probe through the path that serves                   results wait until it has agreed
"""

import asyncio
import math
from collections.abc import Sequence
from typing import Any, Protocol

from steelyard.errors import EngineError, IntegrityError
from steelyard.inference.vllm_api import VllmApi
from steelyard.inference.vllm_parameters import Described, Rows, found_parameters, map_parameters
from steelyard.inference.vllm_request import Load
from steelyard.types import Manifest, ParameterDigest


class VersionReader(Protocol):
    """Knows what a published version promises. Synchronous: called in a thread."""

    def read(self, version_dir: str) -> Manifest:
        """Read the manifest, after verifying file digests and the compatibility of tokenizer and model config.

        Raises:
            IntegrityError: the directory does not hold what its manifest promises.
        """
        ...

    def check_parameters(self, manifest: Manifest, found: Sequence[ParameterDigest], where: str) -> None:
        """Compare what stands somewhere with the manifest.

        Raises:
            IntegrityError: names the parameter that differs.
        """
        ...

    def weights_digest(self, found: Sequence[ParameterDigest]) -> str:
        """One digest of all parameters; comparable to ``Manifest.weights_digest``."""
        ...


class WeightLoader:
    """Changes the weights of one server. One change at a time; the caller sees to that."""

    def __init__(self, api: VllmApi, reader: VersionReader, *, tolerance: float, deadline_s: float) -> None:
        self._api = api
        self._reader = reader
        self._tolerance = tolerance
        self._deadline_s = deadline_s

    async def read(self, version_dir: str, version: int) -> Manifest:
        """Look at a version without touching the server.

        Raises:
            IntegrityError: its files or its number are not what they must be.
        """
        manifest = await asyncio.to_thread(self._reader.read, version_dir)
        if manifest.version != version:
            raise IntegrityError(f"manifest.version must be {version}, got {manifest.version}")
        return manifest

    async def replace(self, version_dir: str, manifest: Manifest, load: Load) -> str:
        """Put a version into memory; the server must be paused. Returns the digest of what is there.

        Raises:
            IntegrityError: memory does not hold what was published. Whatever it holds must serve nobody.
        """
        # First: whatever is sampled from here on must not bear the label of the weights that go.
        await self._api.set_label(load.label)
        await self._api.call_workers("reload_weights", {"weights_path": version_dir}, self._deadline_s)
        digest = await self.loaded_digest(manifest)
        if not load.kept_kv:
            await self._api.forget_kv()
        return digest

    async def loaded_digest(self, manifest: Manifest) -> str:
        """Digest of the parameters as they stand in the worker's memory now.

        Raises:
            IntegrityError: names the parameter that is not as published.
        """
        shapes = await self._one_worker("steelyard_parameters", {})
        memory = {name: tuple(shape[1:]) for name, shape in shapes.items()}
        runs = map_parameters(manifest.parameters, memory, manifest.version)
        slices: dict[str, list[list[int]]] = {}
        for run in runs:
            slices.setdefault(run.memory_name, []).append([run.first, run.number])
        answer = await self._one_worker("steelyard_digests", {"slices": slices})
        found = found_parameters(runs, _described(runs, answer), manifest.version)
        self._reader.check_parameters(manifest, found, "the memory of vLLM")
        return self._reader.weights_digest(found)

    async def probe(self, manifest: Manifest, load: Load) -> float:
        """Largest difference between the server's log-probabilities of the probe and the trainer's, in nats.

        Raises:
            IntegrityError: it is above the tolerance, or no number.
        """
        found = await asyncio.gather(*(self._api.score(one, load.label) for one in manifest.probe.sequences))
        pairs = zip(found, manifest.probe.logprobs, strict=True)
        errors = [abs(ours - theirs) for row, wanted in pairs for ours, theirs in zip(row, wanted, strict=True)]
        error = float("nan") if any(math.isnan(one) for one in errors) else max(errors)
        # Not "error > tolerance": a probe that gives NaN must fail too.
        if not error <= self._tolerance:
            raise IntegrityError(
                f"version {manifest.version}: probe log-probabilities must agree within {self._tolerance}, "
                f"largest difference is {error}"
            )
        return error

    async def _one_worker(self, method: str, arguments: dict[str, Any]) -> dict[str, Any]:
        answers = await self._api.call_workers(method, arguments, self._deadline_s)
        if len(answers) != 1 or not isinstance(answers[0], dict):
            raise EngineError(f"vLLM must run one worker with our extension, {method} got {len(answers)} answers")
        return answers[0]


def _described(runs: Sequence[Rows], answer: dict[str, Any]) -> list[Described]:
    left = {name: iter(rows) for name, rows in answer.items()}
    described = []
    for run in runs:
        dtype, digest, is_zero, *shape = next(left[run.memory_name])
        described.append(Described(dtype=dtype, digest=digest, is_zero=is_zero, shape=tuple(shape)))
    return described
