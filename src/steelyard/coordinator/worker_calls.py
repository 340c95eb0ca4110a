"""The calls of workers and scorers without their waits: a call is done at once, and answered after its commit.

A task for each call, and a wait of its own, cost more than the call. So whoever serves many of them does one after the
other, and waits once for the commit of them all.
"""

from collections.abc import Callable
from typing import Any

from steelyard.coordinator import protocol as p
from steelyard.coordinator.core import Core
from steelyard.coordinator.leases import Leases
from steelyard.coordinator.scores import Scoring


class WorkerCalls:
    """Does what a call asks for. The answer, a refusal too, is nobody's before ``durable(num_events)`` has returned.

    Args:
        advance: ends what has run out by now; raises what the run failed with.
    """

    def __init__(self, core: Core, leases: Leases, scoring: Scoring, advance: Callable[[], None]) -> None:
        self._core = core
        self._leases = leases
        self._scoring = scoring
        self._advance = advance
        self._acts: dict[type, Callable[[Any, str], p.Result | None]] = {
            p.LeaseCall: self._lease,
            p.StartCall: self._start,
            p.HeartbeatCall: self._heartbeat,
            p.ArtifactReadyCall: self._artifact_ready,
            p.AttemptFailedCall: self._attempt_failed,
            p.LeaseScoresCall: self._lease_scores,
            p.ScoreCall: self._score,
            p.ArtifactLostCall: self._artifact_lost,
        }

    @property
    def num_events(self) -> int:
        """The answer to a call must wait for so many events, if it is looked at directly after the call."""
        return self._core.state.num_events

    @property
    def num_durable(self) -> int:
        """So many events are durable."""
        return self._core.commits.num_committed

    @property
    def num_commits(self) -> int:
        """Commits since the coordinator was opened."""
        return self._core.commits.num_commits

    async def durable(self, num_events: int) -> None:
        """Return once so many events are durable; raises what made it impossible. Bounded by the journal."""
        await self._core.commits.reached(num_events)

    def perform(self, call: p.Call, worker_id: str) -> p.Result | None:
        """The result; None where the call has to wait, or is not one of workers and scorers. Nothing was done then.

        Raises:
            Refused, IllegalTransition: it is refused; the answer waits too.
            RunError: the run has failed.
        """
        act = self._acts.get(type(call))
        if act is None:
            return None
        self._advance()
        return act(call, worker_id)

    def _lease(self, call: p.LeaseCall, worker_id: str) -> p.Result | None:
        leases = self._leases.grant(worker_id, call.max_leases, frozenset(call.unstarted))
        return p.Leased(leases=leases) if leases or not call.wait_s else None

    def _start(self, call: p.StartCall, worker_id: str) -> p.Result:
        self._leases.start(worker_id, call.attempt_id, call.attempt_number)
        return p.DONE

    def _heartbeat(self, call: p.HeartbeatCall, worker_id: str) -> p.Result:
        return p.Lost(attempt_ids=self._leases.heartbeat(worker_id, call.attempt_ids))

    def _artifact_ready(self, call: p.ArtifactReadyCall, worker_id: str) -> p.Result:
        self._leases.finish(call.report, worker_id)
        return p.DONE

    def _attempt_failed(self, call: p.AttemptFailedCall, worker_id: str) -> p.Result:
        self._leases.report_failure(call.failure, worker_id)
        return p.DONE

    def _lease_scores(self, call: p.LeaseScoresCall, worker_id: str) -> p.Result | None:
        jobs = self._scoring.grant(worker_id, call.max_jobs, frozenset(call.held))
        return p.Jobs(jobs=jobs) if jobs or not call.wait_s else None

    def _score(self, call: p.ScoreCall, worker_id: str) -> p.Result:
        self._scoring.finish(call.score, worker_id)
        return p.DONE

    def _artifact_lost(self, call: p.ArtifactLostCall, worker_id: str) -> p.Result:
        self._scoring.artifact_lost(call.attempt_id, call.detail, worker_id)
        return p.DONE
