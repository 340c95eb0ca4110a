"""Whole lives over a network that loses and doubles, with a coordinator that dies in between: each has one effect.

Faults and restarts are drawn from a seed. Whatever is lost, every rollout of the run is leased once for each attempt
that is counted, every group completes, nothing uses up a budget, and the audit of journal and stores finds nothing.
"""

from collections import Counter

import pytest

from steelyard.coordinator import events as e
from steelyard.coordinator.client import CoordinatorClient
from steelyard.coordinator.transitions import GroupState
from steelyard.errors import Refused
from steelyard.testing.coordinator_server import ServedRig, serve
from steelyard.testing.fault_proxy import Fault
from steelyard.testing.run_rig import SCORER, WORKER, make_score


async def work(served: ServedRig, worker: CoordinatorClient, scorer: CoordinatorClient) -> None:
    """Live until there is nothing left to do."""
    is_idle = False
    while not is_idle:
        leases = await worker.lease(WORKER, 3, 0.0)
        for lease in leases:
            await worker.start(lease.attempt_id, lease.attempt_number)
            await worker.artifact_ready(served.rig.seal(lease))
        jobs = await scorer.lease_scores(SCORER, 2, 0.0)
        for job in jobs:
            try:
                await scorer.score(make_score(job, 1.0))
            except Refused as refused:
                # After a restart the job is not known; its artifact is offered again.
                assert refused.reason == "late"
        is_idle = not leases and not jobs


@pytest.mark.parametrize("restart_frac", [0.0, 0.1])
@pytest.mark.parametrize("seed", range(5))
def test_every_life_has_one_effect(seed: int, restart_frac: float) -> None:
    async def scene(served: ServedRig) -> None:
        worker, scorer = await served.worker(), await served.scorer()
        served.misbehave(seed, restart_frac=restart_frac)
        await work(served, worker, scorer)
        served.proxy.plan, state = (lambda _: Fault.NONE), served.rig.coordinator.state
        counts = Counter(type(event) for event in await served.rig.journal.replay())
        num_rollouts = len(state.rollouts)
        for kind in (e.Leased, e.Running, e.ArtifactReady, e.Scored, e.Accepted):
            assert counts[kind] == num_rollouts, kind
        assert counts[e.LeaseExpired] == counts[e.InfraFailed] == counts[e.GraderFailed] == 0
        assert {group.state for group in state.live_groups.values()} == {GroupState.COMPLETE}
        assert served.client_counters.read()["coordinator_client.retried"] > 0
        assert served.rig.audit().broken == ()

    serve(scene, groups_per_batch=4, group_size=2)
