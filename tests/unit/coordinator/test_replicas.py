"""What the journal knows of replicas, and which attempts keep one from letting go of a version."""

import msgspec
import pytest

from steelyard.errors import IllegalTransition
from steelyard.testing.run_rig import WORKER, RunRig, make_proof, play
from steelyard.types import Lease


async def lease_one(rig: RunRig) -> Lease:
    (lease,) = await rig.coordinator.lease(WORKER, 1, 0.0)
    return lease


async def add_replica(rig: RunRig, name: str, version: int = 0) -> None:
    await rig.coordinator.replicas.started(name)
    await rig.coordinator.loaded(make_proof(rig.stores.versions[version].manifest, name))


def test_an_attempt_is_bound_only_to_what_a_live_replica_serves() -> None:
    async def scene(rig: RunRig) -> None:
        replicas = rig.coordinator.replicas
        await replicas.down("rep_0", "it died")
        assert await rig.coordinator.lease(WORKER, 1, 0.0) == ()
        await add_replica(rig, "rep_1")
        assert (await lease_one(rig)).policy_version == 0
        await replicas.draining("rep_1", 0)
        assert await rig.coordinator.lease(WORKER, 1, 0.0) == ()

    play(scene)


def test_an_attempt_is_not_bound_to_a_version_from_before_its_groups_admission() -> None:
    async def scene(rig: RunRig) -> None:
        await add_replica(rig, "rep_1")
        await rig.train(0)
        assert rig.coordinator.state.is_served(0)
        assert rig.coordinator.state.is_served(1)
        await rig.rollouts()
        await rig.begin(1)
        await rig.publish(2)
        # Groups that were admitted at version 1 or 2 wait; only version 0 is served now.
        await rig.coordinator.replicas.down("rep_0", "it died")
        assert await rig.coordinator.lease(WORKER, 1, 0.0) == ()

    play(scene)


def test_a_dead_replica_proves_nothing() -> None:
    async def scene(rig: RunRig) -> None:
        await rig.coordinator.replicas.down("rep_0", "it died")
        with pytest.raises(IllegalTransition, match="replica rep_0 from DOWN"):
            await rig.load(0)

    play(scene)


def test_a_replica_must_prove_what_it_began_to_load() -> None:
    async def scene(rig: RunRig) -> None:
        await rig.rollouts()
        await rig.begin(0)
        version = await rig.publish(1, is_ready=False)
        await rig.coordinator.replicas.loading("rep_0", version)
        proof = make_proof(rig.stores.versions[0].manifest)
        with pytest.raises(IllegalTransition, match="must load version 1, proved 0"):
            await rig.coordinator.loaded(msgspec.structs.replace(proof, load_id="load_again"))

    play(scene)


def test_what_is_recovered_knows_what_each_replica_held() -> None:
    async def scene(rig: RunRig) -> None:
        await add_replica(rig, "rep_1")
        await rig.coordinator.replicas.draining("rep_1", 0)
        await rig.coordinator.crash()
        await rig.open()
        known = rig.coordinator.replicas.find("rep_1")
        assert known is not None
        assert (known.held, known.takes_attempts) == ({0}, False)

    play(scene)


def test_an_attempt_holds_back_the_replica_that_served_it_and_an_unserved_one_the_last_that_could() -> None:
    async def scene(rig: RunRig) -> None:
        replicas = rig.coordinator.replicas
        first, second = await lease_one(rig), await lease_one(rig)
        homes = {first.attempt_id: "rep_0"}
        assert replicas.held_back_by("rep_0", 0, homes.get) == (first.attempt_id, second.attempt_id)
        await add_replica(rig, "rep_1")
        assert replicas.held_back_by("rep_0", 0, homes.get) == (first.attempt_id,)
        assert replicas.held_back_by("rep_1", 0, homes.get) == ()
        await replicas.draining("rep_1", 0)
        assert replicas.held_back_by("rep_0", 0, homes.get) == (first.attempt_id, second.attempt_id)
        homes[first.attempt_id] = "rep_1"
        assert replicas.held_back_by("rep_0", 0, homes.get) == (second.attempt_id,)

    play(scene)
