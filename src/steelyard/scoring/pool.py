"""Grader processes, from outside: who gets which job, and whose fault it is when one is stuck.

A process grades several artifacts at a time. If one of them keeps it busy for ever (``9**9**9**9`` as an
answer), nothing in that process can say which. So the process is killed and replaced, and each of its jobs is
graded again *alone*. A job that uses up its deadline alone, computing, is an answer that cannot be graded:
wrong, ``answer_timed_out``. One that only waited was failed by us: ``timed_out``. One whose process died under
it is ``grader_failed``.

*consumes* jobs; *waits for* a free place, then for the verdict; *unblocked by* the verdict, the death of the
process, or the deadline; *produces* one score a job, always.
"""

import asyncio
import logging
import weakref
from collections.abc import Awaitable, Callable

from steelyard.errors import DeadlineExceeded, RunError, SteelyardError
from steelyard.metrics import Counters
from steelyard.scoring.base import GradeRequest, GraderHandle
from steelyard.scoring.cache import Key, VerdictCache
from steelyard.scoring.verifier import no_score, wrong_answer
from steelyard.types import EndReason, Outcome, Record, Score, ScoreJob

logger = logging.getLogger(__name__)

# Of the deadline: with less CPU time than this the process did not compute, it waited (or was never scheduled).
_BUSY_FRAC = 0.2
# Above the grading's own deadline, for what comes before and after it.
_GRACE_FRAC, _MIN_GRACE_S = 0.25, 1.0


class PoolSettings(Record, frozen=True, kw_only=True):
    """``num_workers`` processes, each grading up to ``concurrency`` artifacts at a time, plus one for suspects.

    ``verifier_version`` and ``is_deterministic`` are those of the grader; a process with another version is wrong.
    """

    num_workers: int
    concurrency: int
    deadline_s: float
    verifier_version: str
    is_deterministic: bool
    cache_capacity: int = 4096


class GraderPool:
    """Grades artifacts in processes that ``start`` makes; it gets a name for each."""

    def __init__(
        self, start: Callable[[str], Awaitable[GraderHandle]], settings: PoolSettings, counters: Counters
    ) -> None:
        self._settings = settings
        self._counters = counters
        self._seats = [_Seat(start, f"scorer-{index}", settings.concurrency) for index in range(settings.num_workers)]
        self._alone = _Seat(start, "scorer-alone", 1)
        self._cache = VerdictCache(settings.cache_capacity if settings.is_deterministic else 0)
        self._same: weakref.WeakValueDictionary[Key, asyncio.Lock] = weakref.WeakValueDictionary()

    @property
    def capacity(self) -> int:
        """Jobs that can be graded at the same time."""
        return self._settings.num_workers * self._settings.concurrency

    async def open(self) -> None:
        """Start the processes now, so that what is wrong with them shows before the run does.

        Raises:
            ProcessDied, DeadlineExceeded: one did not start.
        """
        await asyncio.gather(*(seat.handle() for seat in self._seats))

    async def close(self) -> None:
        """Kill all processes; gradings under way end as ``grader_failed``."""
        await asyncio.gather(*(seat.close() for seat in (*self._seats, self._alone)))

    async def grade(self, job: ScoreJob, artifact: bytes) -> Score:
        """Grade an artifact, or use the verdict on an equal one. Never raises but for cancellation."""
        version = self._settings.verifier_version
        if not self._settings.is_deterministic:
            return await self._grade(job, artifact)
        key = (job.task_id, job.artifact_digest, version)
        lock = self._same.setdefault(key, asyncio.Lock())
        async with lock:
            score = self._cache.find(job, version)
            if score is not None:
                self._counters.add("scoring.cache_hits")
                return score
            score = await self._grade(job, artifact)
            self._cache.keep(job, score)
            return score

    async def _grade(self, job: ScoreJob, artifact: bytes) -> Score:
        request = GradeRequest(job=job, artifact=artifact, deadline_s=self._settings.deadline_s)
        seat = min(self._seats, key=lambda seat: seat.num_jobs)
        try:
            score = await seat.grade(request, self._patience_s)
        except SteelyardError as error:
            logger.warning("job %s is graded again, alone: %s", job.job_id, error)
            self._counters.add("scoring.graded_alone")
            score = await self._grade_alone(request)
        if score.verifier_version != self._settings.verifier_version:
            detail = f"the verifier must be {self._settings.verifier_version}, got {score.verifier_version}"
            score = no_score(job, Outcome.GRADER_FAILED, self._settings.verifier_version, detail)
        return score

    @property
    def _patience_s(self) -> float:
        return self._settings.deadline_s + max(_MIN_GRACE_S, _GRACE_FRAC * self._settings.deadline_s)

    async def _grade_alone(self, request: GradeRequest) -> Score:
        version = self._settings.verifier_version
        try:
            return await self._alone.grade(request, self._patience_s)
        except _Stuck as stuck:
            self._counters.add("scoring.stuck")
            if stuck.cpu_s >= _BUSY_FRAC * stuck.waited_s:
                return wrong_answer(request.job, EndReason.ANSWER_TIMED_OUT, version, str(stuck))
            return no_score(request.job, Outcome.TIMED_OUT, version, str(stuck))
        except SteelyardError as error:
            return no_score(request.job, Outcome.GRADER_FAILED, version, str(error))


class _Stuck(DeadlineExceeded):
    """A grader process gave no answer in time; how much it computed meanwhile."""

    def __init__(self, name: str, waited_s: float, cpu_s: float) -> None:
        super().__init__(f"a verdict ({cpu_s:.1f} s of it computing)", (name,), waited_s)
        self.cpu_s = cpu_s


class _Seat:
    """A place for one process, which is started when it is first needed, and again after its death."""

    def __init__(self, start: Callable[[str], Awaitable[GraderHandle]], name: str, concurrency: int) -> None:
        self.num_jobs = 0
        self._start = start
        self._name = name
        self._slots = asyncio.Semaphore(concurrency)
        self._changing = asyncio.Lock()
        self._handle: GraderHandle | None = None
        self._is_closed = False

    async def handle(self) -> GraderHandle:
        """The running process."""
        async with self._changing:
            if self._is_closed:
                raise RunError(f"{self._name} was closed")
            if self._handle is None:
                self._handle = await self._start(self._name)
            return self._handle

    async def grade(self, request: GradeRequest, deadline_s: float) -> Score:
        """Wait for a slot, then grade; a process that fails or is late is killed before this raises."""
        self.num_jobs += 1
        try:
            async with self._slots:
                handle = await self.handle()
                cpu_before_s = handle.cpu_s()
                try:
                    return await handle.grade(request, deadline_s)
                except DeadlineExceeded as error:
                    cpu_s = handle.cpu_s() - cpu_before_s
                    await self._kill(handle)
                    raise _Stuck(self._name, deadline_s, cpu_s) from error
                except SteelyardError:
                    await self._kill(handle)
                    raise
        finally:
            self.num_jobs -= 1

    async def close(self) -> None:
        """Kill the process, if there is one, and start none again."""
        self._is_closed = True
        if self._handle is not None:
            await self._kill(self._handle)

    async def _kill(self, handle: GraderHandle) -> None:
        async with self._changing:
            # Several jobs of one process fail together; the first of them replaces it.
            if self._handle is handle:
                self._handle = None
                await handle.kill()
