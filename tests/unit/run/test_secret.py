import multiprocessing
from pathlib import Path

import pytest

from steelyard.coordinator.capability import CapabilityRing, Role
from steelyard.errors import InputError, RunDirectoryError
from steelyard.run.directory import RunDirectory
from steelyard.run.secret import issue_key, run_secret


def test_the_secret_is_made_once_and_is_for_its_owner_alone(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    secret = run_secret(directory)
    assert len(secret) == 32
    assert directory.secret.stat().st_mode & 0o777 == 0o600
    assert run_secret(directory) == secret
    assert [path.name for path in tmp_path.iterdir()] == ["coordinator.secret"]


def test_processes_that_make_it_at_the_same_time_agree(tmp_path: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        assert len(set(pool.map(run_secret, [RunDirectory(tmp_path)] * 12, chunksize=1))) == 1


def test_a_secret_that_others_can_read_is_refused(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    run_secret(directory)
    directory.secret.chmod(0o640)
    with pytest.raises(RunDirectoryError, match=r"must be for its owner alone \(chmod 600\), got mode 0640"):
        run_secret(directory)


@pytest.mark.parametrize("text", ["", "zz", "00" * 31, "\xff"])
def test_a_file_that_holds_no_secret_is_refused_without_its_content(tmp_path: Path, text: str) -> None:
    directory = RunDirectory(tmp_path)
    directory.secret.touch(mode=0o600)
    directory.secret.write_text(text, encoding="latin-1")
    with pytest.raises(RunDirectoryError, match="must hold 32 bytes in hex, it does not"):
        run_secret(directory)


def test_a_key_is_good_for_the_run_whose_secret_signed_it(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    key = issue_key(directory, Role.SCORER, "s1", 1000.0)
    assert CapabilityRing(run_secret(directory)).verify(key, 999.0).worker_id == "s1"
    with pytest.raises(InputError, match="worker_id"):
        issue_key(directory, Role.SCORER, "no dots.please", 1000.0)
