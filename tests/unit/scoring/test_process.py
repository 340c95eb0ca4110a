"""Real grader processes: stuck, dead and well."""

import asyncio
import os
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil

from steelyard.metrics import Counters
from steelyard.processes.child import ChildProcess
from steelyard.scoring.pool import GraderPool, PoolSettings
from steelyard.scoring.process import ChildGrader
from steelyard.testing.grader_process import VERIFIER_VERSION
from steelyard.testing.scoring import job
from steelyard.types import EndReason, Outcome


def in_pool(body: Callable[[GraderPool], Awaitable[None]], deadline_s: float = 30.0) -> list[int]:
    """Run ``body`` with a pool of one real process; the ids of all processes that were started."""
    pids: list[int] = []

    async def main(directory: Path) -> None:
        async def start(name: str) -> ChildGrader:
            socket = directory / f"{name}-{len(pids)}.sock"
            arguments = [str(socket), str(os.getpid())]
            module = "steelyard.testing.grader_process"
            child = await ChildProcess.start(name, module, arguments, log_path=directory / f"{name}.log")
            pids.append(child.pid)
            return await ChildGrader.start(child, socket, deadline_s=60.0)

        settings = PoolSettings(
            num_workers=1, concurrency=4, deadline_s=deadline_s, verifier_version=VERIFIER_VERSION,
            is_deterministic=True,
        )  # fmt: skip
        pool = GraderPool(start, settings, Counters())
        await pool.open()
        try:
            await body(pool)
        finally:
            await pool.close()

    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(main(Path(directory)))
    return pids


def test_an_answer_that_freezes_its_grader_is_wrong_and_the_grader_is_replaced() -> None:
    async def body(pool: GraderPool) -> None:
        frozen, beside = await asyncio.gather(pool.grade(job("a"), b"hang"), pool.grade(job("b"), b"four"))
        assert (frozen.outcome, frozen.value) == (Outcome.SCORED, 0.0)
        assert frozen.end_reason is EndReason.ANSWER_TIMED_OUT
        assert (beside.outcome, beside.value) == (Outcome.SCORED, 4.0)
        assert (await pool.grade(job("c"), b"12345")).value == 5.0

    pids = in_pool(body, deadline_s=1.0)
    assert len(pids) >= 3
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_a_grader_that_only_waits_is_our_fault() -> None:
    async def body(pool: GraderPool) -> None:
        score = await pool.grade(job(), b"wait")
        assert (score.outcome, score.value) == (Outcome.TIMED_OUT, None)

    assert len(in_pool(body, deadline_s=0.2)) == 1


def test_a_grader_that_dies_raises_or_says_nan_gives_no_number() -> None:
    async def body(pool: GraderPool) -> None:
        for artifact, detail in ((b"exit", "exit code 3"), (b"raise", "KeyError"), (b"nan", "finite")):
            score = await pool.grade(job(artifact.decode()), artifact)
            assert (score.outcome, score.value) == (Outcome.GRADER_FAILED, None)
            assert detail in score.detail
        assert (await pool.grade(job("fine"), b"fine")).value == 4.0

    in_pool(body)
