"""R4: one NaN reward made the mean of its group NaN, and with it every advantage.

A value that is not finite is ``grader_failed``: the other members are trained as if it had not been there.
"""

import asyncio
import math
import tempfile
from pathlib import Path

import pytest

from steelyard.coordinator import events as e
from steelyard.coordinator.journal.base import decode
from steelyard.metrics import Counters
from steelyard.testing.graders import grade_all, hand_in, moody_pool
from steelyard.testing.run_rig import SCORER, RunRig, grpo_advantages, make_score, make_settings
from steelyard.testing.training_data import make_score as verdict_on
from steelyard.types import Outcome

NAN_1_0_1 = [b"nan", b"1", b"", b"1"]
"""In a real process: ``nan`` is judged as NaN, anything else is worth its number of bytes."""


async def check_trained_without(rig: RunRig, poisoned: str, others: list[str]) -> None:
    """The batch holds the others with the advantages of 1, 0, 1, and nothing of the poisoned one."""
    plan = await rig.begin(0)
    assert sorted(member.attempt_id for member in plan.members) == sorted(others)
    batch = rig.assemble(plan)
    expected = grpo_advantages([verdict_on(name, value) for name, value in zip(others, (1.0, 0.0, 1.0), strict=True)])
    for sample in batch.samples:
        assert sample.advantage == pytest.approx(expected[sample.attempt_id])
        assert math.isfinite(sample.advantage)
    failed = [
        event
        for event in (decode(record.payload) for record in rig.memory_journal.records())
        if isinstance(event, e.GraderFailed)
    ]
    assert {(event.attempt_id, event.outcome) for event in failed} == {(poisoned, Outcome.GRADER_FAILED)}
    assert rig.audit().is_passed


def group_of_four() -> RunRig:
    return RunRig(make_settings(lag=0, groups_per_batch=1, group_size=4))


def test_r4_nan_1_0_1_from_a_real_grader_trains_three_members() -> None:
    async def scenario() -> None:
        rig, counters = await group_of_four().start(), Counters()
        poisoned, *others = await hand_in(rig, NAN_1_0_1)
        with tempfile.TemporaryDirectory() as directory:
            async with moody_pool(Path(directory), counters) as pool:
                await grade_all(rig, pool, counters)
        counts = counters.read()
        graded = (counts["scoring.scored"], counts["scoring.grader_failed"])
        assert graded == (3, rig.settings.max_grader_attempts), "it is noticed where it is said"
        await check_trained_without(rig, poisoned, others)
        await rig.coordinator.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, None])
def test_r4_a_scorer_that_calls_it_scored_is_not_believed(value: float | None) -> None:
    async def scenario() -> None:
        rig = await group_of_four().start()
        attempts = await hand_in(rig, NAN_1_0_1)
        values = dict(zip(attempts, (value, 1.0, 0.0, 1.0), strict=True))
        while jobs := await rig.coordinator.lease_scores(SCORER, 4, 0.0):
            for job in jobs:
                await rig.coordinator.score(make_score(job, values[job.attempt_id]))
        await check_trained_without(rig, attempts[0], attempts[1:])
        await rig.coordinator.close()

    asyncio.run(scenario())
