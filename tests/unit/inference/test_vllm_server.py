"""Starting a vLLM server: what it is told, and what becomes of one that cannot start (H3)."""

import asyncio
import os
import sys
from pathlib import Path

import aiohttp
import psutil
import pytest

from steelyard.errors import DeadlineExceeded, InputError, ProcessDied
from steelyard.inference.vllm_api import VllmApi
from steelyard.inference.vllm_server import (
    WORKER_FOLDER,
    ServerSettings,
    VllmServer,
    server_arguments,
    server_environment,
)


def settings(python: Path) -> ServerSettings:
    return ServerSettings(
        python=str(python), model_dir="/policy", dtype="float32", max_model_len=640, max_running=64,
        kv_cache_bytes=1 << 26, extra_args=("--swap-space", "1"),
    )  # fmt: skip


def program(folder: Path, lines: str) -> Path:
    """A stand-in for an environment's Python."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{lines}\n")
    path.chmod(0o755)
    return path


def start(python: Path, folder: Path, deadline_s: float) -> None:
    async def main() -> None:
        socket_path = folder / "vllm.sock"
        async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(socket_path))) as session:
            api = VllmApi(session, "http://vllm", "vllm of rep_0", call_deadline_s=5.0)
            server = await VllmServer.start("vllm of rep_0", settings(python), socket_path, folder / "log")
            try:
                await server.wait_until_ready(api, deadline_s)
            finally:
                await server.stop(0.2)

    asyncio.run(main())


def test_h3_a_server_that_exits_ends_the_wait_with_the_end_of_its_log(tmp_path: Path) -> None:
    python = program(tmp_path, "echo no such model >&2; exit 3")
    with pytest.raises(ProcessDied, match="exit code 3") as death:
        start(python, tmp_path, deadline_s=60.0)
    assert "no such model" in str(death.value)


def test_a_server_that_never_answers_is_ended_with_all_its_processes(tmp_path: Path) -> None:
    python = program(tmp_path, f"echo loading; echo $$ > {tmp_path}/pid; sleep 1000 & trap '' TERM; wait; sleep 1000")
    with pytest.raises(DeadlineExceeded, match="vllm of rep_0") as late:
        start(python, tmp_path, deadline_s=1.0)
    assert "loading" in str(late.value)
    leader = int((tmp_path / "pid").read_text())
    left = [one.pid for one in psutil.process_iter() if _session(one.pid) == leader and one.status() != "zombie"]
    assert left == []


def test_a_missing_environment_says_how_to_make_it(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"inference\.vllm\.python must be .* `make venv-vllm`"):
        start(tmp_path / "nowhere", tmp_path, deadline_s=1.0)


def test_the_server_samples_as_asked_and_listens_on_a_socket_only(tmp_path: Path) -> None:
    arguments = server_arguments(settings(Path(sys.executable)), tmp_path / "vllm.sock")
    assert arguments[arguments.index("--uds") + 1] == str(tmp_path / "vllm.sock") and "--port" not in arguments
    assert arguments[arguments.index("--logprobs-mode") + 1] == "processed_logprobs"
    assert arguments[arguments.index("--generation-config") + 1] == "vllm"
    assert arguments[-2:] == ["--swap-space", "1"]


def test_the_server_sees_none_of_our_packages_and_no_settings_of_the_users() -> None:
    environment = server_environment(
        settings(Path(sys.executable)), {"PYTHONPATH": "/src", "VLLM_USE_V1": "0", "PYTHONHOME": "/x", "HOME": "/root"}
    )
    assert environment["PYTHONPATH"] == str(WORKER_FOLDER)
    assert "VLLM_USE_V1" not in environment and "PYTHONHOME" not in environment and environment["HOME"] == "/root"
    assert {path.suffix for path in WORKER_FOLDER.iterdir() if path.name != "__pycache__"} == {".py"}
    assert all(path.name.startswith("steelyard_vllm_") for path in WORKER_FOLDER.glob("*.py"))


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None
