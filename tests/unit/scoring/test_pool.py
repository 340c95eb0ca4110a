"""Who is blamed for a stuck or dead grader process. The processes here are fakes; real ones in test_process.py."""

import asyncio
from collections.abc import Awaitable, Callable

from steelyard.errors import DeadlineExceeded, ProcessDied
from steelyard.metrics import Counters
from steelyard.scoring.base import GradeRequest
from steelyard.scoring.pool import GraderPool, PoolSettings
from steelyard.testing.scoring import VERIFIER_VERSION, FakeGraderProcess, Judge, job
from steelyard.types import EndReason, Outcome, Score, Verdict

GOOD = Verdict(value=1.0, success=True)


class Rig:
    """A pool over fake processes, all with one judge."""

    def __init__(self, judge: Judge, version: str = VERIFIER_VERSION, concurrency: int = 2) -> None:
        self.processes: list[FakeGraderProcess] = []
        self.counters = Counters()
        self.cpu_per_process_s = 0.0
        self.graded: list[tuple[str, str]] = []
        settings = PoolSettings(
            num_workers=1, concurrency=concurrency, deadline_s=10.0, verifier_version=VERIFIER_VERSION,
            is_deterministic=True,
        )  # fmt: skip

        async def start(name: str) -> FakeGraderProcess:
            async def note_and_judge(request: GradeRequest) -> Verdict:
                self.graded.append((name, request.job.job_id))
                process.used_cpu_s += self.cpu_per_process_s
                return await judge(request)

            process = FakeGraderProcess(name, note_and_judge, version)
            self.processes.append(process)
            return process

        self.pool = GraderPool(start, settings, self.counters)


def run(rig_and_body: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(30):
            await rig_and_body()

    asyncio.run(main())


async def good(request: GradeRequest) -> Verdict:
    return GOOD


async def late_for_bad(request: GradeRequest) -> Verdict:
    if request.artifact == b"bad":
        raise DeadlineExceeded("a verdict", ("scorer",), 10.0)
    return GOOD


async def dead_for_bad(request: GradeRequest) -> Verdict:
    if request.artifact == b"bad":
        raise ProcessDied("scorer", -11)
    return GOOD


def test_an_answer_that_keeps_its_grader_computing_alone_is_wrong() -> None:
    async def body() -> None:
        rig = Rig(late_for_bad)
        rig.cpu_per_process_s = 9.0
        score = await rig.pool.grade(job("bad"), b"bad")
        assert (score.outcome, score.value, score.success) == (Outcome.SCORED, 0.0, False)
        assert score.end_reason is EndReason.ANSWER_TIMED_OUT
        assert [process.name for process in rig.processes] == ["scorer-0", "scorer-alone"]
        assert all(process.is_killed for process in rig.processes)
        assert (await rig.pool.grade(job("next"), b"x")).value == 1.0
        assert rig.counters.read() == {"scoring.graded_alone": 1, "scoring.stuck": 1}

    run(body)


def test_a_grader_that_only_waited_is_no_fault_of_the_answer() -> None:
    async def body() -> None:
        rig = Rig(late_for_bad)
        score = await rig.pool.grade(job("bad"), b"bad")
        assert (score.outcome, score.value) == (Outcome.TIMED_OUT, None)

    run(body)


def test_a_process_that_dies_of_an_answer_gives_no_number() -> None:
    async def body() -> None:
        rig = Rig(dead_for_bad)
        score = await rig.pool.grade(job("bad"), b"bad")
        assert (score.outcome, score.value) == (Outcome.GRADER_FAILED, None)
        assert "signal 11" in score.detail

    run(body)


def test_neighbours_of_a_stuck_job_are_graded_again_and_keep_their_verdict() -> None:
    both_in = asyncio.Event()

    async def stuck_together(request: GradeRequest) -> Verdict:
        if not rig[0].processes[0].is_killed:
            if len(rig[0].graded) == 2:
                both_in.set()
            await both_in.wait()
            raise DeadlineExceeded("a verdict", ("scorer",), 10.0)
        return await late_for_bad(request)

    rig: list[Rig] = []

    async def body() -> None:
        rig.append(Rig(stuck_together))
        rig[0].cpu_per_process_s = 9.0
        pool = rig[0].pool
        bad, fine = await asyncio.gather(pool.grade(job("bad"), b"bad"), pool.grade(job("fine"), b"fine"))
        assert bad.end_reason is EndReason.ANSWER_TIMED_OUT
        assert (fine.outcome, fine.value) == (Outcome.SCORED, 1.0)
        alone = [job_id for name, job_id in rig[0].graded if name == "scorer-alone"]
        assert sorted(alone) == ["score_bad", "score_fine"]

    run(body)


def test_equal_artifacts_are_graded_once_even_at_the_same_time() -> None:
    async def body() -> None:
        rig = Rig(good)
        jobs = [job(str(index), artifact_digest="same") for index in range(5)]
        scores = await asyncio.gather(*(rig.pool.grade(each, b"x") for each in jobs))
        assert [score.job_id for score in scores] == [each.job_id for each in jobs]
        assert {score.value for score in scores} == {1.0}
        assert len(rig.graded) == 1
        assert rig.counters.read() == {"scoring.cache_hits": 4}

    run(body)


def test_a_failure_is_not_handed_to_equal_artifacts() -> None:
    async def body() -> None:
        rig = Rig(dead_for_bad)
        for name in ("one", "two"):
            assert (await rig.pool.grade(job(name, "same"), b"bad")).outcome is Outcome.GRADER_FAILED
        assert [job_id for _, job_id in rig.graded] == ["score_one", "score_one", "score_two", "score_two"]

    run(body)


def test_a_process_with_another_verifier_is_not_believed() -> None:
    async def body() -> None:
        rig = Rig(good, version="old-0")
        score = await rig.pool.grade(job(), b"x")
        assert (score.outcome, score.value) == (Outcome.GRADER_FAILED, None)
        assert "must be fake-1, got old-0" in score.detail

    run(body)


def test_a_process_never_gets_more_jobs_at_a_time_than_it_may() -> None:
    num_now, most = 0, 0

    async def count(request: GradeRequest) -> Verdict:
        nonlocal num_now, most
        num_now += 1
        most = max(most, num_now)
        await asyncio.sleep(0)
        num_now -= 1
        return GOOD

    async def body() -> None:
        rig = Rig(count, concurrency=3)
        await asyncio.gather(*(rig.pool.grade(job(str(index)), b"x") for index in range(20)))
        assert (most, rig.pool.capacity) == (3, 3)

    run(body)


def test_a_closed_pool_starts_no_process_and_answers_all_the_same() -> None:
    async def body() -> None:
        rig = Rig(good)
        await rig.pool.open()
        await rig.pool.close()
        assert [process.is_killed for process in rig.processes] == [True]
        score: Score = await rig.pool.grade(job(), b"x")
        assert (score.outcome, len(rig.processes)) == (Outcome.GRADER_FAILED, 1)

    run(body)
