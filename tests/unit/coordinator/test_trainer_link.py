"""A trainer on another machine: the calls of a training loop over HTTP, each with one effect, each safe to repeat."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from steelyard.assembly.batch import encode_step_batch
from steelyard.coordinator import events as e
from steelyard.coordinator.audit_evidence import StoredVersion
from steelyard.coordinator.capability import Role
from steelyard.coordinator.client import CoordinatorClient
from steelyard.coordinator.records import BatchPlan
from steelyard.coordinator.server import ServerLimits
from steelyard.coordinator.trainer_link import TrainerLink
from steelyard.digests import digest_bytes
from steelyard.errors import DeadlineExceeded, IllegalTransition, InputError, RunError
from steelyard.testing.coordinator_server import ServedRig, serve
from steelyard.testing.fault_proxy import Fault
from steelyard.testing.run_rig import WORKER, make_manifest, make_proof
from steelyard.types import Manifest, Sampling, StepBatch

FAULTS = (Fault.NONE, Fault.LOSE_ANSWER, Fault.LOSE_REQUEST, Fault.TWICE)
Lossy = Callable[[Awaitable[Any]], Awaitable[Any]]


def store_batch(served: ServedRig, plan: BatchPlan) -> dict[str, Any]:
    """Assemble and store the batch of a plan; what ``begin_step`` takes."""
    batch = served.rig.assemble(plan)
    data, digest = encode_step_batch(batch)
    served.rig.stores.batches[plan.step] = (msgspec.msgpack.decode(data, type=StepBatch), digest)
    return {
        "step": plan.step,
        "parent_version": plan.parent_version,
        "group_ids": plan.group_ids,
        "sample_ids": tuple(f"{sample.attempt_id}/{sample.segment_index}" for sample in batch.samples),
        "batch_digest": digest,
    }


def store_version(served: ServedRig, version: int, step: int, parent_version: int | None) -> Manifest:
    manifest = make_manifest(version, step, parent_version)
    served.rig.stores.versions[version] = StoredVersion(manifest=manifest, files=manifest.files)
    return manifest


async def take_step(served: ServedRig, link: TrainerLink, lossy: Lossy) -> None:
    """One optimizer step with checkpoint, as a training loop takes it."""
    await served.rig.rollouts()
    progress = await lossy(link.progress())
    step, version = progress.next_step, progress.next_version
    plan: BatchPlan = await lossy(link.next_batch(step, 1.0))
    await lossy(link.begin_step(**store_batch(served, plan)))
    await lossy(link.wait_for_room(1.0))
    manifest = store_version(served, version, step + 1, plan.parent_version)
    await lossy(link.published(manifest))
    await lossy(link.loaded(make_proof(manifest)))
    await lossy(link.ready(version))
    served.rig.stores.checkpoints[step + 1] = digest_bytes(f"checkpoint {step + 1}".encode())
    await lossy(link.checkpointed(step + 1, served.rig.stores.checkpoints[step + 1]))
    for covered in await lossy(link.deletable_batches()):
        await lossy(link.batch_deleted(covered))
        del served.rig.stores.batches[covered]
    for gone in await lossy(link.deletable_versions()):
        await lossy(link.version_deleted(gone))
        del served.rig.stores.versions[gone]


async def events_of(served: ServedRig, kind: type[e.Event]) -> list[e.AnyEvent]:
    return [event for event in await served.rig.journal.replay() if type(event) is kind]


@pytest.mark.parametrize("fault", FAULTS)
def test_steps_are_taken_over_http_and_each_call_has_one_effect_whatever_is_lost(fault: Fault) -> None:
    async def scene(served: ServedRig) -> None:
        link = await served.trainer()

        async def lossy(call: Awaitable[Any]) -> Any:
            served.lose(0, fault=fault)
            return await call

        for _ in range(4):
            await take_step(served, link, lossy)
        for kind, number in (
            (e.StepBegun, 4),
            (e.VersionPublished, 5),
            (e.VersionLoaded, 5),
            (e.VersionReady, 5),
            (e.Checkpointed, 4),
        ):
            assert len(await events_of(served, kind)) == number, kind
        assert len(await events_of(served, e.BatchDeleted)) == 3
        assert len(await events_of(served, e.VersionDeleted)) >= 2

    assert serve(scene).audit().is_passed


def test_every_report_is_answered_the_same_again_after_a_restart_and_adds_no_event() -> None:
    async def scene(served: ServedRig) -> None:
        link = await served.trainer()
        for _ in range(3):
            await take_step(served, link, _at_once)
        await served.rig.rollouts()
        plan = await link.next_batch(3, 1.0)
        begun = store_batch(served, plan)
        await link.begin_step(**begun)
        manifest = store_version(served, 4, 4, plan.parent_version)
        await link.published(manifest)
        await link.loaded(make_proof(manifest))
        await link.ready(4)
        await link.pin(4, "kept")
        await link.checkpointed(4, "d4")
        evaluated = await link.admit_evaluation(("held-1",), version=4, sampling=Sampling(seed=1), label="after")
        await served.restart()
        again = await served.trainer()
        num_events = served.rig.coordinator.state.num_events
        await again.begin_step(**begun)
        await again.published(manifest)
        await again.loaded(make_proof(manifest))
        await again.ready(4)
        await again.pin(4, "kept")
        await again.checkpointed(4, "d4")
        await again.batch_deleted(0)
        await again.version_deleted(0)
        sampling = Sampling(seed=1)
        assert await again.admit_evaluation(("held-1",), version=4, sampling=sampling, label="after") == evaluated
        assert served.rig.coordinator.state.num_events == num_events
        served.rig.stores.checkpoints[4] = "d4"

    assert serve(scene, max_retained_versions=20).audit().is_passed


async def _at_once(call: Awaitable[Any]) -> Any:
    return await call


def test_other_content_under_a_number_that_is_used_is_refused() -> None:
    async def scene(served: ServedRig) -> None:
        link = await served.trainer()
        await served.rig.rollouts()
        begun = store_batch(served, await link.next_batch(0, 1.0))
        await link.begin_step(**begun)
        with pytest.raises(IllegalTransition, match="step 0 has begun with batch"):
            await link.begin_step(**{**begun, "batch_digest": "other"})
        await link.published(store_version(served, 1, 1, 0))
        with pytest.raises(IllegalTransition, match="version must be 2, the next unused, got 1"):
            await link.published(make_manifest(1, 1, 0, "other weights"))
        with pytest.raises(IllegalTransition, match="weights_digest must be"):
            await link.loaded(make_proof(make_manifest(1, 1, 0, "other weights")))
        with pytest.raises(IllegalTransition, match="no surviving version has step 7"):
            await link.checkpointed(7, "d")
        with pytest.raises(IllegalTransition, match="must be covered"):
            await link.batch_deleted(0)
        with pytest.raises(IllegalTransition, match="must be free"):
            await link.version_deleted(1)

    serve(scene)


def test_a_batch_is_waited_for_over_many_polls_and_comes_when_it_is_complete() -> None:
    async def scene(served: ServedRig) -> None:
        link = await served.trainer()
        served.proxy.arrived.clear()
        waiting = asyncio.create_task(link.next_batch(0, 60.0))
        await served.proxy.arrived.wait()
        assert not waiting.done()
        await served.rig.rollouts()
        plan = await waiting
        assert (plan.step, len(plan.group_ids), len(plan.members)) == (0, 2, 4)

    serve(scene)


def test_a_batch_that_does_not_come_in_time_names_who_is_missing() -> None:
    async def scene(served: ServedRig) -> None:
        link = await served.trainer()
        (lease,) = await served.rig.coordinator.lease(WORKER, 1, 0.0)
        with pytest.raises(DeadlineExceeded, match=f"the batch of step 0; still missing: .*{lease.rollout_id}"):
            await link.next_batch(0, 0.0)
        with pytest.raises(IllegalTransition, match="step must be 0, the next to begin, got 5"):
            await link.next_batch(5, 0.0)

    serve(scene)


def test_a_longer_wait_than_the_server_allows_is_made_of_several_polls() -> None:
    async def scene(served: ServedRig) -> None:
        link = await served.trainer()
        before = served.proxy.num_requests
        with pytest.raises(DeadlineExceeded):
            await link.next_batch(0, 0.2)
        assert served.proxy.num_requests - before > 1

    serve(scene, limits=ServerLimits(max_wait_s=0.0))


def test_progress_says_where_the_run_stands() -> None:
    async def scene(served: ServedRig) -> None:
        link = await served.trainer()
        await take_step(served, link, _at_once)
        progress = await link.progress()
        assert (progress.next_step, progress.next_version, progress.run_id) == (1, 2, "run_rig")
        assert [(checkpoint.step, checkpoint.digest) for checkpoint in progress.checkpoints] == [
            (1, served.rig.stores.checkpoints[1])
        ]
        assert progress.newest_ready == progress.newest == await link.version(1) == await link.version_at_step(1)
        assert (await link.version(9), await link.version_at_step(9)) == (None, None)
        assert (progress.evaluating, progress.kept_batches, progress.is_finished) == ((), (0,), False)
        assert await link.pending_steps_after(1) == ()
        await link.finish("done")
        assert (await link.progress()).is_finished

    serve(scene)


def test_progress_waits_for_the_commit_of_what_it_tells() -> None:
    async def scene(served: ServedRig) -> None:
        link = await served.trainer()
        served.journal.hold()
        held = asyncio.create_task(served.rig.coordinator.pin(0, "kept"))
        await served.journal.waiting.wait()
        served.proxy.arrived.clear()
        asked = asyncio.create_task(link.progress())
        await served.proxy.arrived.wait()
        assert not asked.done()
        served.journal.release()
        await held
        assert (await asked).next_step == 0

    serve(scene)


def test_steps_behind_the_last_checkpoint_are_replayed_or_orphaned_from_elsewhere() -> None:
    async def scene(served: ServedRig) -> None:
        link = await served.trainer()
        await take_step(served, link, _at_once)
        for step in (1, 2):
            await served.rig.rollouts()
            plan = await link.next_batch(step, 1.0)
            await link.begin_step(**store_batch(served, plan))
            manifest = store_version(served, step + 1, step + 1, plan.parent_version)
            await link.published(manifest)
            await link.loaded(make_proof(manifest))
            await link.ready(step + 1)
        await served.restart()
        again = await served.trainer()
        pending = await again.pending_steps_after(1)
        assert [(one.step, one.published_version) for one in pending] == [(1, 2), (2, 3)]
        assert await again.abandon("all workers are gone") == 0
        assert await again.orphan(2, "the replay gave other weights") == (2, 3)
        num_events = served.rig.coordinator.state.num_events
        assert await again.orphan(2, "the replay gave other weights") == (2, 3)
        assert served.rig.coordinator.state.num_events == num_events
        with pytest.raises(IllegalTransition, match="must be on the surviving lineage"):
            await again.orphan(7, "never published")

    assert serve(scene, max_retained_versions=20).audit().is_passed


def test_room_for_a_version_is_waited_for_and_who_takes_it_is_named() -> None:
    async def scene(served: ServedRig) -> None:
        link = await served.trainer()
        await link.wait_for_room(0.0)
        await take_step(served, link, _at_once)
        await link.pin(0, "an evaluation")
        with pytest.raises(DeadlineExceeded, match="version 0: pinned by an evaluation"):
            await link.wait_for_room(0.0)
        await link.unpin(0, "an evaluation")

    serve(scene, max_retained_versions=2)


def test_an_evaluation_is_admitted_waited_for_and_read_from_elsewhere() -> None:
    async def scene(served: ServedRig) -> None:
        link, tasks = await served.trainer(), ("held-0", "held-1")
        await link.admit_evaluation(tasks, version=0, sampling=Sampling(seed=1), label="before", priority=1)
        assert await link.evaluation_progress("before") == (0, 2)
        with pytest.raises(DeadlineExceeded, match="evaluation before"):
            await link.evaluation_results("before", 0.0)
        waiting = asyncio.create_task(link.evaluation_results("before", 60.0))
        await served.rig.rollouts()
        assert [result.task_id for result in await waiting] == list(tasks)
        assert await link.evaluation_progress("before") == (2, 2)
        with pytest.raises(InputError, match="label must be that of an admitted evaluation"):
            await link.evaluation_results("after", 0.0)

    serve(scene)


def test_a_trainer_that_gives_up_ends_every_wait_and_its_reason_is_known() -> None:
    async def scene(served: ServedRig) -> None:
        link, worker = await served.trainer(), await served.worker()
        await link.fail("no memory left")
        failure = await served.rig.coordinator.failed()
        assert str(failure) == "trainer trn_rig cannot go on: no memory left"
        with pytest.raises(RunError, match="no memory left"):
            await worker.lease(WORKER, 1, 20.0)

    with pytest.raises(RunError, match="no memory left"):
        serve(scene)


def test_an_operator_cancels_a_group_or_a_task_and_workers_are_told() -> None:
    async def scene(served: ServedRig) -> None:
        operator, worker = await served.operator(), await served.worker()
        (lease,) = await worker.lease(WORKER, 1, 0.0)
        assert await operator.cancel_group(lease.group_id, "not wanted") is True
        assert await operator.cancel_group(lease.group_id, "not wanted") is False
        assert await worker.heartbeat(WORKER, {lease.attempt_id: 1}) == (lease.attempt_id,)
        other = next(group for group in served.rig.coordinator.state.live_groups.values())
        assert await operator.cancel_task(other.task_id, "not wanted") == (other.group_id,)
        assert await operator.cancel_task(other.task_id, "not wanted") == ()
        assert served.rig.coordinator.state.prompts.dropped == {"cancelled": 2}

    serve(scene, max_drop_frac=1.0)


def test_a_client_with_several_urls_goes_on_at_the_one_that_answers() -> None:
    async def scene(served: ServedRig) -> None:
        nobody = "http://127.0.0.1:9"
        async with CoordinatorClient(
            (nobody, served.url),
            served.key(Role.TRAINER, "trn_two"),
            ids=served.rig.ids,
            counters=served.client_counters,
            draw=served.rig.random,
            sleep=lambda _: asyncio.sleep(0),
        ) as client:
            assert (await TrainerLink(client).progress()).next_step == 0
            assert served.client_counters.read() == {"coordinator_client.retried": 1}
            assert (await TrainerLink(client).progress()).next_step == 0
            assert served.client_counters.read() == {"coordinator_client.retried": 1}
        with pytest.raises(InputError, match="url: must name at least one coordinator"):
            CoordinatorClient(
                (), served.key(Role.TRAINER, "t"), ids=served.rig.ids, counters=served.counters, draw=served.rig.random
            )

    serve(scene)
