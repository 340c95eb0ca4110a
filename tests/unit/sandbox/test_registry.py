import os
import subprocess
from pathlib import Path

import msgspec
import psutil

from steelyard.sandbox.registry import HostProcess, Registry, end_abandoned_sandboxes


def sleeper() -> "subprocess.Popen[bytes]":
    return subprocess.Popen(["sleep", "600"])


def test_sweeping_kills_what_was_noted_deletes_its_directory_and_forgets_it(tmp_path: Path) -> None:
    directory = tmp_path / "files"
    directory.mkdir()
    (directory / "leftover").write_text("x")
    notes = tmp_path / "notes"
    noted, other = sleeper(), sleeper()
    try:
        Registry(notes).add(noted.pid, directory)
        assert Registry(notes).sweep() == 1
        assert not psutil.pid_exists(noted.pid)
        assert other.poll() is None
    finally:
        for process in (noted, other):
            process.kill()
            process.wait(30)
    assert not directory.exists()
    assert list(notes.iterdir()) == []
    assert Registry(notes).sweep() == 0


def test_a_process_that_only_took_over_the_number_is_spared(tmp_path: Path) -> None:
    entry = HostProcess(pid=os.getpid(), created_at_s=psutil.Process().create_time() - 100)
    (tmp_path / f"{os.getpid()}.json").write_bytes(msgspec.json.encode(entry))
    assert Registry(tmp_path).sweep() == 0
    assert list(tmp_path.iterdir()) == []


def test_a_note_that_was_cut_off_is_dropped(tmp_path: Path) -> None:
    (tmp_path / "123.json").write_bytes(b'{"pid": 12')
    assert Registry(tmp_path).sweep() == 0
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_ended_is_forgotten(tmp_path: Path) -> None:
    with sleeper() as process:
        registry = Registry(tmp_path)
        registry.add(process.pid)
        assert len(list(tmp_path.iterdir())) == 1
        process.kill()
        process.wait(30)
        registry.remove(process.pid)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_is_not_there_yet_holds_nothing_to_sweep(tmp_path: Path) -> None:
    assert Registry(tmp_path / "new").sweep() == 0


def test_the_notes_of_all_dead_owners_of_a_run_are_swept(tmp_path: Path) -> None:
    sleepers = [sleeper(), sleeper()]
    try:
        for index, process in enumerate(sleepers):
            Registry(tmp_path / f"owner-{index}").add(process.pid)
        assert end_abandoned_sandboxes(tmp_path) == 2
        assert not any(psutil.pid_exists(process.pid) for process in sleepers)
    finally:
        for process in sleepers:
            process.kill()
            process.wait(30)
    assert end_abandoned_sandboxes(tmp_path) == 0
    assert end_abandoned_sandboxes(tmp_path / "absent") == 0


def test_a_directory_is_noted_before_it_is_made_so_that_a_kill_in_between_leaves_nothing(tmp_path: Path) -> None:
    registry = Registry(tmp_path / "notes")
    made, dropped = registry.make_directory(), registry.make_directory()
    (made / "file").write_text("left by a kill")
    registry.drop_directory(dropped)
    assert made.is_dir() and not dropped.exists()
    torn = tmp_path / "notes" / "steelyard-0000.folder"
    torn.write_text(str(tmp_path)[:-3])
    assert Registry(tmp_path / "notes").sweep() == 0
    assert not made.exists() and list((tmp_path / "notes").iterdir()) == []
