"""R1: the grader raised, a broad ``except`` made a 0 of it, and the policy was trained on an error of the grader.

A grader that raises has not judged: the outcome is ``grader_failed``, never a number; too many of them raise an alarm.
"""

import asyncio
import tempfile
from pathlib import Path

from steelyard.coordinator import events as e
from steelyard.coordinator.journal.base import decode
from steelyard.metrics import Counters
from steelyard.testing.graders import grade_all, hand_in, moody_pool
from steelyard.testing.run_rig import RunRig, grpo_advantages, make_settings
from steelyard.types import Outcome

ARTIFACTS = [b"raise", b"1", b"raise", b"", b"raise", b"1", b"raise", b"1"]
"""In a real process: ``raise`` raises, anything else is worth its number of bytes."""


def events_of(rig: RunRig) -> list[e.AnyEvent]:
    return [decode(record.payload) for record in rig.memory_journal.records()]


async def graded(artifacts: list[bytes], counters: Counters) -> tuple[RunRig, list[str]]:
    """One group with these artifacts, graded by a real process; the rig and the attempts."""
    rig = await RunRig(make_settings(lag=0, groups_per_batch=1, group_size=len(artifacts), max_drop_frac=1.0)).start()
    attempts = await hand_in(rig, artifacts)
    with tempfile.TemporaryDirectory() as directory:
        async with moody_pool(Path(directory), counters) as pool:
            await grade_all(rig, pool, counters)
    return rig, attempts


def test_r1_what_the_grader_could_not_judge_is_no_number_and_no_member_of_its_group() -> None:
    async def scenario() -> None:
        rig, attempts = await graded(ARTIFACTS, Counters())
        unjudged = {attempt for attempt, artifact in zip(attempts, ARTIFACTS, strict=True) if artifact == b"raise"}
        events = events_of(rig)
        assert not {event.score.attempt_id for event in events if isinstance(event, e.Scored)} & unjudged
        failed = [event for event in events if isinstance(event, e.GraderFailed)]
        assert {event.attempt_id for event in failed} == unjudged
        assert {event.outcome for event in failed} == {Outcome.GRADER_FAILED}
        assert all("KeyError: 'expected'" in event.detail for event in failed), "it says what was raised"
        assert len(failed) == len(unjudged) * rig.settings.max_grader_attempts, "the same artifact is scored again"
        plan = await rig.begin(0)
        assert {member.attempt_id for member in plan.members} == set(attempts) - unjudged
        advantages = {sample.attempt_id: sample.advantage for sample in rig.assemble(plan).samples}
        assert advantages == grpo_advantages([member.score for member in plan.members])
        assert sum(advantages.values()) < 1e-9
        await rig.coordinator.close()

    asyncio.run(scenario())


def test_r1_a_grader_that_raises_often_raises_an_alarm() -> None:
    async def scenario() -> None:
        counters = Counters()
        rig, _ = await graded(2 * ARTIFACTS, counters)
        assert counters.read()["scoring.alarms"] == 1
        (alarm,) = (await rig.coordinator.diagnose()).alarms
        assert "24 of 32 gradings failed" in alarm
        await rig.coordinator.close()

    asyncio.run(scenario())


def test_r1_a_group_that_could_not_be_judged_is_dropped_and_not_trained_as_failures() -> None:
    async def scenario() -> None:
        rig, attempts = await graded([b"raise", b"1", b"raise"], Counters())
        (dropped,) = [event for event in events_of(rig) if isinstance(event, e.GroupDropped)]
        assert dropped.reason is e.DropReason.INCOMPLETE
        books = await rig.coordinator.books(rig.stores.recorded)
        assert books.are_closed, books
        assert (books.prompts.trained, books.tokens.trained) == (0, 0)
        assert sum(rig.stores.recorded[attempt] for attempt in attempts) == books.tokens.recorded
        await rig.coordinator.close()

    asyncio.run(scenario())
