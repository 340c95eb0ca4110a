"""H4: the loop's fast side finished and left the other in a handshake.

At the end of a run a report that is under way is answered with what became of it, and nobody who waits for work keeps
the run from ending.
"""

import asyncio
from collections.abc import Awaitable, Callable

from steelyard.errors import Refused
from steelyard.testing.coordinator_server import ServedRig, serve
from steelyard.types import ArtifactReport

POLL_S = 30.0


def test_h4_polls_and_a_report_that_are_under_way_when_the_last_step_ends_are_answered() -> None:
    async def scene(served: ServedRig) -> None:
        coordinator = served.rig.coordinator
        worker, idle, scorer = await served.worker(), await served.worker("wrk_idle"), await served.scorer()
        leases = await worker.lease(worker.worker_id, 8, 0.0)
        for lease in leases[:-1]:
            await worker.artifact_ready(served.rig.seal(lease))
        await served.rig.score_all()
        report = served.rig.seal(leases[-1])
        polls = [
            asyncio.create_task(idle.lease(idle.worker_id, 8, POLL_S)),
            asyncio.create_task(scorer.lease_scores(scorer.worker_id, 8, POLL_S)),
        ]
        while served.proxy.num_requests < len(leases) + 2:  # noqa: ASYNC110 (both must have been sent)
            await asyncio.sleep(0)
        served.journal.hold()
        reporting = asyncio.create_task(deliver(worker.artifact_ready, report))
        await served.journal.waiting.wait()
        finishing = asyncio.create_task(coordinator.finish("done"))
        await asyncio.sleep(0)
        served.journal.release()
        async with asyncio.timeout(20):
            await finishing
            assert await reporting == "accepted"
            assert not any(poll.done() for poll in polls), "they wait for work that does not come any more"
            await served.stop_server()
        for poll in polls:
            poll.cancel()
        await asyncio.gather(*polls, return_exceptions=True)
        assert coordinator.state.run is not None
        assert coordinator.state.run.is_finished

    serve(scene, lag=0, groups_per_batch=1, group_size=3)


async def deliver(artifact_ready: Callable[[ArtifactReport], Awaitable[None]], report: ArtifactReport) -> str:
    """What became of a report."""
    try:
        await artifact_ready(report)
    except Refused as refusal:
        return refusal.reason
    return "accepted"
