"""V4: the bound was 0 and training was still one step off-policy, since prompts were admitted for a version to come.

With bound 0 nothing is admitted for version v before v is READY, and every consumed token has the consuming version.
"""

from pathlib import Path

from steelyard.coordinator import events as e
from steelyard.testing.run_rig import WORKER, RunRig, make_proof, play
from steelyard.testing.small_runs import journal_events, steelyard
from steelyard.traces.sealed import SealedTraces

NUM_STEPS = 3
GROUPS_PER_BATCH = 2


def test_v4_no_attempt_is_leased_for_a_version_that_is_published_or_loaded_but_not_ready() -> None:
    async def scene(rig: RunRig) -> None:
        for step in range(NUM_STEPS):
            await rig.rollouts()
            state = rig.coordinator.state
            assert state.prompts.issued == (step + 1) * GROUPS_PER_BATCH, "one batch for each READY version"
            await rig.begin(step)
            assert await rig.coordinator.lease(WORKER, 100, 0.0) == ()
            number = await rig.publish(step + 1, is_ready=False)
            assert await rig.coordinator.lease(WORKER, 100, 0.0) == ()
            await rig.coordinator.loaded(make_proof(rig.stores.versions[number].manifest))
            assert await rig.coordinator.lease(WORKER, 100, 0.0) == ()
            await rig.coordinator.ready(number)

    play(scene, lag=0, groups_per_batch=GROUPS_PER_BATCH)


def test_v4_every_consumed_token_has_the_consuming_version(synchronous_run: Path) -> None:
    begun = [event for event in journal_events(synchronous_run) if isinstance(event, e.StepBegun)]
    traces = SealedTraces(synchronous_run / "traces")
    assert [event.step for event in begun] == list(range(NUM_STEPS))
    for event in begun:
        assert event.sample_ids
        for sample_id in event.sample_ids:
            trace, _ = traces.read_now(sample_id.split("/")[0])
            sampled = {span.version for turn in trace.turns for span in turn.version_spans}
            assert sampled == {event.parent_version}, f"step {event.step} consumes {sample_id} of versions {sampled}"


def test_v4_nothing_is_admitted_for_a_version_before_it_is_ready(synchronous_run: Path) -> None:
    ready: set[int] = set()
    num_admitted = 0
    for event in journal_events(synchronous_run):
        match event:
            case e.VersionReady():
                ready.add(event.version)
            case e.GroupAdmitted():
                wanted = num_admitted // GROUPS_PER_BATCH
                assert wanted in ready, f"group {num_admitted} is for step {wanted}, READY are {sorted(ready)}"
                assert event.admitted_version == wanted
                num_admitted += 1
            case _:
                pass
    assert num_admitted == NUM_STEPS * GROUPS_PER_BATCH


def test_v4_nothing_had_to_be_thrown_away_for_it_and_the_audit_agrees(synchronous_run: Path) -> None:
    events = journal_events(synchronous_run)
    assert not [event for event in events if isinstance(event, e.Rejected | e.GroupRestarted | e.GroupDropped)]
    audit = steelyard("audit", synchronous_run)
    assert (audit.returncode, audit.stdout.splitlines()[-1]) == (0, "audit passed")
    (lag_bound,) = [line for line in audit.stdout.splitlines() if line.startswith("lag_bound")]
    assert " ok " in lag_bound
