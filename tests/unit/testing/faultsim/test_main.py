import pytest

from steelyard.testing.faultsim.__main__ import main


def test_a_seed_is_replayed_with_a_trace_that_one_can_read(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seed", "1"]) == 0
    short = capsys.readouterr().out
    assert main(["--seed", "1", "--verbose"]) == 0
    verbose = capsys.readouterr().out
    assert "control starts, life 1" in short
    assert "faults of this seed:" in short
    assert short.endswith("seed 1: all invariants hold\n")
    assert "worker-0 asks lease" in verbose
    assert set(short.splitlines()) <= set(verbose.splitlines())
