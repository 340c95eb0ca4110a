"""R2: ``9**9**9**9`` as an answer froze the grader, and with it every GPU that waited for its scores.

Grading happens in a process that can be killed, within a deadline; its place is filled again. The answer is wrong, as
``answer_timed_out``; answers beside it are judged as ever.
"""

import asyncio
import tempfile
from pathlib import Path

import msgspec

from steelyard.config import SandboxConfig
from steelyard.coordinator import events as e
from steelyard.coordinator.journal.base import decode
from steelyard.environments.base import Services
from steelyard.environments.repair.environment import make_repair
from steelyard.environments.repair.generator import make_task
from steelyard.environments.repair.state import RepairArtifact
from steelyard.metrics import Counters
from steelyard.sandbox.function_calls import run_function_calls
from steelyard.testing.graders import grade_all, hand_in, moody_pool, repair_pool
from steelyard.testing.run_rig import RunRig, make_settings
from steelyard.testing.scoring import job
from steelyard.types import EndReason, Outcome

TASK_ID = "repair/train/0"
FROZEN = "def f(*arguments):\n    return 9**9**9**9\n"
SANDBOX = SandboxConfig(call_deadline_s=0.5, num_warm=1)


def artifact(source: str) -> bytes:
    return msgspec.msgpack.encode(RepairArtifact(source=source, submitted=True, actions=()))


def test_r2_the_answer_is_wrong_and_those_beside_and_after_it_are_judged() -> None:
    right = artifact("\n".join(make_task(TASK_ID).right_lines) + "\n")
    verifier = make_repair({}, Services(run_function=run_function_calls)).grader().verifier_version

    async def scenario(directory: Path) -> None:
        async with repair_pool(directory, Counters(), verifier, SANDBOX) as pool:
            frozen, beside = await asyncio.gather(
                pool.grade(job("frozen", task_id=TASK_ID), artifact(FROZEN)),
                pool.grade(job("right", task_id=TASK_ID), right),
            )
            after = await pool.grade(job("after", task_id=TASK_ID), right)
        assert (frozen.outcome, frozen.value, frozen.success) == (Outcome.SCORED, 0.0, False)
        assert frozen.end_reason is EndReason.ANSWER_TIMED_OUT
        assert [(score.outcome, score.value, score.success) for score in (beside, after)] == [
            (Outcome.SCORED, 1.0, True)
        ] * 2

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(scenario(Path(folder)))


def test_r2_a_grader_that_computes_it_itself_is_killed_and_replaced_and_the_batch_completes() -> None:
    async def scenario(directory: Path) -> None:
        rig, counters = RunRig(make_settings(lag=0, groups_per_batch=1, group_size=4)), Counters()
        await rig.start()
        # In a real process: ``hang`` computes 9**9**9**9, anything else is worth its number of bytes.
        frozen, *others = await hand_in(rig, [b"hang", b"1", b"", b"1"])
        async with moody_pool(directory, counters, deadline_s=0.5) as pool:
            await grade_all(rig, pool, counters)
            assert (await pool.grade(job("next"), b"12345")).value == 5.0
        assert counters.read()["scoring.stuck"] == 1
        plan = await rig.begin(0)
        scores = {member.attempt_id: member.score for member in plan.members}
        assert [scores[attempt].value for attempt in (frozen, *others)] == [0.0, 1.0, 0.0, 1.0]
        assert scores[frozen].end_reason is EndReason.ANSWER_TIMED_OUT
        events = [decode(record.payload) for record in rig.memory_journal.records()]
        assert not [event for event in events if isinstance(event, e.GraderFailed)], "it is the answer's fault"
        await rig.coordinator.close()

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(scenario(Path(folder)))
