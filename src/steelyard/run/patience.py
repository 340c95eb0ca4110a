"""A coordinator that is lost for a while, as a worker or scorer elsewhere bears it.

The clients of the coordinator give up a call after some seconds. What is said here is for how long a worker goes on
trying: nobody asks it to lease while the coordinator is away, and reports of finished work are made until they arrive.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

from steelyard.clock import Clock
from steelyard.errors import DeadlineExceeded, RunError
from steelyard.harness.base import LeaseSource
from steelyard.scoring.base import ScoreSource
from steelyard.types import ArtifactReport, AttemptFailure, Lease, Outcome, Score, ScoreJob

Say = Callable[[str], None]
Value = TypeVar("Value")


class Patience:
    """Keeps the time since the first call that the coordinator did not answer; its next answer ends the silence.

    Args:
        lost_after_s: so long it may be silent.
        say: tells the user when it falls silent, and when it is back.
    """

    def __init__(self, lost_after_s: float, clock: Clock, say: Say) -> None:
        self._lost_after_s = lost_after_s
        self._clock = clock
        self._say = say
        self._silent_since_s: float | None = None

    async def poll(self, call: Awaitable[Sequence[Value]]) -> Sequence[Value]:
        """What a call for work gives; nothing where the coordinator is silent.

        Raises:
            RunError: it has been silent for too long.
        """
        asked_at_s = self._clock.now_s()
        try:
            found = await call
        except DeadlineExceeded as error:
            self._missed(asked_at_s, error)
            return ()
        self._heard()
        return found

    async def insist(self, call: Callable[[], Awaitable[None]]) -> None:
        """Make a call until it is answered. It must be one that may arrive several times.

        Raises:
            RunError: the coordinator has been silent for too long.
        """
        while True:
            asked_at_s = self._clock.now_s()
            try:
                await call()
            except DeadlineExceeded as error:
                self._missed(asked_at_s, error)
            else:
                self._heard()
                return

    def _heard(self) -> None:
        if self._silent_since_s is not None:
            self._silent_since_s = None
            self._say("the coordinator answers again")

    def _missed(self, asked_at_s: float, error: DeadlineExceeded) -> None:
        if self._silent_since_s is None:
            self._silent_since_s = asked_at_s
            self._say(f"the coordinator does not answer; trying for up to {self._lost_after_s:g} s: {error}")
        silent_s = self._clock.now_s() - self._silent_since_s
        if silent_s >= self._lost_after_s:
            rule = f"the coordinator must answer within {self._lost_after_s:g} s"
            raise RunError(f"{rule}, was silent for {silent_s:.0f} s: {error}") from error


class PatientLeases:
    """A ``LeaseSource`` over one that may be silent for a while."""

    def __init__(self, source: LeaseSource, patience: Patience) -> None:
        self._source = source
        self._patience = patience
        self.num_handed_in = 0
        self.num_failed = 0

    async def lease(self, worker_id: str, max_leases: int, wait_s: float) -> Sequence[Lease]:
        """None where the coordinator is silent."""
        return await self._patience.poll(self._source.lease(worker_id, max_leases, wait_s))

    async def start(self, attempt_id: str, attempt_number: int) -> None:
        await self._patience.insist(lambda: self._source.start(attempt_id, attempt_number))

    async def heartbeat(self, worker_id: str, attempts: Mapping[str, int]) -> Sequence[str]:
        """One try: the worker knows itself when its leases have run out."""
        return await self._source.heartbeat(worker_id, attempts)

    async def artifact_ready(self, report: ArtifactReport) -> None:
        await self._patience.insist(lambda: self._source.artifact_ready(report))
        self.num_handed_in += 1

    async def attempt_failed(self, failure: AttemptFailure) -> None:
        """One try: where it does not arrive the lease expires, which says the same."""
        self.num_failed += 1
        await self._source.attempt_failed(failure)


class PatientScores:
    """A ``ScoreSource`` over one that may be silent for a while."""

    def __init__(self, source: ScoreSource, patience: Patience) -> None:
        self._source = source
        self._patience = patience
        self.num_scored = 0

    async def lease_scores(self, worker_id: str, max_jobs: int, wait_s: float) -> Sequence[ScoreJob]:
        """None where the coordinator is silent."""
        return await self._patience.poll(self._source.lease_scores(worker_id, max_jobs, wait_s))

    async def score(self, score: Score) -> None:
        await self._patience.insist(lambda: self._source.score(score))
        self.num_scored += score.outcome is not Outcome.CANCELLED  # which only hands the job back

    async def artifact_lost(self, attempt_id: str, detail: str) -> None:
        await self._patience.insist(lambda: self._source.artifact_lost(attempt_id, detail))
