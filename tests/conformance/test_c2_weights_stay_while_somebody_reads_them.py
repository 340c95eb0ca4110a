"""C2: weight files were deleted on a timer while a slow reader loaded them.

What may be deleted is decided by who refers to it, however many versions follow and however slow a reader is.
"""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from steelyard.coordinator.transitions import VersionState
from steelyard.errors import DeadlineExceeded
from steelyard.testing.fleet import RigFleet
from steelyard.testing.manual_clock import settle
from steelyard.testing.run_rig import RunRig, make_proof, play
from steelyard.testing.tiny_model import tiny_module, write_tiny_model
from steelyard.weights.loader import VersionLoader
from steelyard.weights.publisher import VersionPublisher
from steelyard.weights.retention import VersionStore

NUM_STEPS = 4


class Weights:
    """A run whose versions lie on disk as the real publisher writes them."""

    def __init__(self, rig: RunRig, root: Path, max_versions: int = 3) -> None:
        self.rig = rig
        self.store = VersionStore(root / "weights")
        self._publisher = VersionPublisher(self.store.root, write_tiny_model(root / "model"), probe_tolerance=1e-4)
        self.fleet = RigFleet(rig, self.store.root, num_replicas=2, max_versions=max_versions)
        self.keeper = self.fleet.keeper
        self.write(0)

    def write(self, version: int) -> None:
        parent = version - 1 if version else None
        self._publisher.publish(tiny_module(version), version=version, step=version, parent_version=parent)

    async def step(self, step: int) -> None:
        """One optimizer step and its checkpoint; its version is written, published, loaded and READY."""
        await self.rig.rollouts()
        await self.rig.begin(step)
        self.write(step + 1)
        await self.keeper.load(await self.rig.publish(step + 1, is_ready=False))
        await self.rig.checkpoint(step + 1)
        await self.keeper.tidy()


def run(root: Path, scene: Callable[[Weights], Awaitable[None]], **settings: Any) -> None:
    async def on_rig(rig: RunRig) -> None:
        weights = Weights(rig, root)
        await weights.fleet.fleet.begin()
        await weights.keeper.load(0)
        await scene(weights)

    play(on_rig, **settings)


def test_c2_a_slow_reader_finds_every_file_of_its_version_whatever_is_published_meanwhile(tmp_path: Path) -> None:
    async def scene(weights: Weights) -> None:
        with weights.rig.coordinator.reading(0):
            for step in range(NUM_STEPS):
                await weights.step(step)
            assert weights.store.versions() == (0, NUM_STEPS - 1, NUM_STEPS), "read, the predecessor, the newest"
            VersionLoader().load(weights.store.path(0))
        await weights.keeper.tidy()
        assert weights.store.versions() == (NUM_STEPS - 1, NUM_STEPS)
        gone = weights.rig.coordinator.version(0)
        assert gone is not None
        assert gone.state == VersionState.DELETED

    run(tmp_path, scene)


def test_c2_where_few_versions_may_be_kept_a_publication_waits_and_names_the_reader(tmp_path: Path) -> None:
    async def scene(weights: Weights) -> None:
        coordinator = weights.rig.coordinator
        with coordinator.reading(0):
            await weights.step(0)
            await weights.step(1)
            with pytest.raises(DeadlineExceeded, match=r"max_retained_versions = 3 .*version 0: .*load"):
                await coordinator.wait_for_room(0.0)
            assert weights.store.versions() == (0, 1, 2)
        await weights.keeper.tidy()
        await coordinator.wait_for_room(0.0)
        assert weights.store.versions() == (1, 2)

    run(tmp_path, scene, max_retained_versions=3)


def test_c2_files_stay_while_one_of_several_replicas_still_loads_them(tmp_path: Path) -> None:
    async def scene(weights: Weights) -> None:
        slow = weights.fleet.engine(1)
        slow.gate.clear()
        await weights.rig.rollouts()
        await weights.rig.begin(0)
        weights.write(1)
        loading = asyncio.create_task(weights.keeper.load(await weights.rig.publish(1, is_ready=False)))
        await settle()
        assert weights.fleet.held()[0] == [0, 1], "the fast one serves it by now"
        coordinator = weights.rig.coordinator
        for step in range(1, NUM_STEPS):
            await weights.rig.rollouts()
            await weights.rig.begin(step)
            version = await weights.rig.publish(step + 1, is_ready=False)
            weights.write(version)
            await coordinator.loaded(make_proof(weights.rig.stores.versions[version].manifest, "replica-0"))
            await coordinator.ready(version)
            await weights.rig.checkpoint(step + 1)
            assert 1 not in await coordinator.deletable_versions(), "somebody reads it"
        slow.gate.set()
        await loading
        await weights.keeper.tidy()
        assert 1 not in weights.store.versions()

    run(tmp_path, scene, max_retained_versions=8)
