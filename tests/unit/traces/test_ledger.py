import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.errors import IntegrityError, StorageFailed
from steelyard.traces.ledger import TokenLedger, read_ledger


def test_tokens_are_counted_per_attempt_and_survive_a_new_start(tmp_path: Path) -> None:
    ledger = TokenLedger(tmp_path / "ledger")
    ledger.add("att_a", "req_1", 5)
    ledger.add("att_b", "req_2", 7)
    ledger.add("att_a", "req_3", 11)
    ledger.sync()
    ledger.close()
    again = TokenLedger(tmp_path / "ledger")
    assert again.by_attempt == {"att_a": 16, "att_b": 7}
    assert (again.recorded("att_a"), again.recorded("att_unknown"), again.total) == (16, 0, 23)
    again.close()


@given(cut=st.integers(min_value=1, max_value=200))
def test_a_line_cut_short_by_a_crash_was_never_counted(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    path = tmp_path_factory.mktemp("ledger") / "ledger"
    ledger = TokenLedger(path)
    for turn in range(8):
        ledger.add("att_a", f"req_{turn}", 10)
    ledger.close()
    data = path.read_bytes()
    path.write_bytes(data[: max(0, len(data) - cut)])
    whole = path.read_bytes().count(b"\n")
    assert read_ledger(path).get("att_a", 0) == 10 * whole
    again = TokenLedger(path)
    again.add("att_a", "req_next", 1)
    again.close()
    assert read_ledger(path) == {"att_a": 10 * whole + 1}


def test_a_line_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    path.write_bytes(b"att_a req_1 5\natt_a req_2 -3\n")
    with pytest.raises(IntegrityError, match="line 2"):
        TokenLedger(path)
    with pytest.raises(IntegrityError, match="line 2"):
        read_ledger(path)


def test_a_run_without_a_ledger_has_recorded_nothing(tmp_path: Path) -> None:
    assert read_ledger(tmp_path / "ledger") == {}


_FILLS_UP = """
import resource, signal, sys
from pathlib import Path
from steelyard.errors import StorageFailed
from steelyard.traces.ledger import TokenLedger

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
ledger = TokenLedger(Path(sys.argv[1]))
ledger.add("att_a", "req_0", 3)
resource.setrlimit(resource.RLIMIT_FSIZE, (20, 20))
for _ in range(2):
    try:
        ledger.add("att_a", "req_1", 4)
    except StorageFailed as error:
        print(ledger.recorded("att_a"), error)
"""


def test_a_full_disk_counts_nothing_and_leaves_the_file_whole(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    done = subprocess.run(
        [sys.executable, "-c", _FILLS_UP, str(path)], capture_output=True, text=True, check=True, timeout=60
    )
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["3", "3"]
    assert read_ledger(path) == {"att_a": 3}


def test_a_ledger_that_cannot_be_opened_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "ledger").mkdir()
    with pytest.raises(StorageFailed, match="ledger"):
        TokenLedger(tmp_path / "ledger")
