"""Versions: proof before READY, release, deletion by reference, numbers never reused, replays that differ."""

import asyncio

import msgspec
import pytest

from steelyard.errors import DeadlineExceeded, IllegalTransition
from steelyard.testing.manual_clock import settle
from steelyard.testing.run_rig import WORKER, RunRig, make_manifest, make_proof, make_settings, play


def test_a_load_whose_memory_differs_is_refused_and_the_version_is_not_ready() -> None:
    async def scene(rig: RunRig) -> None:
        await rig.rollouts()
        await rig.begin(0)
        number = await rig.publish(1, is_ready=False)
        proof = make_proof(rig.stores.versions[number].manifest)
        with pytest.raises(IllegalTransition, match="weights_digest must be"):
            await rig.coordinator.loaded(msgspec.structs.replace(proof, weights_digest="w0"))
        with pytest.raises(IllegalTransition, match="probe_max_error must be at most"):
            await rig.coordinator.loaded(msgspec.structs.replace(proof, probe_max_error=0.5))
        with pytest.raises(IllegalTransition, match="from PUBLISHED to READY"):
            await rig.coordinator.ready(number)
        newest = rig.coordinator.newest_ready()
        assert newest is not None and newest.version == 0

    play(scene)


def test_a_version_is_released_when_its_last_attempt_ends_and_a_newer_one_is_ready() -> None:
    async def scene(rig: RunRig) -> None:
        (slow,) = await rig.coordinator.lease(WORKER, 1, 0.0)
        await rig.train(0)
        found = rig.coordinator.version(0)
        assert found is not None and (found.state, found.num_live) == ("READY", 1)
        await rig.coordinator.artifact_ready(rig.seal(slow))
        found = rig.coordinator.version(0)
        assert found is not None and (found.state, found.num_live) == ("RELEASED", 0)

    play(scene, lag=1)


def test_files_are_kept_for_newest_predecessor_checkpoint_pin_and_load() -> None:
    async def scene(rig: RunRig) -> None:
        coordinator = rig.coordinator
        await rig.train(0)
        await coordinator.pin(1, "evaluation after")
        for step in range(1, 6):
            await rig.train(step)
        await rig.checkpoint(2)
        await rig.checkpoint(3)
        with coordinator.reading(4):
            assert await coordinator.deletable_versions() == (0,)
        assert await coordinator.deletable_versions() == (0, 4)
        for version, message in (
            (1, "version 1 must be free, but pinned by evaluation after"),
            (2, "the checkpoint of step 2"),
            (3, "the checkpoint of step 3"),
            (5, "the predecessor of the newest READY version"),
            (6, "the newest READY version"),
        ):
            with pytest.raises(IllegalTransition, match=message):
                await coordinator.version_deleted(version)
        await coordinator.unpin(1, "evaluation after")
        assert await coordinator.deletable_versions() == (0, 1, 4)
        await coordinator.version_deleted(0)
        with pytest.raises(IllegalTransition, match="must be stored"), coordinator.reading(0):
            pass

    play(scene)


def test_a_slow_reader_keeps_its_version_although_it_is_long_outdated() -> None:
    async def scene(rig: RunRig) -> None:
        with rig.coordinator.reading(0):
            for step in range(4):
                await rig.train(step)
            await rig.checkpoint(4)
            assert await rig.coordinator.deletable_versions() == (1, 2)
            with pytest.raises(IllegalTransition, match="a load in progress"):
                await rig.coordinator.version_deleted(0)
        await rig.rollouts()
        await rig.begin(4)
        await rig.publish(5)
        assert await rig.coordinator.deletable_versions() == (0, 1, 2, 3)

    play(scene)


def test_too_many_kept_versions_block_publication_with_the_culprits_named() -> None:
    async def scene(rig: RunRig) -> None:
        for step in range(2):
            (_, *_) = await rig.coordinator.lease(WORKER, 1, 0.0)
            await rig.train(step)
        waiter = asyncio.ensure_future(rig.coordinator.wait_for_room(5.0))
        await settle()
        assert not waiter.done()
        rig.clock.advance(5.0)
        with pytest.raises(DeadlineExceeded) as caught:
            await waiter
        assert any("version 0: 1 live attempts" in line for line in caught.value.culprits)

    play(scene, lag=3, max_retained_versions=3, lease_s=1e9, max_tail_wait_s=1e9)


def test_room_appears_when_a_version_is_deleted() -> None:
    async def scene(rig: RunRig) -> None:
        for step in range(3):
            await rig.train(step)
        await rig.checkpoint(3)
        waiter = asyncio.ensure_future(rig.coordinator.wait_for_room(1e6))
        await settle()
        assert not waiter.done()
        await rig.coordinator.version_deleted(0)
        await waiter

    play(scene, max_retained_versions=4)


def test_publishing_the_same_again_changes_nothing_and_other_weights_are_refused() -> None:
    async def scene(rig: RunRig) -> None:
        await rig.train(0)
        num_events = rig.coordinator.state.num_events
        await rig.coordinator.published(make_manifest(1, 1, 0))
        assert rig.coordinator.state.num_events == num_events
        with pytest.raises(IllegalTransition, match="version must be 2, the next unused, got 1"):
            await rig.coordinator.published(make_manifest(1, 1, 0, "other"))
        with pytest.raises(IllegalTransition, match="step 1 has the surviving version 1"):
            await rig.coordinator.published(make_manifest(2, 1, 0, "other"))

    play(scene)


def test_weights_of_a_step_that_never_began_are_refused() -> None:
    async def scene(rig: RunRig) -> None:
        with pytest.raises(IllegalTransition, match="step 0 must have begun"):
            await rig.coordinator.published(make_manifest(1, 1, 0))

    play(scene)


def test_a_replay_with_equal_weights_lets_the_version_live_on() -> None:
    async def scene(rig: RunRig) -> None:
        for step in range(3):
            await rig.train(step)
        await rig.coordinator.crash()
        await rig.open()
        pending = await rig.coordinator.pending_steps_after(0)
        assert [(p.step, p.published_version) for p in pending] == [(0, 1), (1, 2), (2, 3)]
        for again in pending:
            assert again.published_version is not None
            await rig.coordinator.published(
                make_manifest(again.published_version, again.step + 1, again.parent_version)
            )
        await rig.train(3)

    rig = play(scene)
    assert rig.audit().is_passed


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_a_replay_with_other_weights_orphans_descendants_and_their_tokens(lag: int) -> None:
    async def scene(rig: RunRig) -> None:
        await rig.train(0)
        await rig.checkpoint(1)
        for step in range(1, 4):
            await rig.train(step)
        await rig.run_attempts(3)
        held = await rig.coordinator.lease(WORKER, 2, 0.0)
        await rig.coordinator.crash()
        await rig.open()
        rig.weights_salt = "another machine"
        (first, *_) = await rig.coordinator.pending_steps_after(1)
        assert first.published_version == 2
        assert await rig.coordinator.orphan(2, "the replay gave other weights") == (2, 3, 4)
        state = rig.coordinator.state
        assert state.next_step == 2, "step 1 stays begun, its batch knew only surviving versions"
        assert not any(rig.coordinator.is_alive(lease.attempt_id) for lease in held)
        assert (await rig.coordinator.books(rig.stores.recorded)).are_closed
        assert await rig.publish(2) == 5, "numbers are never used again"
        for step in range(2, 5):
            plan = await rig.train(step)
            assert plan.max_lag <= lag
            assert not {member.trace.oldest_version for member in plan.members} & {2, 3, 4}

    rig = play(scene, lag=lag)
    report = rig.audit()
    assert report.is_passed, report.lines()
    if lag < 2:
        assert rig.coordinator.state.tokens.rejected["orphaned"] > 0


def test_a_version_that_a_checkpoint_holds_cannot_be_orphaned() -> None:
    async def scene(rig: RunRig) -> None:
        await rig.train(0)
        await rig.checkpoint(1)
        for version in (0, 1):
            with pytest.raises(IllegalTransition, match="is the start or held by a kept checkpoint"):
                await rig.coordinator.orphan(version, "x")
        with pytest.raises(IllegalTransition, match="must be on the surviving lineage"):
            await rig.coordinator.orphan(7, "x")

    play(scene)


def test_a_released_version_can_be_loaded_again_while_somebody_reads_it() -> None:
    async def scene(rig: RunRig) -> None:
        for step in range(3):
            await rig.train(step)
        with rig.coordinator.reading(0):
            await rig.load(0)
            found = rig.coordinator.version(0)
            assert found is not None and found.state == "READY"
            newest = rig.coordinator.newest_ready()
            assert newest is not None and newest.version == 3

    play(scene)


def test_listeners_hear_of_ends_only_after_their_commit() -> None:
    async def run() -> None:
        rig = await RunRig(make_settings()).start()
        heard: list[tuple[str, bool]] = []

        def listener(effect: object) -> None:
            committed = len(rig.memory_journal.stored) == rig.coordinator.state.num_events
            heard.append((type(effect).__name__, committed))

        rig.coordinator.listen(listener)
        (lease,) = await rig.coordinator.lease(WORKER, 1, 0.0)
        await rig.lose(lease)
        assert ("AttemptEnded", True) in heard
        assert all(committed for _, committed in heard)
        await rig.coordinator.close()

    asyncio.run(run())
