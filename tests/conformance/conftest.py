"""Whole runs that several rows look at: each is made once, by the command line, when the first row asks for it."""

import subprocess
from pathlib import Path

import psutil
import pytest

from steelyard.testing.small_runs import CrashedRun, command, environment, steelyard, write_small_config
from steelyard.testing.tiny_model import write_tiny_model

SYNCHRONOUS_STEPS = 3
CRASHED_STEPS = 4


@pytest.fixture(scope="session")
def tiny_policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random policy in a Hugging Face directory."""
    return write_tiny_model(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="session")
def synchronous_run(tmp_path_factory: pytest.TempPathFactory, tiny_policy: Path) -> Path:
    """The directory of a finished run with lag bound 0."""
    home = tmp_path_factory.mktemp("synchronous")
    config = write_small_config(
        home, tiny_policy, admission={"max_policy_lag": 0}, train={"max_steps": SYNCHRONOUS_STEPS}
    )
    done = steelyard("train", config, f"run.dir={home / 'run'}", "--cache-dir", home / "cache")
    assert done.returncode == 0, done.stderr
    return home / "run"


@pytest.fixture(scope="session")
def crashed_run(tmp_path_factory: pytest.TempPathFactory, tiny_policy: Path) -> CrashedRun:
    """A run with lag bound 1: its replica is killed after the first step, then ``--resume`` takes it to its end."""
    home = tmp_path_factory.mktemp("crashed")
    config = write_small_config(
        home,
        tiny_policy,
        runtime={"max_restarts": 0},
        train={"max_steps": CRASHED_STEPS, "checkpoint_every": 2},
    )
    run = home / "run"
    running = subprocess.Popen(
        command("train", config, f"run.dir={run}", "--cache-dir", home / "cache"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    assert running.stdout is not None
    with running:
        for line in running.stdout:
            if " step 1/" in line:
                _kill_replicas(running.pid)
        stderr = running.stderr.read() if running.stderr is not None else ""
    resumed = steelyard("train", "--resume", run, "--cache-dir", home / "cache")
    return CrashedRun(run, running.returncode, stderr, resumed)


def _kill_replicas(pid: int) -> None:
    children = psutil.Process(pid).children()
    replicas = [child for child in children if any("replica_process" in word for word in child.cmdline())]
    assert replicas, "the run must have a replica"
    for replica in replicas:
        replica.kill()
