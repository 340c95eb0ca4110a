import os
import subprocess
import sys
from pathlib import Path

import pytest

from steelyard.errors import RunDirectoryError
from steelyard.run.directory import RunDirectory, RunLock, existing_directory, new_directory


def test_runs_are_numbered_after_the_highest_that_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "demo-007").mkdir(parents=True)
    (tmp_path / "runs" / "demo-x").mkdir()
    assert new_directory("demo", None).path == tmp_path / "runs" / "demo-008"
    assert new_directory("other", None).path == tmp_path / "runs" / "other-001"


def test_a_directory_with_a_run_in_it_is_refused_with_the_line_to_type(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("run: {}\n")
    with pytest.raises(RunDirectoryError, match=f"type: steelyard train --resume {tmp_path}"):
        new_directory("demo", str(tmp_path))


def test_a_directory_with_other_files_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(RunDirectoryError, match=r"run.dir must be new or empty, got .* which is not empty$"):
        new_directory("demo", str(tmp_path))


def test_a_directory_whose_run_died_before_it_had_a_configuration_is_as_good_as_empty(tmp_path: Path) -> None:
    (tmp_path / "run.lock").write_text("123\n")
    (tmp_path / "config.tmp").write_text("run:")
    assert new_directory("demo", str(tmp_path)).path == tmp_path


def test_what_is_no_run_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="does not exist"):
        existing_directory(str(tmp_path / "absent"))
    with pytest.raises(RunDirectoryError, match=r"has no config\.yaml"):
        existing_directory(str(tmp_path))


def test_a_second_run_in_the_same_directory_is_refused_and_names_the_first(tmp_path: Path) -> None:
    with RunLock(RunDirectory(tmp_path)), pytest.raises(RunDirectoryError, match=f"process {os.getpid()}"):  # noqa: SIM117
        with RunLock(RunDirectory(tmp_path)):
            raise AssertionError("two runs hold one lock")


def test_the_lock_ends_with_its_process_however_that_ends(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from steelyard.run.directory import RunDirectory, RunLock\n"
        "with RunLock(RunDirectory(Path(sys.argv[1]))): print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(RunDirectoryError, match=f"process {holder.pid}"), RunLock(RunDirectory(tmp_path)):
            raise AssertionError("two processes hold one lock")
        holder.kill()
    with RunLock(RunDirectory(tmp_path)):
        assert (tmp_path / "run.lock").read_text() == f"{os.getpid()}\n"
