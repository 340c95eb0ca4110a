"""What only a GPU can tell, in one script of under five minutes, for when one is at hand.

    noise     how far the local engine's log-probabilities are from the trainer's on equal weights, in each dtype: the
              noise of a probe, and the tolerance of the table beside it
    digest    vLLM loads a published version in place: its loaded digest and probe, and that a changed matrix is noticed
    transfer  weights broadcast from a trainer's process to a replica's, over NCCL (two GPUs) or gloo (CPU), and the
              digest of what arrived; beside it, writing and reading the same version as files
    sleep     vLLM gives its memory away and takes it back: times of sleep and wake-up, proof included

Each part runs in a process of its own with a deadline of its own, so that one that crashes or hangs costs no other;
its figures are printed as they come, one JSON object a line. Without a GPU nothing is measured and the script says so;
``--quick`` then runs the same code on the CPU, to show that it works. What was seen on no GPU is not yet measured on a
GPU, whatever this prints.

    python benchmarks/gpu.py                  all parts, on the GPU
    python benchmarks/gpu.py --quick          all parts on what there is, smaller
    python benchmarks/gpu.py --check          the same: there is no floor yet
    python benchmarks/gpu.py --part noise     one part

A part that fails gives exit code 3.
"""

import argparse
import asyncio
import contextlib
import json
import math
import multiprocessing
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import torch
import torch.distributed

from steelyard.clock import SystemClock
from steelyard.errors import IntegrityError, SteelyardError
from steelyard.ids import RandomIds
from steelyard.inference.engine_core import EngineCore, EngineSettings
from steelyard.inference.local_engine import LocalEngine
from steelyard.inference.vllm_api import KEPT_ALIVE_S, VllmApi
from steelyard.inference.vllm_engine import VllmEngine, VllmSettings
from steelyard.inference.vllm_server import ServerSettings, VllmServer
from steelyard.testing.tiny_model import write_small_model
from steelyard.testing.wrong_weights import MisledVllm, large_matrices, with_matrix_changed
from steelyard.trainer.model import load_model
from steelyard.types import Manifest
from steelyard.weights.loader import VersionLoader, build_module
from steelyard.weights.manifest import weights_digest
from steelyard.weights.parameters import parameter_digests, published_tensors
from steelyard.weights.publisher import VersionPublisher
from steelyard.weights.reader import VersionReader
from steelyard.weights.tolerance import NOISE

NOT_MEASURED = "not yet measured on a GPU"
DTYPES = ("float32", "bfloat16", "float16")
VLLM_PYTHON = ".venv-vllm/bin/python"
CALL_DEADLINE_S, START_DEADLINE_S, STOP_DEADLINE_S = 30.0, 90.0, 10.0
NUM_TRANSFERS = 5
BUCKET_BYTES = 64 << 20
EXIT_PART_FAILED = 3


@dataclass(frozen=True)
class Setting:
    """Where a part works, and on what."""

    device: str
    model_dir: Path
    vllm_python: str
    folder: Path

    @property
    def device_name(self) -> str:
        return torch.cuda.get_device_name(0) if self.device == "cuda" else "CPU"


# --- parts: each returns its figures --------------------------------------------------------------------


def measure_noise(setting: Setting) -> dict[str, object]:
    """Probe of the local engine against the trainer's forward pass, both on the device."""
    figures: dict[str, object] = {}
    for dtype in DTYPES:
        module = load_model(setting.model_dir).to(setting.device)
        directory, manifest = publish(setting, module, dtype)
        error = asyncio.run(local_error(setting.device, directory))
        spread = statistics.fmean(logprob for row in manifest.probe.logprobs for logprob in row)
        noise = NOISE.get(("local", dtype, 1))
        figures[dtype] = {
            "probe_error_max": error,
            "mean_logprob": spread,
            "tolerance_measured_on_a_cpu": noise.probe_tolerance if noise is not None else None,
        }
    return figures


async def local_error(device: str, directory: Path) -> float:
    loader, clock = VersionLoader(), SystemClock()
    settings = EngineSettings(max_running=8, row_tokens=128, kv_tokens=2048, probe_tolerance=math.inf, device=device)
    core = EngineCore(settings, loader, replica_id="replica-0", clock=clock, ids=RandomIds())
    engine = LocalEngine(core, loader, clock)
    try:
        return (await engine.load(str(directory), 1)).probe_max_error
    finally:
        await engine.close()


def measure_digest(setting: Setting) -> dict[str, object]:
    """vLLM in bfloat16: an honest load, and one of a changed matrix."""
    return asyncio.run(vllm_digest(setting))


async def vllm_digest(setting: Setting) -> dict[str, object]:
    dtype = "bfloat16"
    directory, manifest = publish(setting, load_model(setting.model_dir), dtype)
    wrong = setting.folder / "wrong"
    rng = random.Random(0)
    with_matrix_changed(directory, wrong, large_matrices(manifest)[0], rng)
    async with vllm_server(setting, dtype, ()) as (session, api):
        proof = await vllm_engine(api).load(str(directory), 1)
        misled = MisledVllm(session, "http://vllm", "vllm", CALL_DEADLINE_S, wrong)
        try:
            await vllm_engine(misled).load(str(directory), 1)
            noticed = False
        except IntegrityError as error:
            noticed = "digest" in str(error)
    if not noticed:
        raise IntegrityError("the loaded digest must notice a changed matrix, it did not")
    return {
        "dtype": dtype,
        "digest_is_as_published": proof.weights_digest == manifest.weights_digest,
        "probe_error_max": proof.probe_max_error,
        "loaded_in_s": proof.loaded_in_s,
        "changed_matrix_is_noticed": noticed,
    }


def measure_transfer(setting: Setting) -> dict[str, object]:
    """Broadcast of a version between two processes."""
    num_gpus = torch.cuda.device_count() if setting.device == "cuda" else 0
    if num_gpus == 1:
        return {"not_measured": f"NCCL wants a GPU for each of two processes, this machine has one: {NOT_MEASURED}"}
    directory, manifest = publish(setting, load_model(setting.model_dir), "float32")
    began_s = time.perf_counter()
    VersionLoader().load(directory)
    read_s = time.perf_counter() - began_s
    answer = setting.folder / "transfer.json"
    arguments = (setting.device, str(directory), str(setting.folder / "rendezvous"), str(answer))
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=run_rank, args=(rank, *arguments)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    if any(process.exitcode for process in ranks):
        raise RuntimeError(f"both processes must end with 0, they ended with {[one.exitcode for one in ranks]}")
    found = json.loads(answer.read_bytes())
    if found.pop("weights_digest") != manifest.weights_digest:
        raise IntegrityError("the weights that arrived must have the digest of those that were sent")
    return {**found, "digest_is_as_published": True, "read_from_files_s": read_s}


def run_rank(rank: int, device: str, directory: str, rendezvous: str, answer: str) -> None:
    """Rank 0 sends the version, rank 1 receives it into a module of other weights and hashes what it has."""
    backend = "nccl" if device == "cuda" else "gloo"
    torch.distributed.init_process_group(backend, init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    if device == "cuda":
        torch.cuda.set_device(rank)
    manifest = VersionReader().read(directory)
    module = build_module(Path(directory), manifest).to(device)
    tensors = list(published_tensors(module).values())
    if rank:
        for tensor in tensors:
            tensor.zero_()
    took_s = [broadcast_s(tensors, device) for _ in range(NUM_TRANSFERS)]
    if rank:
        num_bytes = sum(tensor.nbytes for tensor in tensors)
        digest = weights_digest(parameter_digests(published_tensors(module)))
        figures = {
            "backend": backend,
            "num_bytes": num_bytes,
            "transfer_s": statistics.median(took_s),
            "bytes_per_s": num_bytes / statistics.median(took_s),
            "weights_digest": digest,
        }
        Path(answer).write_text(json.dumps(figures))
    torch.distributed.destroy_process_group()


def broadcast_s(tensors: list[torch.Tensor], device: str) -> float:
    """Seconds for all tensors, sent together in buckets."""
    torch.distributed.barrier()
    began_s = time.perf_counter()
    bucket: list[torch.Tensor] = []
    for index, tensor in enumerate(tensors):
        bucket.append(tensor)
        if index == len(tensors) - 1 or sum(one.nbytes for one in bucket) >= BUCKET_BYTES:
            flat = torch.cat([one.reshape(-1) for one in bucket])
            torch.distributed.broadcast(flat, src=0)
            begin = 0
            for one in bucket:
                one.copy_(flat[begin : begin + one.numel()].view_as(one))
                begin += one.numel()
            bucket = []
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began_s


def measure_sleep(setting: Setting) -> dict[str, object]:
    """Sleep and wake-up of a vLLM server at both levels."""
    return asyncio.run(vllm_sleep(setting))


async def vllm_sleep(setting: Setting) -> dict[str, object]:
    dtype = "bfloat16"
    directory, _ = publish(setting, load_model(setting.model_dir), dtype)
    if setting.device == "cpu":
        return {"not_measured": f"vLLM has no sleep mode on a CPU: {NOT_MEASURED}"}
    figures: dict[str, object] = {}
    async with vllm_server(setting, dtype, ("--enable-sleep-mode",)) as (_, api):
        engine = vllm_engine(api)
        await engine.load(str(directory), 1)
        for level in (1, 2):
            began_s = time.perf_counter()
            await engine.sleep(level)
            asleep_s = time.perf_counter()
            proof = await engine.wake_up()
            figures[f"level_{level}"] = {
                "sleep_s": asleep_s - began_s,
                "wake_up_with_proof_s": time.perf_counter() - asleep_s,
                "probe_error_max": proof.probe_max_error if proof is not None else None,
            }
    return figures


PARTS: dict[str, tuple[Callable[[Setting], dict[str, object]], float]] = {
    "noise": (measure_noise, 60.0),
    "transfer": (measure_transfer, 60.0),
    "digest": (measure_digest, 120.0),
    "sleep": (measure_sleep, 120.0),
}
"""With the seconds that each may take, its processes' start included; some end early, so all fit into five minutes."""

TOTAL_S = 290.0


# --- what the parts share -------------------------------------------------------------------------------


def publish(setting: Setting, module: torch.nn.Module, dtype: str) -> tuple[Path, Manifest]:
    """The module as version 1."""
    root = setting.folder / dtype
    publisher = VersionPublisher(root, setting.model_dir, math.inf, dtype=dtype)
    manifest = publisher.publish(module, version=1, step=1, parent_version=None)
    return root / "v000001", manifest


def vllm_engine(api: VllmApi) -> VllmEngine:
    settings = VllmSettings(probe_tolerance=math.inf, change_deadline_s=START_DEADLINE_S)
    return VllmEngine(api, VersionReader(), settings, replica_id="replica-0", clock=SystemClock(), ids=RandomIds())


@contextlib.asynccontextmanager
async def vllm_server(
    setting: Setting, dtype: str, extra_args: tuple[str, ...]
) -> AsyncIterator[tuple[aiohttp.ClientSession, VllmApi]]:
    """A server of ours, ready."""
    settings = ServerSettings(
        python=setting.vllm_python, model_dir=str(setting.model_dir), dtype=dtype, max_model_len=256, max_running=8,
        kv_cache_bytes=256 << 20, extra_args=extra_args,
    )  # fmt: skip
    socket_path = setting.folder / "vllm.sock"
    async with aiohttp.ClientSession(
        connector=aiohttp.UnixConnector(str(socket_path), keepalive_timeout=KEPT_ALIVE_S)
    ) as session:
        api = VllmApi(session, "http://vllm", "vllm", CALL_DEADLINE_S)
        server = await VllmServer.start("vllm", settings, socket_path, setting.folder / "vllm.log")
        try:
            await server.wait_until_ready(api, START_DEADLINE_S)
            yield session, api
        finally:
            await server.stop(STOP_DEADLINE_S)


# --- the script -----------------------------------------------------------------------------------------


def run_part(name: str, setting: Setting) -> dict[str, object]:
    """One part in this process; a failure of ours is a figure."""
    measure, _ = PARTS[name]
    try:
        return measure(setting)
    except (SteelyardError, RuntimeError, OSError, aiohttp.ClientError, TimeoutError) as error:
        return {"failed": f"{type(error).__name__}: {error}"[:2000]}


def run_part_apart(name: str, options: argparse.Namespace, left_s: float) -> dict[str, object]:
    """One part in a process group of its own, ended with all that it started when its time is over."""
    deadline_s = min(PARTS[name][1], left_s)
    command = [sys.executable, __file__, "--part", name, "--inside", "--vllm-python", options.vllm_python]
    command += ["--quick"] if options.quick else []
    command += ["--model", str(options.model)] if options.model else []
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
    try:
        out, err = process.communicate(timeout=max(1.0, deadline_s))
    except subprocess.TimeoutExpired:
        return {"failed": f"it must end within {deadline_s:.0f} s, it did not"}
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    try:
        return dict(json.loads(out.decode().splitlines()[-1]))
    except (ValueError, IndexError):
        return {"failed": f"exit code {process.returncode}: {err.decode(errors='replace')[-2000:]}"}


def print_inside(name: str, options: argparse.Namespace, device: str) -> None:
    """The part's figures as the last line of standard output."""
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        model_dir = options.model or write_small_model(folder / "model")
        setting = Setting(device, model_dir, options.vllm_python, folder)
        print(json.dumps({"device": setting.device_name, **run_part(name, setting)}), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="nothing more: there is no floor yet")
    parser.add_argument("--quick", action="store_true", help="on what there is: without a GPU, on the CPU")
    parser.add_argument("--part", choices=PARTS, help="this part only")
    parser.add_argument(
        "--model", type=Path, help="Hugging Face directory (default: a random decoder of 3.3M parameters)"
    )
    parser.add_argument("--vllm-python", default=VLLM_PYTHON, help=f"of vLLM's environment (default: {VLLM_PYTHON})")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    has_gpu = torch.cuda.is_available()
    if options.inside:
        print_inside(options.part, options, "cuda" if has_gpu else "cpu")
        return 0
    if not has_gpu:
        print(f"this machine has no GPU: all of this is {NOT_MEASURED}", flush=True)
        if not options.quick:
            return 0
    failed = []
    ends_at_s = time.monotonic() + TOTAL_S
    for name in [options.part] if options.part else PARTS:
        figures: dict[str, Any] = run_part_apart(name, options, ends_at_s - time.monotonic())
        print(json.dumps({"part": name, "status": "measured" if has_gpu else NOT_MEASURED, **figures}), flush=True)
        if "failed" in figures:
            failed.append(name)
    if failed:
        print(f"failed: {', '.join(failed)}")
    return EXIT_PART_FAILED if failed else 0


if __name__ == "__main__":
    sys.exit(main())
