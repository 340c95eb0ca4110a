"""Wrong weights, with the digests of files switched off: who notices?

A version is loaded through the engine's own load path, by a loader that checks the published files and then builds the
decoder from others. Three kinds of wrong weights take turns:

    matrix    a matrix that holds at least 0.5% of the parameters, changed by 1% (scaled, or by noise of 1% of its norm)
    shard     one shard of version v-1
    stale     all of version v-1

Each of them is loaded twice: once with the digest of what is in memory, and once with that digest hidden, so that only
the probe is left. Versions are one optimizer step apart, at a rate of 1e-6 (--quick: 3e-4, the default, which suits
a decoder as small as that); the step is taken in float32 and cast. Where a step is below what the dtype resolves, some
parameters of v and v-1 are equal; a shard without any difference is no wrong one and is passed over. Between them the
version is loaded as it is, with one thread and with all by turns: what is refused then is a false alarm.

Beside that, with the first versions, the engine serves requests of many lengths at once, with prompts in chunks, and
the log-probabilities that it gives are computed again as the trainer computes them: on the published weights (what
``audit --deep`` does), and on the float32 weights that were cast (what the loss sees at lag 0). From these figures, and
the largest difference of an honest load, follow the tolerances in ``steelyard.weights.tolerance``.

    python benchmarks/probe.py                 SmolLM2-135M (--model DIR), 100 wrong and 100 honest loads a dtype
    python benchmarks/probe.py --check         the same; exit code 1 below the floors of floors.toml
    python benchmarks/probe.py --quick         a random decoder of 3.3M parameters, 6 loads of each
    python benchmarks/probe.py --engine vllm   on a vLLM server (make venv-vllm)
    python benchmarks/probe.py --dtype float32 one dtype only
"""

import argparse
import asyncio
import json
import math
import random
import shutil
import statistics
import sys
import tempfile
import tomllib
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import aiohttp
import torch

from steelyard.clock import SystemClock
from steelyard.errors import IntegrityError
from steelyard.ids import RandomIds, SeededIds
from steelyard.inference.engine_core import EngineCore, EngineSettings
from steelyard.inference.local_engine import LocalEngine
from steelyard.inference.vllm_api import KEPT_ALIVE_S, VllmApi
from steelyard.inference.vllm_engine import VllmEngine, VllmSettings
from steelyard.inference.vllm_server import ServerSettings, VllmServer
from steelyard.observe.statistics import quantile
from steelyard.testing.tiny_model import write_small_model
from steelyard.testing.training_data import random_step_batch
from steelyard.testing.wrong_weights import (
    BlindReader,
    MisledLoader,
    MisledVllm,
    large_matrices,
    shards_of,
    with_matrix_changed,
    with_stale_shard,
)
from steelyard.trainer.model import load_model
from steelyard.trainer.optim import apply_step, make_optimizer
from steelyard.trainer.recompute import recorded_logprobs
from steelyard.trainer.records import LossSettings, OptimizerSettings
from steelyard.trainer.step import accumulate_gradients
from steelyard.types import GenerateRequest, GenerateResult, LoadProof, Manifest, Sampling, Turn
from steelyard.weights.loader import VersionLoader
from steelyard.weights.manifest import read_manifest
from steelyard.weights.publisher import VersionPublisher
from steelyard.weights.reader import VersionReader
from steelyard.weights.tolerance import NOISE

FLOORS = Path(__file__).parent / "floors.toml"
DTYPES = ("float32", "bfloat16", "float16")
KINDS = ("matrix", "shard", "stale")
LOADS_PER_VERSION = 6
LEARNING_RATE, QUICK_LEARNING_RATE = 1e-6, 3e-4
NUM_SHARDS = 8
CALL_DEADLINE_S, START_DEADLINE_S, STOP_DEADLINE_S = 60.0, 300.0, 20.0
VLLM_PYTHON = ".venv-vllm/bin/python"
NUM_SERVED_VERSIONS = 4
NUM_REQUESTS, NUM_NEW_TOKENS = 32, 24


@dataclass
class Tally:
    """What came of the loads of one dtype; counts, and probe errors in nats."""

    wrong: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    by_digest: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    by_probe: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    num_honest: int = 0
    num_false_alarms: int = 0
    num_separated: int = 0
    num_versions: int = 0
    token_errors: list[float] = field(default_factory=list)
    mismatches: list[float] = field(default_factory=list)
    honest_errors: list[float] = field(default_factory=list)
    wrong_errors: dict[str, list[float]] = field(default_factory=lambda: {kind: [] for kind in KINDS})


class Side(Protocol):
    """An engine that loads and serves."""

    @property
    def name(self) -> str: ...

    async def load(
        self, version_dir: Path, number: int, really: Path, *, shows_digests: bool, tolerance: float
    ) -> LoadProof:
        """Load ``really`` in the place of ``version_dir`` and forget it again.

        Raises:
            IntegrityError: the engine noticed.
        """
        ...

    async def serve(self, version_dir: Path, requests: list[GenerateRequest]) -> list[GenerateResult]:
        """Load what it says and serve all requests at once."""
        ...


class LocalSide:
    """Loads into a local engine of this process."""

    name = "local"

    async def load(
        self, version_dir: Path, number: int, really: Path, *, shows_digests: bool, tolerance: float
    ) -> LoadProof:
        async with self._engine(MisledLoader(lambda _: really, shows_digests=shows_digests), tolerance) as engine:
            return await engine.load(str(version_dir), number)

    async def serve(self, version_dir: Path, requests: list[GenerateRequest]) -> list[GenerateResult]:
        async with self._engine(VersionLoader(), math.inf) as engine:
            await engine.load(str(version_dir), requests[0].policy_version)
            return await asyncio.gather(*map(engine.generate, requests))

    @asynccontextmanager
    async def _engine(self, loader: MisledLoader | VersionLoader, tolerance: float) -> AsyncIterator[LocalEngine]:
        settings = EngineSettings(
            max_running=8, row_tokens=128, kv_tokens=2048, prefill_chunk_tokens=32, probe_tolerance=tolerance
        )
        clock = SystemClock()
        core = EngineCore(settings, loader, replica_id="replica-0", clock=clock, ids=SeededIds(0))
        engine = LocalEngine(core, loader, clock)
        try:
            yield engine
        finally:
            await engine.close()


class VllmSide:
    """Loads into one vLLM server, in place, as a replica does."""

    name = "vllm"

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session
        self.api = VllmApi(session, "http://vllm", "vllm", CALL_DEADLINE_S)

    async def load(
        self, version_dir: Path, number: int, really: Path, *, shows_digests: bool, tolerance: float
    ) -> LoadProof:
        api = MisledVllm(self._session, "http://vllm", "vllm", CALL_DEADLINE_S, really)
        reader = VersionReader() if shows_digests else BlindReader()
        return await self._engine(api, reader, tolerance).load(str(version_dir), number)

    async def serve(self, version_dir: Path, requests: list[GenerateRequest]) -> list[GenerateResult]:
        engine = self._engine(self.api, VersionReader(), math.inf)
        await engine.load(str(version_dir), requests[0].policy_version)
        return await asyncio.gather(*map(engine.generate, requests))

    def _engine(self, api: VllmApi, reader: VersionReader, tolerance: float) -> VllmEngine:
        settings = VllmSettings(probe_tolerance=tolerance, change_deadline_s=START_DEADLINE_S)
        return VllmEngine(api, reader, settings, replica_id="replica-0", clock=SystemClock(), ids=RandomIds())


@asynccontextmanager
async def open_side(engine: str, python: str, model_dir: Path, dtype: str) -> AsyncIterator[Side]:
    """The engine, ready to load."""
    if engine == "local":
        yield LocalSide()
        return
    settings = ServerSettings(
        python=python, model_dir=str(model_dir), dtype=dtype, max_model_len=256, max_running=8, kv_cache_bytes=256 << 20
    )
    with tempfile.TemporaryDirectory() as folder:
        socket_path = Path(folder) / "vllm.sock"
        async with aiohttp.ClientSession(
            connector=aiohttp.UnixConnector(str(socket_path), keepalive_timeout=KEPT_ALIVE_S)
        ) as session:
            side = VllmSide(session)
            server = await VllmServer.start("vllm", settings, socket_path, Path(folder) / "vllm.log")
            try:
                await server.wait_until_ready(side.api, START_DEADLINE_S)
                yield side
            finally:
                await server.stop(STOP_DEADLINE_S)


@dataclass(frozen=True)
class Pair:
    """A version and its parent, published."""

    directory: Path
    parent: Path
    manifest: Manifest
    master: torch.nn.Module


def versions(
    model_dir: Path, root: Path, dtype: str, rate: float, num_versions: int, tolerance: float
) -> Iterator[Pair]:
    """Versions one optimizer step apart; only the newest and its parent stay on disk."""
    module: Any = load_model(model_dir)
    num_bytes = 4 * sum(parameter.numel() for parameter in module.parameters())
    publisher = VersionPublisher(root, model_dir, tolerance, dtype=dtype, max_shard_bytes=num_bytes // NUM_SHARDS)
    optimizer = make_optimizer(module, OptimizerSettings(learning_rate=rate))
    publisher.publish(module, version=0, step=0, parent_version=None)
    for number in range(1, num_versions + 1):
        batch = random_step_batch(number, step=number - 1, num_samples=8, vocab_size=module.config.vocab_size)
        optimizer.zero_grad(set_to_none=False)
        accumulate_gradients(module, batch, LossSettings())
        apply_step(module, optimizer, rate, 1.0, f"step {number - 1}")
        manifest = publisher.publish(module, version=number, step=number, parent_version=number - 1)
        yield Pair(root / f"v{number:06d}", root / f"v{number - 1:06d}", manifest, module)
        shutil.rmtree(root / f"v{number - 1:06d}")


def wrong_directory(kind: str, pair: Pair, copy: Path, rng: random.Random) -> Path:
    """Where the wrong weights of this kind lie."""
    if kind == "stale":
        return pair.parent
    if kind == "matrix":
        with_matrix_changed(pair.directory, copy, rng.choice(large_matrices(pair.manifest)), rng)
        return copy
    before = {file.name: file.digest for file in read_manifest(pair.parent).files}
    shards = shards_of(pair.directory)
    differing = [f.name for f in pair.manifest.files if f.name in shards and f.digest != before[f.name]]
    with_stale_shard(pair.directory, pair.parent, copy, rng.choice(differing))
    return copy


async def serve_tokens(side: Side, pair: Pair, tally: Tally) -> None:
    """Requests of many lengths at once, and their tokens computed again as the trainer does."""
    rng = random.Random(pair.manifest.version)
    vocabulary = len_of_vocabulary(pair.manifest)
    requests = [
        GenerateRequest(
            request_id=f"req_{index}",
            attempt_id=f"att_{index}",
            sequence_key=f"att_{index}",
            policy_version=pair.manifest.version,
            prompt_token_ids=tuple(rng.randrange(vocabulary) for _ in range(rng.randint(1, 96))),
            sampling=Sampling(temperature=1.0, top_p=1.0, max_tokens=NUM_NEW_TOKENS, seed=index),
            stop_token_ids=(),
            deadline_at_s=SystemClock().now_s() + 600.0,
        )
        for index in range(NUM_REQUESTS)
    ]
    results = await side.serve(pair.directory, requests)
    turns = [turn_of(request, result) for request, result in zip(requests, results, strict=True)]
    published = VersionLoader().load(pair.directory).module
    for module, differences in ((published, tally.token_errors), (pair.master, tally.mismatches)):
        for turn, logprobs in zip(turns, recorded_logprobs(module, turns), strict=True):
            differences += [abs(a - b) for a, b in zip(turn.logprobs, logprobs, strict=True)]


def len_of_vocabulary(manifest: Manifest) -> int:
    return next(parameter.shape[0] for parameter in manifest.parameters if "embed_tokens" in parameter.name)


def turn_of(request: GenerateRequest, result: GenerateResult) -> Turn:
    return Turn(
        request_id=request.request_id,
        attempt_id=request.attempt_id,
        turn_index=0,
        segment_index=0,
        prompt_token_ids=request.prompt_token_ids,
        token_ids=result.token_ids,
        logprobs=result.logprobs,
        kept_logmass=result.kept_logmass,
        version_spans=result.version_spans,
        sampling=request.sampling,
        finish_reason=result.finish_reason,
        replica_id=result.replica_id,
        load_id=result.load_id,
        num_cached_tokens=result.num_cached_tokens,
        started_at_s=0.0,
        ended_at_s=0.0,
    )


async def try_version(side: Side, pair: Pair, first: int, num_loads: int, tally: Tally, tolerance: float) -> None:
    """``num_loads`` honest loads and as many wrong ones, of each kind in turn."""
    rng = random.Random(first)
    number = pair.manifest.version
    tally.num_versions += 1
    tally.num_separated += pair.manifest.probe.separates_parent
    threads = torch.get_num_threads()
    for index in range(first, first + num_loads):
        torch.set_num_threads(threads if index % 2 else 1)
        tally.num_honest += 1
        error, is_caught = await probe_error(side, pair, number, pair.directory, tolerance)
        tally.num_false_alarms += is_caught
        tally.honest_errors.append(error)
        kind = KINDS[index % len(KINDS)]
        wrong = wrong_directory(kind, pair, pair.directory.parent / "wrong", rng)
        tally.wrong[kind] += 1
        try:
            await side.load(pair.directory, number, wrong, shows_digests=True, tolerance=tolerance)
        except IntegrityError as caught:
            tally.by_digest[kind] += "digest" in str(caught)
        error, is_caught = await probe_error(side, pair, number, wrong, tolerance)
        tally.by_probe[kind] += is_caught
        tally.wrong_errors[kind].append(error)
    if tally.num_versions <= NUM_SERVED_VERSIONS:
        await serve_tokens(side, pair, tally)
    torch.set_num_threads(threads)


async def probe_error(side: Side, pair: Pair, number: int, really: Path, tolerance: float) -> tuple[float, bool]:
    """Error of the probe with the digest hidden, and whether the engine refuses it at this tolerance."""
    try:
        proof = await side.load(pair.directory, number, really, shows_digests=False, tolerance=tolerance)
    except IntegrityError as caught:
        return float(str(caught).rsplit(" ", 1)[1]), True
    return proof.probe_max_error, False


async def measure(engine: str, python: str, model_dir: Path, dtype: str, rate: float, num_loads: int) -> Tally:
    """All loads of one engine and dtype."""
    async with open_side(engine, python, model_dir, dtype) as side:
        return await try_versions(side, model_dir, dtype, rate, num_loads)


async def try_versions(side: Side, model_dir: Path, dtype: str, rate: float, num_loads: int) -> Tally:
    tally = Tally()
    tolerance = tolerance_of(side.name, dtype)
    num_versions = -(-num_loads // LOADS_PER_VERSION)
    with tempfile.TemporaryDirectory() as folder:
        found = versions(model_dir, Path(folder), dtype, rate, num_versions, tolerance)
        for index, pair in enumerate(found):
            first = index * LOADS_PER_VERSION
            await try_version(side, pair, first, min(LOADS_PER_VERSION, num_loads - first), tally, tolerance)
            print(f"{side.name} {dtype}: {first + LOADS_PER_VERSION} of {num_loads}", file=sys.stderr, flush=True)
    return tally


def tolerance_of(engine: str, dtype: str) -> float:
    """That of the table; without bound where nothing was measured yet, so that it can be."""
    noise = NOISE.get((engine, dtype, 1))
    return math.inf if noise is None else noise.probe_tolerance


def figures(tally: Tally, dtype: str, tolerance: float, num_parameters: int) -> dict[str, object]:
    """The tally as it is printed."""
    num_wrong = sum(tally.wrong.values())
    num_beyond = sum(error > max(tally.honest_errors) for found in tally.wrong_errors.values() for error in found)
    return {
        "dtype": dtype,
        "parameters": num_parameters,
        "tolerance_nats": tolerance if math.isfinite(tolerance) else None,
        "honest_error_max": max(tally.honest_errors),
        "honest_error_median": statistics.median(tally.honest_errors),
        "token_error_max": max(tally.token_errors),
        "mismatch_p99": quantile(sorted(tally.mismatches), 0.99),
        "mismatch_max": max(tally.mismatches),
        "tokens": len(tally.token_errors),
        "wrong_error_min": {kind: min(found, default=None) for kind, found in tally.wrong_errors.items()},
        "wrong_error_median": {kind: statistics.median(found) for kind, found in tally.wrong_errors.items() if found},
        "caught_by_digest": {kind: f"{tally.by_digest[kind]} of {tally.wrong[kind]}" for kind in KINDS},
        "caught_by_probe": {kind: f"{tally.by_probe[kind]} of {tally.wrong[kind]}" for kind in KINDS},
        "digest_frac": sum(tally.by_digest.values()) / num_wrong,
        "probe_frac": sum(tally.by_probe.values()) / num_wrong,
        "wrong_beyond_every_honest": f"{num_beyond} of {num_wrong}",
        "false_alarms": f"{tally.num_false_alarms} of {tally.num_honest}",
        "false_alarm_frac": tally.num_false_alarms / tally.num_honest,
        "versions_that_the_probe_tells_from_their_parent": f"{tally.num_separated} of {tally.num_versions}",
    }


def check(engine: str, dtype: str, found: dict[str, Any], floors: dict[str, float]) -> bool:
    """Print each figure beside its floor; False where one is missed."""
    lines = [("digest_frac", "min_digest_frac", found["digest_frac"] >= floors["min_digest_frac"])]
    if dtype == "float32":
        lines += [
            ("probe_frac", "min_probe_frac_float32", found["probe_frac"] >= floors["min_probe_frac_float32"]),
            (
                "false_alarm_frac",
                "max_false_alarm_frac_float32",
                found["false_alarm_frac"] <= floors["max_false_alarm_frac_float32"],
            ),
        ]
    for name, floor, holds in lines:
        print(f"{engine} {dtype} {name} {found[name]} ({floor} {floors[floor]}): {'ok' if holds else 'MISSED'}")
    return all(holds for *_, holds in lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit with 1 if a floor is not reached")
    parser.add_argument("--quick", action="store_true", help="a small random decoder, fewer loads")
    parser.add_argument("--engine", choices=("local", "vllm"), default="local", help="(default: local)")
    parser.add_argument("--vllm-python", default=VLLM_PYTHON, help=f"of vLLM's environment (default: {VLLM_PYTHON})")
    parser.add_argument("--model", type=Path, help="Hugging Face directory of SmolLM2-135M; not with --quick")
    parser.add_argument("--dtype", choices=DTYPES, help="this dtype only")
    parser.add_argument("--loads", type=int, help="wrong loads of each dtype (default: 100; quick: 6)")
    options = parser.parse_args()
    if options.quick == (options.model is not None):
        parser.error("--model DIR must be given without --quick, and only then")
    floors = tomllib.loads(FLOORS.read_text())["probe"]
    rate = QUICK_LEARNING_RATE if options.quick else LEARNING_RATE
    num_loads = options.loads or (6 if options.quick else 100)
    holds = True
    with tempfile.TemporaryDirectory() as folder:
        model_dir = write_small_model(Path(folder) / "model") if options.quick else options.model
        num_parameters = sum(parameter.numel() for parameter in load_model(model_dir).parameters())
        for dtype in [options.dtype] if options.dtype else DTYPES:
            tally = asyncio.run(measure(options.engine, options.vllm_python, model_dir, dtype, rate, num_loads))
            found = figures(tally, dtype, tolerance_of(options.engine, dtype), num_parameters)
            print(json.dumps({"engine": options.engine, **found}, indent=2), flush=True)
            holds &= check(options.engine, dtype, found, floors)
    return int(options.check and not holds)


if __name__ == "__main__":
    sys.exit(main())
