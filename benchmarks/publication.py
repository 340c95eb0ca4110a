"""How long a new version takes from the optimizer step to all replicas, and how long generation stops for it.

A trainer process takes real steps, a keeper publishes, and a fleet brings the version to one local replica in a process
of its own and, where ``--vllm-python`` names an environment (``make venv-vllm``), to a vLLM server. The journal is a
real coordinator's, its rollouts are made up.

    publication   end of the optimizer step -> READY, proven by every replica; the trainer digests its weights within
                  ``train_step``, so the time of one digesting is added
    parts         the same bytes written with fsync and digested, once; built into a decoder from the file (reading and
                  reloading), or reloaded by the server, once a replica; one forward pass of the probe for each party;
                  measured in the same round, one thread, nothing else running
    stop          the largest gap between two tokens of streams that run while a version comes, less the usual gap:
                  gone over to in place (segmented), and loaded beside (as on a standby)
    drain         requests of 8 to 64 tokens on a replica with room for one version: the share of their places that is
                  empty from the beginning of the drain until the version is loaded

    python benchmarks/publication.py            SmolLM2-135M (--model DIR), medians of 5
    python benchmarks/publication.py --check    the same; exit code 1 where a floor of floors.toml is missed
    python benchmarks/publication.py --quick    a random decoder of 13M parameters, medians of 3
"""

import argparse
import asyncio
import itertools
import os
import statistics
import sys
import tempfile
import time
import tomllib
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import torch
import transformers

from steelyard import config_file
from steelyard.assembly.batch import encode_step_batch
from steelyard.clock import SystemClock
from steelyard.digests import digest_bytes
from steelyard.errors import ProcessDied, RunError
from steelyard.ids import RandomIds
from steelyard.inference.engine import Engine, KvRule
from steelyard.inference.engine_core import EngineCore, EngineSettings
from steelyard.inference.local_engine import LocalEngine
from steelyard.inference.router import Router
from steelyard.inference.vllm_api import KEPT_ALIVE_S, VllmApi
from steelyard.inference.vllm_engine import VllmEngine, VllmSettings
from steelyard.inference.vllm_server import ServerSettings, VllmServer
from steelyard.run.directory import RunDirectory
from steelyard.run.fleet import Fleet, FleetRules
from steelyard.run.processes import Children
from steelyard.run.recovery import StartingPoint
from steelyard.run.versions import VersionKeeper
from steelyard.testing.run_rig import RunRig, make_settings
from steelyard.testing.tokenizer import write_tokenizer
from steelyard.trainer.client import TrainerClient
from steelyard.trainer.records import TrainRequest
from steelyard.types import GenerateRequest, LoadProof, Sampling, TokenChunk
from steelyard.weights.loader import VersionLoader
from steelyard.weights.manifest import read_manifest
from steelyard.weights.parameters import parameter_digests, published_tensors
from steelyard.weights.probe import probe_logprobs
from steelyard.weights.reader import VersionReader
from steelyard.weights.retention import VersionStore
from steelyard.weights.tolerance import measured_noise

FLOORS = Path(__file__).parent / "floors.toml"
NUM_ROUNDS, NUM_QUICK_ROUNDS = 5, 3
NUM_STREAMS, STREAM_TOKENS, WARM_UP_PASSES = 4, 768, 32
WRITE_BYTES = 16 << 20
DRAIN_TOKENS = (8, 16, 24, 32, 40, 48, 56, 64)
DEADLINE_S = 120.0
TOGETHER_S = 1e-3
LOCAL, VLLM = "replica-0", "vllm-0"


def main() -> int:
    """Run, print, and compare with the floors."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="exit with 1 where a floor is missed")
    parser.add_argument("--quick", action="store_true", help="a small decoder, fewer rounds")
    parser.add_argument("--model", type=Path, help="a Hugging Face directory of SmolLM2-135M in float32")
    parser.add_argument("--vllm-python", help="python of an environment with vLLM; without it there is no such replica")
    arguments = parser.parse_args()
    if not arguments.quick and arguments.model is None:
        parser.error("--model DIR must be given without --quick; docs/vllm.md says how to make SmolLM2-135M")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        model = arguments.model or write_model(root / "model")
        rounds = NUM_QUICK_ROUNDS if arguments.quick else NUM_ROUNDS
        found = asyncio.run(measure(root, model.absolute(), rounds, arguments.vllm_python))
    is_good = True
    for name, floor in tomllib.loads(FLOORS.read_text())["publication"].items():
        if name not in found:
            print(f"{name}: not measured without --vllm-python")
            continue
        reached = found[name] <= floor
        is_good &= reached
        print(f"{name}: {found[name]:,.3f}, floor {floor:,.1f}: {'reached' if reached else 'MISSED'}")
    return 0 if is_good or not arguments.check else 1


def write_model(directory: Path) -> Path:
    """A random decoder of 13M parameters."""
    directory.mkdir()
    write_tokenizer(directory, vocab_size=512)
    config = transformers.LlamaConfig(
        hidden_size=384, intermediate_size=1024, num_hidden_layers=7, num_attention_heads=6, num_key_value_heads=2,
        vocab_size=2048, tie_word_embeddings=True,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(directory)
    return directory


# --- publication ----------------------------------------------------------------------------------


@dataclass
class Times:
    """Seconds, one a round."""

    publication: list[float] = field(default_factory=list)
    publish: list[float] = field(default_factory=list)
    parts: list[float] = field(default_factory=list)
    reload: list[float] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)


@dataclass
class Bench:
    """What a round needs."""

    rig: RunRig
    trainer: TrainerClient
    keeper: VersionKeeper
    router: Router
    store: VersionStore
    root: Path
    vllm: VllmApi | None


class Unwatched:
    """The processes behind the engines: nobody dies here, and who does ends the benchmark."""

    def process_of(self, name: str) -> object | None:
        return None

    async def death_of(self, name: str) -> ProcessDied:
        raise RunError(f"{name} must not be watched")

    async def restart_replica(self, name: str) -> Engine:
        raise RunError(f"{name} must not fail")


async def measure(root: Path, model: Path, num_rounds: int, vllm_python: str | None) -> dict[str, float]:
    """All figures by the names of their floors."""
    async with opened(root, model, vllm_python) as bench:
        times = Times()
        for step in range(num_rounds):
            await one_round(bench, step, times)
        found = {
            ("max_publication_of_parts" if bench.vllm else "max_local_publication_of_parts"): statistics.median(
                whole / parts for whole, parts in zip(times.publication, times.parts, strict=True)
            )
        }
        reload_s = statistics.median(times.reload)
        print("\n".join(times.lines))
        found |= await measure_stops(bench, num_rounds, reload_s)
    idle_frac = await measure_drain(root, model, num_rounds)
    print(f"drain: {idle_frac:.0%} of the places were empty until the version was loaded")
    return found


@asynccontextmanager
async def opened(root: Path, model: Path, vllm_python: str | None) -> AsyncIterator[Bench]:
    """Coordinator, trainer and replicas; version 0 is published and READY."""
    config = config_file.load(None, [f"model.policy={model}", "train.learning_rate=1e-6"])
    directory = RunDirectory(root / "run")
    directory.path.mkdir()
    directory.make_folders()
    rig = await RunRig(make_settings(max_retained_versions=40)).open()
    async with AsyncExitStack() as stack:
        stack.push_async_callback(rig.coordinator.close)
        children = Children(config, directory, root, SystemClock())
        stack.push_async_callback(children.stop)
        trainer = await children.start_trainer(model, StartingPoint(0, None, None))
        engines: dict[str, Engine] = {LOCAL: await children.start_replica(0, model)}
        api = None
        if vllm_python is not None:
            engines[VLLM], api = await stack.enter_async_context(vllm_engine(root, model, vllm_python))
        router = Router(engines, SystemClock())
        store = VersionStore(directory.weights)
        rules = FleetRules(load_deadline_s=DEADLINE_S, max_restarts=0)
        fleet = Fleet(rig.coordinator, router, Unwatched(), lambda version: str(store.path(version)), rules)
        await fleet.begin()
        keeper = VersionKeeper(rig.coordinator, trainer, fleet, store, DEADLINE_S)
        await keeper.publish(0, None)
        await keeper.load(0)
        yield Bench(rig, trainer, keeper, router, store, root, api)


@asynccontextmanager
async def vllm_engine(root: Path, model: Path, python: str) -> AsyncIterator[tuple[VllmEngine, VllmApi]]:
    """A vLLM server of our own."""
    socket_path = root / "vllm.sock"
    connector = aiohttp.UnixConnector(str(socket_path), keepalive_timeout=KEPT_ALIVE_S)
    async with aiohttp.ClientSession(connector=connector, read_bufsize=16 << 20) as session:
        api = VllmApi(session, "http://vllm", VLLM, DEADLINE_S)
        settings = ServerSettings(
            python=python, model_dir=str(model), dtype="float32", max_model_len=1024, max_running=16,
            kv_cache_bytes=1 << 30,
        )  # fmt: skip
        server = await VllmServer.start(VLLM, settings, socket_path, root / "vllm.log")
        try:
            await server.wait_until_ready(api, 300.0)
            tolerance = measured_noise("vllm", "float32").probe_tolerance
            engine = VllmEngine(
                api, VersionReader(), VllmSettings(probe_tolerance=tolerance, change_deadline_s=DEADLINE_S),
                replica_id=VLLM, clock=SystemClock(), ids=RandomIds(),
            )  # fmt: skip
            yield engine, api
        finally:
            await server.stop(30.0)


async def train(bench: Bench, step: int) -> int:
    """One optimizer step on made-up rollouts; the number of the version to come."""
    rig = bench.rig
    rules = rig.settings.rules
    await rig.run_attempts(rules.groups_per_batch * rules.group_size)
    await rig.score_all()
    plan = await rig.begin(step)
    data, digest = encode_step_batch(rig.assemble(plan))
    path = bench.root / f"batch-{step}"
    path.write_bytes(data)
    version = rig.coordinator.next_version()
    await bench.trainer.train_step(TrainRequest(path=str(path), digest=digest, step=step, version=version))
    return version


async def one_round(bench: Bench, step: int, times: Times) -> None:
    """One step, its publication, and the parts of it by themselves."""
    version = await train(bench, step)
    started_s = time.perf_counter()
    await bench.keeper.publish(version, version - 1)
    published_s = time.perf_counter()
    await bench.keeper.load(version)
    ended_s = time.perf_counter()
    left_out = [name for name, replica in bench.router.replicas.items() if version not in replica.versions]
    if left_out:
        raise RunError(f"every replica must hold version {version}, but {left_out} were left out")
    await bench.keeper.tidy()
    parts = await asyncio.to_thread(parts_of, bench.store.path(version), bench.root)
    num_replicas = 1
    if bench.vllm is not None:
        num_replicas = 2
        begun_s = time.perf_counter()
        await bench.vllm.call_workers("reload_weights", {"weights_path": str(bench.store.path(version))}, DEADLINE_S)
        parts["vllm_reload"] = time.perf_counter() - begun_s
    whole_s = ended_s - started_s + parts["digest"]
    parts_s = sum(parts.values()) + num_replicas * parts["probe"]
    times.publication.append(whole_s)
    times.publish.append(published_s - started_s)
    times.parts.append(parts_s)
    times.reload.append(parts["reload"])
    shown = ", ".join(f"{name} {value:.2f}" for name, value in parts.items())
    times.lines.append(
        f"round {step}: {whole_s:.2f} s ({published_s - started_s:.2f} s to publish) against {parts_s:.2f} s "
        f"({shown}; probes {1 + num_replicas} times)"
    )


def parts_of(directory: Path, root: Path) -> dict[str, float]:
    """Seconds of the parts of a publication, once each, on the version in ``directory``."""
    manifest = read_manifest(directory)
    data = b"".join(path.read_bytes() for path in sorted(directory.glob("*.safetensors")))
    clock = _Laps()
    with (root / "written").open("wb", buffering=0) as file:
        for first in range(0, len(data), WRITE_BYTES):
            file.write(memoryview(data)[first : first + WRITE_BYTES])
        os.fsync(file.fileno())
    write_s = clock.lap()
    (root / "written").unlink()
    clock.lap()
    digest_bytes(data)
    digest_s = clock.lap()
    del data
    clock.lap()
    module = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, local_files_only=True)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.data = parameter.data.clone()
    module.eval()
    reload_s = clock.lap()
    probe_logprobs(module, manifest.probe.sequences)
    probe_s = clock.lap()
    assert parameter_digests(published_tensors(module)) == manifest.parameters
    return {"write": write_s, "digest": digest_s, "reload": reload_s, "probe": probe_s}


class _Laps:
    def __init__(self) -> None:
        self._last_s = time.perf_counter()

    def lap(self) -> float:
        now_s = time.perf_counter()
        lap_s, self._last_s = now_s - self._last_s, now_s
        return lap_s


# --- stops ----------------------------------------------------------------------------------------


async def measure_stops(bench: Bench, first_step: int, reload_s: float) -> dict[str, float]:
    """The largest gap in running streams over the reload itself, in place and beside."""
    found = {}
    for index, (name, in_place) in enumerate(
        (("max_stop_in_place_of_reload", True), ("max_stop_beside_of_reload", False))
    ):
        version = await train(bench, first_step + index)
        await bench.keeper.publish(version, version - 1)
        path = str(bench.store.path(version))
        replica = bench.router.replicas[LOCAL]
        bound = max(replica.versions)

        change = replica.update(path, version, KvRule.RECOMPUTE) if in_place else replica.load(path, version)
        stop_s, usual_s, change_s = await stop_of(replica, bound, in_place, change)
        found[name] = stop_s / reload_s
        print(
            f"{name}: a gap of {stop_s:.3f} s (usual {usual_s:.3f} s) in a change of {change_s:.2f} s, "
            f"the reload alone is {reload_s:.2f} s"
        )
    return found


async def stop_of(
    replica: Engine, bound: int, follows: bool, change: Coroutine[Any, Any, LoadProof]
) -> tuple[float, float, float]:
    """Largest gap between tokens of streams while ``change`` runs, less the usual one before it; both, and its time."""
    at_s: list[float] = []
    ticked = asyncio.Event()

    def on_tokens(_chunk: TokenChunk) -> None:
        at_s.append(time.perf_counter())
        ticked.set()

    streams = [
        asyncio.create_task(
            replica.generate(request_of(f"stream-{bound}-{i}", bound, follows, STREAM_TOKENS), on_tokens)
        )
        for i in range(NUM_STREAMS)
    ]
    async with asyncio.timeout(DEADLINE_S):
        while len(at_s) < WARM_UP_PASSES * NUM_STREAMS:
            ticked.clear()
            await ticked.wait()
        begun_s = time.perf_counter()
        await change
        ended_s = time.perf_counter()
        ticked.clear()
        await ticked.wait()
    for i in range(NUM_STREAMS):
        await replica.abort(f"stream-{bound}-{i}")
    await asyncio.gather(*streams)
    # Tokens of one forward pass come together; what is between two passes counts.
    gaps = [(later - earlier, later) for earlier, later in itertools.pairwise(at_s) if later - earlier > TOGETHER_S]
    usual_s = statistics.median(gap for gap, at in gaps if at <= begun_s)
    during = [gap for gap, at in gaps if at > begun_s]
    return max(0.0, max(during) - usual_s), usual_s, ended_s - begun_s


def request_of(name: str, version: int, follows: bool, max_tokens: int) -> GenerateRequest:
    """A stream of a fixed number of tokens."""
    return GenerateRequest(
        request_id=name,
        attempt_id=name,
        sequence_key=name,
        policy_version=version,
        prompt_token_ids=tuple(range(10, 74)),
        sampling=Sampling(temperature=1.0, max_tokens=max_tokens, seed=len(name)),
        stop_token_ids=(),
        deadline_at_s=SystemClock().now_s() + DEADLINE_S,
        stream=True,
        follows_updates=follows,
    )


# --- drain ----------------------------------------------------------------------------------------


async def measure_drain(root: Path, model: Path, last_step: int) -> float:
    """The share of places that is empty while a replica with room for one version goes over."""
    store = VersionStore(root / "run" / "weights")
    first, second = store.versions()[-2:]
    clock, loader = SystemClock(), VersionLoader()
    settings = EngineSettings(
        max_running=16, row_tokens=1024, kv_tokens=16_384, prefill_chunk_tokens=512, max_versions=1
    )
    engine = LocalEngine(EngineCore(settings, loader, replica_id=LOCAL, clock=clock, ids=RandomIds()), loader, clock)
    try:
        await engine.load(str(store.path(first)), first)
        begun_s = time.perf_counter()
        ends = await asyncio.gather(*(_ended(engine, first, number) for number in DRAIN_TOKENS))
        await engine.unload(first)
        await engine.load(str(store.path(second)), second)
        window_s = time.perf_counter() - begun_s
        return 1.0 - sum(end - begun_s for end in ends) / (len(ends) * window_s)
    finally:
        await engine.close()


async def _ended(engine: LocalEngine, version: int, num_tokens: int) -> float:
    await engine.generate(request_of(f"drain-{num_tokens}", version, follows=False, max_tokens=num_tokens))
    return time.perf_counter()


if __name__ == "__main__":
    sys.exit(main())
