"""Recorders and a coordinator that append to one file: whatever the order, both count the same for ever."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.errors import IntegrityError, Refused, StorageFailed
from steelyard.traces.shared_ledger import SharedLedger

STEPS = st.lists(st.integers(0, 9), max_size=8)


@given(steps=STEPS, end_at=st.integers(0, 8))
def test_what_comes_after_the_end_is_refused_and_not_counted(
    tmp_path_factory: pytest.TempPathFactory, steps: Sequence[int], end_at: int
) -> None:
    root = tmp_path_factory.mktemp("ledger")
    recorder, coordinator = SharedLedger(root), SharedLedger(root)
    counted = None
    for index, num_tokens in enumerate(steps):
        if index == end_at:
            counted = coordinator.end("att_1")
        if counted is None:
            recorder.add("att_1", f"req_{index}", num_tokens)
        else:
            with pytest.raises(Refused) as caught:
                recorder.add("att_1", f"req_{index}", num_tokens)
            assert caught.value.reason == "late"
    wanted = sum(steps[:end_at])
    assert counted in (None, wanted)
    assert coordinator.end("att_1") == coordinator.end("att_1") == wanted
    assert recorder.recorded("att_1") == wanted
    assert SharedLedger(root).by_attempt() == ({"att_1": wanted} if wanted else {})


def test_an_attempt_that_recorded_nothing_is_ended_at_nothing_and_takes_no_more(tmp_path: Path) -> None:
    ledger = SharedLedger(tmp_path / "recorded")
    assert ledger.recorded("att_1") == 0
    assert ledger.end("att_1") == 0
    with pytest.raises(Refused, match="had ended before request req_1"):
        ledger.add("att_1", "req_1", 5)
    assert ledger.by_attempt() == {}


def test_a_part_of_a_line_counts_nothing(tmp_path: Path) -> None:
    ledger = SharedLedger(tmp_path)
    ledger.add("att_1", "req_1", 5)
    for torn in (b"req_2 1", b"req_2 12\nreq_3", b" 7 .", b"\xff 1 . x"):
        with (tmp_path / "att_1").open("ab") as file:
            file.write(torn + b"\n")
        assert ledger.recorded("att_1") == 5
    with (tmp_path / "att_1").open("ab") as file:
        file.write(b"req_4 9 .")
    assert ledger.recorded("att_1") == 5, "a line without its end is being written"


def test_a_disk_that_refuses_is_told_and_nothing_is_recorded(tmp_path: Path) -> None:
    (tmp_path / "att_1").mkdir()
    ledger = SharedLedger(tmp_path)
    with pytest.raises(StorageFailed):
        ledger.add("att_1", "req_1", 5)
    (tmp_path / "file").touch()
    with pytest.raises(StorageFailed):
        SharedLedger(tmp_path / "file")


def test_a_name_that_could_lead_elsewhere_is_refused(tmp_path: Path) -> None:
    with pytest.raises(IntegrityError, match="an attempt id must be"):
        SharedLedger(tmp_path).end("../att_1")
