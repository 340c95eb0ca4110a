import asyncio
from collections.abc import Callable

import msgspec
import pytest

from steelyard.coordinator.events import AnyEvent
from steelyard.coordinator.journal.base import decode
from steelyard.testing.faultsim.witness import Witness
from steelyard.testing.run_rig import WORKER, RunRig, make_score
from steelyard.types import AttemptFailure, Lease, Outcome, Trace


class Told:
    """A short run, all of which its clients were told."""

    def __init__(self) -> None:
        self.rig = RunRig()
        self.witness = Witness()
        asyncio.run(self._play())
        self.events: list[AnyEvent] = [decode(record.payload) for record in self.rig.memory_journal.records()]
        self.traces: dict[str, Trace] = {name: trace for name, (trace, _) in self.rig.stores.traces.items()}

    async def _play(self) -> None:
        rig, witness = self.rig, self.witness
        await rig.start()
        one, two, *_ = await rig.coordinator.lease(WORKER, 100, 0.0)
        for lease in (one, two):
            witness.leased(WORKER, lease)
            await rig.coordinator.start(lease.attempt_id, lease.attempt_number)
            witness.started(lease.attempt_id)
        report = rig.seal(one)
        await rig.coordinator.artifact_ready(report)
        witness.reported(report)
        witness.sampled(one.attempt_id, rig.stores.traces[one.attempt_id][0].turns[0].request_id)
        (job,) = await rig.coordinator.lease_scores("scorer", 1, 0.0)
        self.score = make_score(job, 1.0)
        await rig.coordinator.score(self.score)
        witness.scored(self.score)
        failure = AttemptFailure(
            attempt_id=two.attempt_id,
            attempt_number=two.attempt_number,
            outcome=Outcome.INFRA_FAILED,
            reason="StorageFailed",
        )
        await rig.coordinator.attempt_failed(failure)
        witness.failed(failure)
        await rig.coordinator.close()
        self.lease: Lease = one

    def broken(self) -> list[str]:
        return self.witness.broken(self.events, self.traces, self.rig.stream)


def test_what_was_told_and_is_in_the_journal_breaks_nothing() -> None:
    assert Told().broken() == []


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("Leased", "the lease of"),
        ("Running", "the start of"),
        ("ArtifactReady", "the report of"),
        ("Scored", "the score of"),
        ("InfraFailed", "the failure of"),
    ],
)
def test_an_acknowledged_message_that_is_not_in_the_journal_is_named(kind: str, message: str) -> None:
    told = Told()
    told.events = [event for event in told.events if type(event).__name__ != kind]
    broken = told.broken()
    assert any(line.startswith(message) for line in broken), broken


@pytest.mark.parametrize(
    ("lie", "message"),
    [
        (lambda told: told.witness.leased("wrk_other", told.lease), "was leased to wrk_rig and to wrk_other"),
        (lambda told: told.witness.scored(msgspec.structs.replace(told.score, value=0.5)), "the score of"),
        (lambda told: told.witness.sampled(told.lease.attempt_id, "req_lost"), r"lacks turns .*req_lost"),
        (lambda told: told.witness.begun(0, "digest"), "step 0 with digest was acknowledged"),
        (lambda told: told.witness.checkpointed(2, "digest"), "checkpoint 2 with digest was acknowledged"),
    ],
)
def test_what_was_told_otherwise_is_named(lie: Callable[[Told], None], message: str) -> None:
    told = Told()
    lie(told)
    with pytest.raises(AssertionError, match=message):
        assert not told.broken(), "; ".join(told.broken())


def test_a_failure_for_a_reason_that_nobody_simulated_is_named() -> None:
    told = Told()
    told.events = [
        msgspec.structs.replace(event, reason="KeyError") if type(event).__name__ == "InfraFailed" else event
        for event in told.events
    ]
    assert any("failed by KeyError" in line for line in told.broken())
