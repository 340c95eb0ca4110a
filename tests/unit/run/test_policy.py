"""What the user is told of the quick policy."""

from pathlib import Path

import pytest

from steelyard.run.policy import early_note
from steelyard.trainer.quick_recipe import WarmUpReport


def report_of(num_steps: int) -> WarmUpReport:
    return WarmUpReport(
        num_parameters=1, num_steps=num_steps, num_tokens=1, first_loss=5.0, last_loss=1.0, duration_s=95.0
    )


def test_a_warm_up_that_ran_out_of_time_says_so_and_how_to_repeat_it() -> None:
    note = early_note(report_of(310), 700, Path("/cache/policies/abc"))
    assert note is not None
    assert "after 310 of 700 steps" in note
    assert note.endswith("delete /cache/policies/abc")


@pytest.mark.parametrize("num_steps", [560, 700])
def test_a_warm_up_that_was_whole_or_nearly_so_is_no_news(num_steps: int) -> None:
    assert early_note(report_of(num_steps), 700, Path("/cache/policies/abc")) is None
