"""The life of versions: loads and removals that meet."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from steelyard.coordinator.transitions import VersionState
from steelyard.errors import DeadlineExceeded
from steelyard.run.fleet import FleetRules
from steelyard.run.versions import VersionKeeper
from steelyard.testing.fleet import RigFleet, RigReplica
from steelyard.testing.manual_clock import settle
from steelyard.testing.run_rig import RunRig, play


def play_with_keeper(
    root: Path, scene: Callable[[RunRig, VersionKeeper, RigReplica], Awaitable[None]], deadline_s: float = 5.0
) -> None:
    async def run(rig: RunRig) -> None:
        rules = FleetRules(load_deadline_s=deadline_s, max_restarts=0)
        fleet = RigFleet(rig, root, rules=rules)
        await fleet.fleet.begin()
        await scene(rig, fleet.keeper, fleet.engine(0))

    play(run)


async def train(rig: RunRig, keeper: VersionKeeper, step: int) -> int:
    """One step; its version published, loaded and READY."""
    await rig.rollouts()
    await rig.begin(step)
    version = await rig.publish(step + 1, is_ready=False)
    await keeper.load(version)
    return version


def state_of(rig: RunRig, version: int) -> str:
    known = rig.coordinator.version(version)
    assert known is not None
    return known.state


def test_a_version_that_is_loaded_again_is_not_let_go_of_meanwhile(tmp_path: Path) -> None:
    async def scene(rig: RunRig, keeper: VersionKeeper, engine: RigReplica) -> None:
        await rig.coordinator.pin(0, "an evaluation to come")
        await keeper.load(0)
        await train(rig, keeper, 0)
        await keeper.tidy()
        assert state_of(rig, 0) == VersionState.RELEASED
        assert sorted(engine.loaded_dirs) == [1]
        engine.gate.clear()
        loading = asyncio.create_task(keeper.load(0))
        await settle()
        tidying = asyncio.create_task(keeper.tidy())
        await settle()
        engine.gate.set()
        with rig.coordinator.reading(0):
            await asyncio.gather(loading, tidying)
            assert state_of(rig, 0) == VersionState.READY
            assert sorted(engine.loaded_dirs) == [0, 1]

    play_with_keeper(tmp_path, scene)


def test_two_that_tidy_at_once_delete_a_version_once(tmp_path: Path) -> None:
    async def scene(rig: RunRig, keeper: VersionKeeper, engine: RigReplica) -> None:
        await keeper.load(0)
        for step in range(2):
            await rig.rollouts()
            await rig.begin(step)
            await keeper.load(await rig.publish(step + 1, is_ready=False))
        await rig.checkpoint(2)
        assert await rig.coordinator.deletable_versions() == (0,)
        # Both look while a commit is under way, and so before either has said what it deletes.
        await asyncio.gather(rig.coordinator.pin(2, "a commit"), keeper.tidy(), keeper.tidy())
        assert state_of(rig, 0) == VersionState.DELETED
        assert sorted(engine.loaded_dirs) == [2]

    play_with_keeper(tmp_path, scene)


def test_versions_are_loaded_one_at_a_time(tmp_path: Path) -> None:
    async def scene(rig: RunRig, keeper: VersionKeeper, engine: RigReplica) -> None:
        await keeper.load(0)
        await rig.rollouts()
        versions = []
        for step in range(2):
            await rig.begin(step)
            versions.append(await rig.publish(step + 1, is_ready=False))
        engine.gate.clear()
        loads = [asyncio.create_task(keeper.load(version)) for version in versions]
        await settle()
        engine.gate.set()
        await asyncio.gather(*loads)
        assert engine.most_loads == 1

    play_with_keeper(tmp_path, scene)


def test_a_replica_that_does_not_finish_its_load_is_named(tmp_path: Path) -> None:
    async def scene(rig: RunRig, keeper: VersionKeeper, engine: RigReplica) -> None:
        engine.gate.clear()
        with pytest.raises(DeadlineExceeded, match="version 0 to load; still missing: replica-0"):
            await keeper.load(0)

    play_with_keeper(tmp_path, scene, deadline_s=0.01)
