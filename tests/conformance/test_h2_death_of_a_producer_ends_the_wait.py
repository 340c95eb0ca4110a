"""H2: all producers were dead and the trainer polled an empty buffer for hours.

The wait for a batch ends at once with the first producer's error, and the run says how to go on.
"""

import signal

from steelyard.testing.small_runs import CrashedRun


def test_h2_a_killed_replica_ends_the_run_with_its_own_error(crashed_run: CrashedRun) -> None:
    assert crashed_run.returncode == 3, crashed_run.stderr
    assert f"steelyard: process replica-0 ended with signal {int(signal.SIGKILL)}" in crashed_run.stderr
    assert "still missing" not in crashed_run.stderr, "no deadline had to pass"
    assert "steelyard train --resume" in crashed_run.stderr
