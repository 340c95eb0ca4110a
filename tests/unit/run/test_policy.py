"""What the user is told of the quick policy."""

from pathlib import Path

from steelyard.run.policy import early_note
from steelyard.trainer.quick_recipe import WarmUpReport


def test_a_warm_up_that_ran_out_of_time_says_so_and_how_to_repeat_it() -> None:
    report = WarmUpReport(
        num_parameters=1, num_steps=310, num_tokens=1, first_loss=5.0, last_loss=1.0, duration_s=95.0, is_early=True
    )
    note = early_note(report, 700, Path("/cache/policies/abc"))
    assert "after 310 of 700 steps" in note
    assert note.endswith("delete /cache/policies/abc")
