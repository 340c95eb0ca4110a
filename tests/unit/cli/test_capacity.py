"""The answer as people and as programs read it."""

import json

import pytest

from steelyard.cli.main import main


def test_the_answer_names_slots_for_each_demand(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "capacity",
        "--rate",
        "20",
        "--time",
        "5",
        "--burst",
        "2",
        "--burst-s",
        "60",
        "--slots-per-host",
        "8",
        "--failures",
        "1",
    ]
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "100 slots are busy on average (20 requests/s of 5 s)"
    assert lines[1].startswith("114 so that the p99 wait is at most 1 s")
    assert lines[2] == "197 so that it is after a burst of 60 s at 2 times the rate, too"
    assert lines[3] == "208 on 26 hosts of 8, of which 1 may be down"
    assert lines[4] == "48% of them are busy on average"


def test_programs_get_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["capacity", "--rate", "20", "--time", "5", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["busy_slots"] == 100.0


def test_an_absurd_question_is_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["capacity", "--rate", "-1", "--time", "5"]) == 2
    assert capsys.readouterr().err == "steelyard: rate_per_s must be finite and > 0, got -1.0\n"
