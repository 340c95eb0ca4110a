"""The life of versions: loads and removals that meet."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import cast

import pytest

from steelyard.coordinator.transitions import VersionState
from steelyard.errors import DeadlineExceeded
from steelyard.run.versions import VersionKeeper
from steelyard.testing.engine import FakeEngine
from steelyard.testing.manual_clock import settle
from steelyard.testing.run_rig import RunRig, make_proof, play
from steelyard.trainer.client import TrainerClient
from steelyard.types import LoadProof
from steelyard.weights.retention import VersionStore


class GatedEngine(FakeEngine):
    """Loads what the rig has published, and says so once ``gate`` is open.

    ``most_loads`` is how many loads ran side by side.
    """

    rig: RunRig
    gate: asyncio.Event
    num_loads = 0
    most_loads = 0

    async def load(self, version_dir: str, version: int) -> LoadProof:
        self.num_loads += 1
        self.most_loads = max(self.most_loads, self.num_loads)
        proof = await super().load(version_dir, version)
        try:
            await self.gate.wait()
        finally:
            self.num_loads -= 1
        return make_proof(self.rig.stores.versions[version].manifest, proof.replica_id)


def play_with_keeper(
    root: Path, scene: Callable[[RunRig, VersionKeeper, GatedEngine], Awaitable[None]], deadline_s: float = 5.0
) -> None:
    async def run(rig: RunRig) -> None:
        engine = GatedEngine(rig.clock)
        engine.rig, engine.gate = rig, asyncio.Event()
        engine.gate.set()
        keeper = VersionKeeper(
            rig.coordinator, cast(TrainerClient, None), {"rep_fake": engine}, VersionStore(root), deadline_s
        )
        await scene(rig, keeper, engine)

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
    async def scene(rig: RunRig, keeper: VersionKeeper, engine: GatedEngine) -> None:
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
    async def scene(rig: RunRig, keeper: VersionKeeper, engine: GatedEngine) -> None:
        await keeper.load(0)
        for step in range(2):
            await rig.rollouts()
            await rig.begin(step)
            await rig.publish(step + 1)
        await rig.checkpoint(2)
        assert await rig.coordinator.deletable_versions() == (0,)
        # Both look while a commit is under way, and so before either has said what it deletes.
        await asyncio.gather(rig.coordinator.pin(2, "a commit"), keeper.tidy(), keeper.tidy())
        assert state_of(rig, 0) == VersionState.DELETED
        assert not engine.loaded_dirs

    play_with_keeper(tmp_path, scene)


def test_versions_are_loaded_one_at_a_time(tmp_path: Path) -> None:
    async def scene(rig: RunRig, keeper: VersionKeeper, engine: GatedEngine) -> None:
        await rig.rollouts()
        await rig.begin(0)
        version = await rig.publish(1, is_ready=False)
        engine.gate.clear()
        loads = [asyncio.create_task(keeper.load(number)) for number in (0, version)]
        await settle()
        engine.gate.set()
        await asyncio.gather(*loads)
        assert engine.most_loads == 1

    play_with_keeper(tmp_path, scene)


def test_a_replica_that_does_not_finish_its_load_is_named(tmp_path: Path) -> None:
    async def scene(rig: RunRig, keeper: VersionKeeper, engine: GatedEngine) -> None:
        engine.gate.clear()
        with pytest.raises(DeadlineExceeded, match="version 0 to load; still missing: rep_fake"):
            await keeper.load(0)

    play_with_keeper(tmp_path, scene, deadline_s=0.01)
