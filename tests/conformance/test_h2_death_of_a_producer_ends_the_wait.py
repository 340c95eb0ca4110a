"""H2: all producers were dead and the trainer polled an empty buffer for hours.

The wait for a batch ends at once with the first producer's error, and the run says how to go on.
"""

import asyncio
import signal

import pytest

from steelyard.errors import ProcessDied
from steelyard.testing.manual_clock import settle
from steelyard.testing.run_rig import WORKER, RunRig
from steelyard.testing.small_runs import CrashedRun


def test_h2_a_killed_replica_ends_the_run_with_its_own_error(crashed_run: CrashedRun) -> None:
    assert crashed_run.returncode == 3, crashed_run.stderr
    assert f"steelyard: process replica-0 ended with signal {int(signal.SIGKILL)}" in crashed_run.stderr
    assert "still missing" not in crashed_run.stderr, "no deadline had to pass"
    assert "steelyard train --resume" in crashed_run.stderr


def test_h2_the_trainer_that_waits_for_a_batch_gets_the_first_error_and_so_does_everybody_after_it() -> None:
    async def scenario() -> None:
        rig = await RunRig().start()
        first, second = ProcessDied("replica-0", -9, "out of memory"), ProcessDied("replica-1", -9)
        waiting = asyncio.create_task(rig.coordinator.next_batch(0, 1e9))
        await settle()
        assert not waiting.done()
        rig.coordinator.fail(first)
        rig.coordinator.fail(second)
        with pytest.raises(ProcessDied, match="replica-0 ended with signal 9; the end of its log:\nout of memory"):
            await asyncio.wait_for(waiting, 10)
        with pytest.raises(ProcessDied, match="replica-0"):
            await rig.coordinator.lease(WORKER, 1, 1e9)
        await rig.coordinator.crash()

    asyncio.run(scenario())
