"""Replicas that go over to a version: side by side, one after another, in place; refused, dead and brought back."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from steelyard.coordinator import events as e
from steelyard.coordinator.journal.base import decode
from steelyard.coordinator.transitions import VersionState
from steelyard.errors import DeadlineExceeded, IntegrityError, ProcessDied
from steelyard.inference.engine import KvRule
from steelyard.run.fleet import FleetRules
from steelyard.testing.fleet import RigFleet
from steelyard.testing.manual_clock import settle
from steelyard.testing.run_rig import WORKER, RunRig, play
from steelyard.types import GenerateRequest, Lease, Sampling

Scene = Callable[[RigFleet], Awaitable[None]]


def play_with_fleet(root: Path, scene: Scene, *, rules: dict[str, Any] | None = None, **options: Any) -> RunRig:
    async def run(rig: RunRig) -> None:
        every = {"load_deadline_s": 5.0, "drain_deadline_s": 5.0, **(rules or {})}
        fleet = RigFleet(rig, root, rules=FleetRules(**every), **options)
        await fleet.fleet.begin()
        await fleet.keeper.load(0)
        await scene(fleet)

    return play(run)


async def lease_at(fleet: RigFleet, index: int | None = None) -> Lease:
    """One attempt; served last by a replica, if one is named."""
    (lease,) = await fleet.rig.coordinator.lease(WORKER, 1, 0.0)
    await fleet.rig.coordinator.start(lease.attempt_id, lease.attempt_number)
    if index is not None:
        others = [name for name in fleet.router.replicas if name != f"replica-{index}"]
        drained = [name for name in others if not fleet.router.replicas[name].is_draining]
        for name in drained:
            fleet.router.drain(name)
        await fleet.router.generate(request_of(fleet, lease))
        for name in drained:
            fleet.router.undrain(name)
        assert fleet.router.home_of(lease.attempt_id) == f"replica-{index}"
    return lease


def request_of(fleet: RigFleet, lease: Lease) -> GenerateRequest:
    return GenerateRequest(
        request_id=fleet.rig.ids.new("req"),
        attempt_id=lease.attempt_id,
        sequence_key=lease.attempt_id,
        policy_version=lease.policy_version,
        prompt_token_ids=(1, 2),
        sampling=Sampling(max_tokens=2),
        stop_token_ids=(),
        deadline_at_s=fleet.rig.clock.now_s() + 60.0,
    )


def state_of(fleet: RigFleet, version: int) -> str:
    known = fleet.rig.coordinator.version(version)
    assert known is not None
    return known.state


def journal_of(rig: RunRig, *kinds: type[e.Event]) -> list[tuple[str, str, int]]:
    """What the journal says of replicas: kind, replica, version."""
    found = []
    for event in map(decode, (record.payload for record in rig.memory_journal.records())):
        if isinstance(event, e.VersionLoaded) and e.VersionLoaded in kinds:
            found.append(("VERSION_LOADED", event.proof.replica_id, event.proof.version))
        elif isinstance(event, kinds):
            replica_id, version = getattr(event, "replica_id", ""), getattr(event, "version", -1)
            found.append((e.kind_of(event), replica_id, version))
    return found


def test_with_room_all_load_side_by_side_and_the_first_makes_the_version_ready(tmp_path: Path) -> None:
    async def scene(fleet: RigFleet) -> None:
        version = await fleet.publish(0)
        fleet.engine(1).gate.clear()
        loading = asyncio.create_task(fleet.keeper.load(version))
        await settle()
        assert fleet.engine(1).num_loads == 1
        assert state_of(fleet, version) == VersionState.READY
        assert (await lease_at(fleet)).policy_version == version
        fleet.engine(1).gate.set()
        await loading
        assert fleet.held() == [[0, 1], [0, 1]]

    play_with_fleet(tmp_path, scene, num_replicas=2)


def test_without_room_one_replica_after_another_drains_and_the_others_serve_on(tmp_path: Path) -> None:
    async def scene(fleet: RigFleet) -> None:
        coordinator = fleet.rig.coordinator
        version = await fleet.publish(0)
        first, second = await lease_at(fleet, 0), await lease_at(fleet, 1)
        loading = asyncio.create_task(fleet.keeper.load(version))
        await settle()
        assert fleet.held() == [[0], [0]], "an attempt of each replica goes on"
        third = await lease_at(fleet)
        assert third.policy_version == 0, "the other replica serves on"
        await coordinator.artifact_ready(fleet.rig.seal(first))
        await settle()
        assert fleet.held() == [[1], [0]]
        assert (await lease_at(fleet)).policy_version == version
        for lease in (second, third):
            await coordinator.artifact_ready(fleet.rig.seal(lease))
        await loading
        assert fleet.held() == [[1], [1]]

    rig = play_with_fleet(tmp_path, scene, num_replicas=2, max_versions=1)
    kinds = (e.ReplicaDraining, e.ReplicaUnloaded, e.ReplicaLoading, e.VersionLoaded)
    steps = ("REPLICA_DRAINING", "REPLICA_UNLOADED", "REPLICA_LOADING", "VERSION_LOADED")
    said = [(kind, name) for kind, name, _ in journal_of(rig, *kinds)]
    assert said[-8:] == [(kind, name) for name in ("replica-0", "replica-1") for kind in steps]


def test_to_drain_is_to_stop_everybody(tmp_path: Path) -> None:
    async def scene(fleet: RigFleet) -> None:
        version = await fleet.publish(0)
        leases = [await lease_at(fleet, index) for index in range(2)]
        loading = asyncio.create_task(fleet.keeper.load(version))
        await settle()
        assert await fleet.rig.coordinator.lease(WORKER, 1, 0.0) == ()
        for lease in leases:
            await fleet.rig.coordinator.artifact_ready(fleet.rig.seal(lease))
        await loading
        assert fleet.held() == [[1], [1]]
        assert (await lease_at(fleet)).policy_version == version

    play_with_fleet(tmp_path, scene, num_replicas=2, max_versions=1, rules={"publication": "drain"})


def test_blue_green_loads_on_the_one_that_stands_by_and_swaps(tmp_path: Path) -> None:
    async def scene(fleet: RigFleet) -> None:
        assert fleet.held() == [[0], []], "the last one stands by"
        version = await fleet.publish(0)
        lease = await lease_at(fleet, 0)
        await fleet.keeper.load(version)
        assert fleet.held() == [[0], [1]], "nobody waited for the attempt"
        new = await lease_at(fleet)
        assert new.policy_version == version
        await fleet.router.generate(request_of(fleet, new))
        assert fleet.router.home_of(new.attempt_id) == "replica-1"
        for done in (lease, new):
            await fleet.rig.coordinator.artifact_ready(fleet.rig.seal(done))
        second = await fleet.publish(1)
        await fleet.keeper.load(second)
        assert fleet.held() == [[2], [1]], "now the other one stood by"

    play_with_fleet(tmp_path, scene, num_replicas=2, max_versions=1, rules={"publication": "blue_green"})


def test_segmented_replicas_go_over_in_place_while_their_attempts_go_on(tmp_path: Path) -> None:
    async def scene(fleet: RigFleet) -> None:
        version = await fleet.publish(0)
        await lease_at(fleet, 0)
        await fleet.keeper.load(version)
        assert fleet.held() == [[1], [1]]
        assert fleet.engine(0).updates == [(1, KvRule.KEEP)]
        known = fleet.rig.coordinator.replicas.find("replica-0")
        assert known is not None
        assert known.held == {1}

    rules = {"in_place": True, "kv": KvRule.KEEP}
    play_with_fleet(tmp_path, scene, num_replicas=2, max_versions=1, rules=rules)


def test_an_evaluation_is_never_updated_under_its_attempts(tmp_path: Path) -> None:
    async def scene(fleet: RigFleet) -> None:
        version = await fleet.publish(0)
        await fleet.rig.coordinator.admit_evaluation(
            ("task-0001",), version=0, sampling=Sampling(), label="before", priority=1
        )
        await fleet.keeper.load(version)
        assert fleet.held() == [[0, 1]], "loaded beside it"
        assert fleet.engine(0).updates == []

    play_with_fleet(tmp_path, scene, max_versions=2, rules={"in_place": True})


def test_a_drain_that_does_not_end_names_the_attempts(tmp_path: Path) -> None:
    async def scene(fleet: RigFleet) -> None:
        version = await fleet.publish(0)
        lease = await lease_at(fleet, 0)
        with pytest.raises(DeadlineExceeded, match=f"room for version 1; still missing: {lease.attempt_id}"):
            await fleet.keeper.load(version)

    rules = {"drain_deadline_s": 0.01, "max_restarts": 0}
    play_with_fleet(tmp_path, scene, max_versions=1, rules=rules)


def test_a_replica_that_loads_something_else_is_refused_and_started_again(tmp_path: Path) -> None:
    async def scene(fleet: RigFleet) -> None:
        version = await fleet.publish(0)
        fleet.engine(1).lies = {version}
        await fleet.keeper.load(version)
        assert fleet.held() == [[0, 1], [1]], "the new process holds what was published"
        assert fleet.processes.num_starts == {"replica-0": 1, "replica-1": 2}

    rig = play_with_fleet(tmp_path, scene, num_replicas=2)
    kinds = (e.ReplicaRefused, e.ReplicaStarted)
    assert journal_of(rig, *kinds)[-2:] == [("REPLICA_REFUSED", "replica-1", 1), ("REPLICA_STARTED", "replica-1", -1)]


def test_a_replica_that_never_loads_right_is_left_out_and_the_others_serve(tmp_path: Path) -> None:
    async def scene(fleet: RigFleet) -> None:
        version = await fleet.publish(0)
        fleet.engine(1).lies = fleet.processes.lies["replica-1"] = {version}
        await fleet.keeper.load(version)
        assert fleet.processes.num_starts["replica-1"] == 1 + 2, "two restarts are allowed"
        assert not fleet.rig.coordinator.replicas.is_up("replica-1")
        assert (await lease_at(fleet)).policy_version == version

    play_with_fleet(tmp_path, scene, num_replicas=2, rules={"max_restarts": 2})


def test_where_no_replica_can_serve_the_error_says_what_was_wrong_with_the_first(tmp_path: Path) -> None:
    async def scene(fleet: RigFleet) -> None:
        version = await fleet.publish(0)
        for index in range(2):
            fleet.engine(index).lies = fleet.processes.lies[f"replica-{index}"] = {version}
        with pytest.raises(IntegrityError, match="version 1: the loaded digest is another one"):
            await fleet.keeper.load(version)
        assert state_of(fleet, version) == VersionState.PUBLISHED
        assert await fleet.rig.coordinator.lease(WORKER, 1, 0.0) == ()

    play_with_fleet(tmp_path, scene, num_replicas=2, rules={"max_restarts": 1})


def test_a_replica_that_dies_is_started_again_and_loads_what_is_needed(tmp_path: Path) -> None:
    async def scene(fleet: RigFleet) -> None:
        tending = asyncio.create_task(fleet.fleet.tend())
        await settle()
        fleet.processes.kill("replica-0")
        await settle()
        assert fleet.held() == [[0]]
        assert (await lease_at(fleet)).policy_version == 0
        tending.cancel()
        await asyncio.gather(tending, return_exceptions=True)

    rig = play_with_fleet(tmp_path, scene)
    kinds = (e.ReplicaDown, e.ReplicaStarted, e.ReplicaLoading, e.VersionLoaded)
    said = [kind for kind, _, _ in journal_of(rig, *kinds)]
    assert said[-4:] == ["REPLICA_DOWN", "REPLICA_STARTED", "REPLICA_LOADING", "VERSION_LOADED"]


def test_nothing_is_leased_while_no_replica_serves(tmp_path: Path) -> None:
    async def scene(fleet: RigFleet) -> None:
        await fleet.rig.coordinator.replicas.down("replica-0", "it died")
        assert await fleet.rig.coordinator.lease(WORKER, 1, 0.0) == ()

    play_with_fleet(tmp_path, scene)


def test_the_run_ends_when_the_last_replica_cannot_be_brought_back(tmp_path: Path) -> None:
    async def scene(fleet: RigFleet) -> None:
        fleet.processes.cannot_start = {"replica-0"}
        fleet.processes.kill("replica-0")
        with pytest.raises(ProcessDied, match="replica-0"):
            await fleet.fleet.tend()
        assert fleet.processes.num_starts["replica-0"] == 1 + 2

    play_with_fleet(tmp_path, scene, rules={"max_restarts": 2})


def test_a_replica_that_dies_while_it_loads_is_brought_back_by_the_load(tmp_path: Path) -> None:
    async def scene(fleet: RigFleet) -> None:
        tending = asyncio.create_task(fleet.fleet.tend())
        version = await fleet.publish(0)
        fleet.engine(0).gate.clear()
        dying = fleet.engine(0)
        loading = asyncio.create_task(fleet.keeper.load(version))
        await settle()
        fleet.processes.kill("replica-0")
        dying.gate.set()
        await loading
        assert fleet.held() == [[version]]
        assert fleet.processes.num_starts["replica-0"] == 2
        tending.cancel()
        await asyncio.gather(tending, return_exceptions=True)

    play_with_fleet(tmp_path, scene)


def test_the_one_that_stands_by_takes_the_place_of_the_last_that_serves(tmp_path: Path) -> None:
    async def scene(fleet: RigFleet) -> None:
        tending = asyncio.create_task(fleet.fleet.tend())
        await settle()
        fleet.processes.kill("replica-0")
        await settle()
        assert fleet.held()[1] == [0]
        assert (await lease_at(fleet)).policy_version == 0
        tending.cancel()
        await asyncio.gather(tending, return_exceptions=True)

    play_with_fleet(tmp_path, scene, num_replicas=2, max_versions=1, rules={"publication": "blue_green"})
