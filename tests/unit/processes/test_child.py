import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from steelyard.errors import DeadlineExceeded, ProcessDied
from steelyard.processes.child import ChildProcess, pin_to_core, thread_environment


def start_and_connect(tmp_path: Path, module: str, arguments: list[str], deadline_s: float) -> None:
    async def run() -> None:
        child = await ChildProcess.start("helper", module, arguments, log_path=tmp_path / "log")
        try:
            await child.connect(tmp_path / "socket", deadline_s)
        finally:
            await child.stop(5)

    asyncio.run(run())


def test_the_exit_of_a_child_ends_the_wait_and_shows_the_end_of_its_log(tmp_path: Path) -> None:
    with pytest.raises(ProcessDied, match=r"process helper ended with exit code 1(?s:.*)No module named") as caught:
        start_and_connect(tmp_path, "steelyard.no_such_module", [], 600)
    assert caught.value.returncode == 1


def test_a_child_that_never_listens_is_named_when_the_deadline_passes(tmp_path: Path) -> None:
    with pytest.raises(DeadlineExceeded, match="process helper to listen"):
        start_and_connect(tmp_path, "http.server", ["--bind", "127.0.0.1", "0"], 0.05)


def test_a_killed_child_is_reported_with_its_signal(tmp_path: Path) -> None:
    async def run() -> None:
        child = await ChildProcess.start("helper", "http.server", ["--bind", "127.0.0.1", "0"], log_path=tmp_path / "l")
        os.kill(child.pid, signal.SIGKILL)
        await asyncio.wait_for(child.watch(), 10)

    with pytest.raises(ProcessDied, match="process helper ended with signal 9"):
        asyncio.run(run())


def test_a_child_dies_with_its_parent_even_when_that_is_killed() -> None:
    grandchild = (
        "import os,sys,time; from steelyard.processes.child import die_with_parent;"
        "die_with_parent(int(sys.argv[1])); print(os.getpid(), flush=True); time.sleep(600)"
    )
    parent = (
        "import os,subprocess,sys,time;"
        f"subprocess.Popen([sys.executable, '-c', {grandchild!r}, str(os.getpid())]); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        process.kill()
        # The grandchild holds the pipe's other end: end of file means that it is gone.
        assert process.stdout.read() == b""


def test_threads_are_bounded_and_spin_for_a_moment_where_there_are_several() -> None:
    one, two = thread_environment(1), thread_environment(2)
    assert (one["OMP_NUM_THREADS"], two["OMP_NUM_THREADS"]) == ("1", "2")
    assert one["OMP_WAIT_POLICY"] == two["OMP_WAIT_POLICY"] == "PASSIVE"
    assert one["GOMP_SPINCOUNT"] == "0"
    assert 0 < int(two["GOMP_SPINCOUNT"]) <= 100_000


def test_no_core_means_no_pinning() -> None:
    before = os.sched_getaffinity(0)
    pin_to_core(None)
    assert os.sched_getaffinity(0) == before
