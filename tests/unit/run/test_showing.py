"""Showing rollouts from journal and stores."""

import asyncio
from pathlib import Path

import pytest

from steelyard.coordinator.journal.sqlite import SqliteJournal
from steelyard.errors import InputError, IntegrityError
from steelyard.run.directory import RunDirectory
from steelyard.run.showing import list_rollouts, show_rollout
from steelyard.testing.run_rig import WORKER, RunRig
from steelyard.testing.tokenizer import write_tokenizer
from steelyard.testing.training_data import make_turn
from steelyard.traces.store import TraceStore
from steelyard.types import EndReason, Lease


def run_with_one_attempt(path: Path, versions: tuple[int, ...]) -> tuple[RunDirectory, Lease]:
    """A run whose first rollout is sealed; the named policy versions are stored."""
    directory = RunDirectory(path)
    directory.make_folders()
    directory.config.write_text("")
    for version in versions:
        write_tokenizer(directory.version(version))
        (directory.version(version) / "manifest.json").write_text("{}")

    async def scenario() -> Lease:
        rig = await RunRig(journal=SqliteJournal(directory.journal)).start()
        (lease,) = await rig.coordinator.lease(WORKER, 1, 0.0)
        store = TraceStore(directory.traces)
        store.append(make_turn([70, 71], [72, 73], attempt_id=lease.attempt_id))
        await store.seal(lease.attempt_id, EndReason.SUBMITTED, (), 0)
        await store.close()
        await rig.coordinator.artifact_ready(rig.seal(lease))
        await rig.score_all(lambda job: 1.0)
        await rig.coordinator.close()
        return lease

    return directory, asyncio.run(scenario())


def test_a_rollout_is_shown_with_its_trace_whichever_version_is_still_stored(tmp_path: Path) -> None:
    directory, lease = run_with_one_attempt(tmp_path, versions=(4, 5))
    text = show_rollout(directory, lease.rollout_id, with_tokens=True)
    assert f"attempt {lease.attempt_id}: 1 turns, 2 sampled tokens" in text
    assert "score 1.0 by v1" in text
    assert [line.split()[1] for line in text.splitlines() if " + " in line] == ["72", "73"]
    assert show_rollout(directory, lease.attempt_id, with_tokens=True) == text


def test_a_run_without_any_stored_version_says_so(tmp_path: Path) -> None:
    directory, lease = run_with_one_attempt(tmp_path, versions=())
    with pytest.raises(IntegrityError, match="must hold a policy version"):
        show_rollout(directory, lease.rollout_id, with_tokens=False)


def test_the_list_shows_what_came_of_each_rollout_and_an_unknown_one_is_refused(tmp_path: Path) -> None:
    directory, lease = run_with_one_attempt(tmp_path, versions=(0,))
    (line,) = [line for line in list_rollouts(directory, 20) if line.startswith(lease.rollout_id)]
    assert line.endswith("success, value 1")
    with pytest.raises(InputError, match="got rol_nobody"):
        show_rollout(directory, "rol_nobody", with_tokens=False)
