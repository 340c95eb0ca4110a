from pathlib import Path

import pytest

from steelyard.errors import IntegrityError, Refused
from steelyard.run.coordinating import Recordings
from steelyard.run.directory import RunDirectory
from steelyard.traces.shared_ledger import SharedLedger


def directory_with(tmp_path: Path, ledger: str) -> RunDirectory:
    directory = RunDirectory(tmp_path)
    directory.make_folders()
    (directory.traces / "recorded.log").write_text(ledger, encoding="ascii")
    return directory


def test_what_a_recorder_elsewhere_counted_is_ended_and_told_the_same_again(tmp_path: Path) -> None:
    directory = directory_with(tmp_path, "att_other req_1 7\n")
    elsewhere = SharedLedger(directory.recorded)
    elsewhere.add("att_1", "req_2", 5)
    recordings = Recordings(directory)
    assert recordings.discard("att_1") == recordings.discard("att_1") == Recordings(directory).discard("att_1") == 5
    with pytest.raises(Refused, match="had ended"):
        elsewhere.add("att_1", "req_3", 5)


def test_what_the_control_process_of_a_run_had_counted_is_known_too(tmp_path: Path) -> None:
    recordings = Recordings(directory_with(tmp_path, "att_1 req_1 7\natt_1 req_2 4\natt_2 req_3 1\natt_1 req"))
    assert [recordings.discard(attempt_id) for attempt_id in ("att_1", "att_2", "att_3")] == [11, 1, 0]


def test_a_run_without_a_control_process_has_recorded_nothing_yet(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    directory.make_folders()
    assert Recordings(directory).discard("att_1") == 0


def test_a_damaged_ledger_is_refused(tmp_path: Path) -> None:
    with pytest.raises(IntegrityError, match="line 1"):
        Recordings(directory_with(tmp_path, "no ledger\n"))
