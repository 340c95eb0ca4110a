"""S1: a worker was killed; its containers lived on and used up the quota.

A sandbox is labelled by its attempt, and dies with its worker; what is left of one is ended when a worker with the same
key starts.
"""

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from steelyard.coordinator.capability import Role
from steelyard.coordinator.effects import AttemptBegan
from steelyard.run.joining import own_home
from steelyard.run.remote_worker import WorkerOptions, run_worker
from steelyard.testing.joined_rig import CONFIG, JoinedRig, play_joined


def labelled(pid: int) -> set[int]:
    """Processes below ``pid`` that carry the label of an attempt, and all below those."""
    found: set[int] = set()
    for process in psutil.Process(pid).children(recursive=True):
        if process.name().startswith("sy:att_owned_"):
            found |= {process.pid, *(child.pid for child in process.children(recursive=True))}
    return found


@pytest.mark.parametrize("kind", ["process", "nursery"])
def test_s1_nothing_of_a_worker_that_was_killed_while_tools_ran_is_left_once_a_worker_has_started_again(
    tmp_path: Path, kind: str
) -> None:
    joined = JoinedRig(tmp_path)

    async def scene() -> None:
        options = WorkerOptions(
            coordinators=(joined.coordinator_url,), gateway=joined.gateway_url,
            key_file=joined.key_file(Role.WORKER), home=str(joined.home), drain_s=0.0,
        )  # fmt: skip
        async with own_home(options, Path(options.key_file).read_text()) as home:
            notes = home / "sandboxes" / "rollout"
            family = await asyncio.to_thread(kill_an_owner, kind, notes)
        assert list(notes.glob("*.json")), "it could not tidy up"
        began = joined.heard(AttemptBegan)
        working = asyncio.create_task(run_worker(CONFIG, options))
        await began.wait()
        assert {pid for pid in family if psutil.pid_exists(pid)} == set()
        signal.raise_signal(signal.SIGTERM)
        await working

    play_joined(joined, scene)


def kill_an_owner(kind: str, notes: Path) -> set[int]:
    """SIGKILL a process whose sandboxes run tools; what belonged to those."""
    command = [sys.executable, "-m", "steelyard.testing.sandbox_owner", kind, str(notes)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"begun\n"
        while not (family := labelled(owner.pid)):
            assert owner.poll() is None
        owner.kill()
    return family
