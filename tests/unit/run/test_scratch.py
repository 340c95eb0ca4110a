"""Scratch folders: gone with their block, and cleared by others once their owner is dead."""

import fcntl
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from steelyard.run.scratch import clear_abandoned, scratch_folder

NOW_S = 1_000_000_000.0

HOLD_AND_DIE = """
import os
from steelyard.run.scratch import scratch_folder
with scratch_folder() as folder:
    (folder / "file").write_text("x")
    print(folder, flush=True)
    os._exit(1)
"""


@pytest.fixture(autouse=True)
def _own_temporary_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)


def test_a_folder_is_empty_but_for_its_lock_and_goes_with_the_block(tmp_path: Path) -> None:
    with scratch_folder() as folder:
        assert folder.parent == tmp_path
        assert [path.name for path in folder.iterdir()] == ["lock"]
        (folder / "socket").write_text("x")
    assert not folder.exists()


def test_a_held_folder_is_spared(tmp_path: Path) -> None:
    with scratch_folder() as folder:
        assert clear_abandoned(tmp_path, NOW_S) == 0
        with scratch_folder():
            assert folder.exists()


def test_the_folder_of_a_dead_owner_is_cleared_by_the_next_one() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", HOLD_AND_DIE], capture_output=True, text=True, check=False, timeout=60
    )
    left = Path(ended.stdout.strip())
    assert (left / "file").exists(), ended.stderr
    with scratch_folder():
        assert not left.exists()


def test_a_folder_that_is_not_locked_yet_is_spared_while_it_is_young(tmp_path: Path) -> None:
    folder = tmp_path / "steelyard-run-x"
    folder.mkdir()
    os.utime(folder, (NOW_S, NOW_S))
    assert clear_abandoned(tmp_path, NOW_S + 60) == 0
    assert clear_abandoned(tmp_path, NOW_S + 7200) == 1
    assert not folder.exists()


def test_folders_of_others_are_left_alone(tmp_path: Path) -> None:
    foreign = tmp_path / "steelyard-else"
    foreign.mkdir()
    (foreign / "lock").touch()
    assert clear_abandoned(tmp_path, NOW_S) == 0
    assert foreign.exists()


def test_children_do_not_keep_the_lock(tmp_path: Path) -> None:
    with scratch_folder() as folder:
        child = subprocess.Popen(["sleep", "60"], close_fds=True)
        name = folder
        copy = tmp_path / "steelyard-run-copy"
        name.rename(copy)
    try:
        with (copy / "lock").open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        child.kill()
        child.wait(30)
