"""Versions on their way: published by the trainer, proven by replicas, READY, released, deleted.

::

    consumes      published versions, and what the coordinator says of releases
    waits for     replicas that load; each load has a deadline
    unblocked by  the training loop's next publication, the end of the last attempt on a version
    produces      READY versions; memory and disk that are free again
"""

import asyncio

from steelyard.coordinator.effects import Effect, VersionChanged
from steelyard.coordinator.service import Coordinator
from steelyard.coordinator.transitions import VersionState
from steelyard.errors import IllegalTransition
from steelyard.processes.supervision import task_group
from steelyard.run.fleet import Fleet
from steelyard.trainer.client import TrainerClient
from steelyard.trainer.records import PublishRequest
from steelyard.types import Manifest
from steelyard.weights.retention import VersionStore


class VersionKeeper:
    """Moves versions through their life.

    Args:
        fleet: all replicas.
        room_deadline_s: how long a publication waits for versions to be deleted, in seconds.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        trainer: TrainerClient,
        fleet: Fleet,
        store: VersionStore,
        room_deadline_s: float,
    ) -> None:
        self._coordinator = coordinator
        self._trainer = trainer
        self._fleet = fleet
        self._store = store
        self._room_deadline_s = room_deadline_s
        # A load may find its version RELEASED still: what is let go of must not be looked up before it is READY.
        self._moving = asyncio.Lock()
        self._to_load: asyncio.Queue[int] = asyncio.Queue()
        self._changed = asyncio.Event()
        self.load_s: dict[int, float] = {}
        coordinator.listen(self._on_effect)

    async def publish(self, version: int, parent_version: int | None) -> Manifest:
        """Publish the trainer's present weights as ``version``; its files and its event are durable then.

        Raises:
            DeadlineExceeded: too many versions are kept; names who needs them.
        """
        await self._coordinator.wait_for_room(self._room_deadline_s)
        manifest = await self._trainer.publish(PublishRequest(version=version, parent_version=parent_version))
        await self._coordinator.published(manifest)
        return manifest

    def use_trainer(self, trainer: TrainerClient) -> None:
        """Publish from this trainer from now on: the one before was ended."""
        self._trainer = trainer

    def load_soon(self, version: int) -> None:
        """Have :meth:`run` load a published version. One that is newer by then is loaded in its place."""
        self._to_load.put_nowait(version)

    async def load(self, version: int) -> None:
        """Bring a version to all replicas; READY with the first. One at a time, and while none is let go of.

        Raises:
            IntegrityError, RunError, EngineError: no replica can serve it; says of the first why.
        """
        async with self._moving:
            await self._load(version)
        self._changed.set()

    async def _load(self, version: int) -> None:
        with self._coordinator.reading(version):
            await self._let_go()
            proofs = await self._fleet.go_over(version)
            await self._coordinator.ready(version)
        self.load_s[version] = max((proof.loaded_in_s for proof in proofs), default=0.0)

    async def run(self) -> None:
        """Load what is published, let go of what is released, bring back replicas that die, for ever."""
        async with task_group() as group:
            group.create_task(self._load_queued(), name="load versions")
            group.create_task(self._tidy_on_change(), name="release versions")
            group.create_task(self._fleet.tend(), name="tend replicas")

    async def tidy(self) -> None:
        """Unload what is released, delete what nobody needs."""
        async with self._moving:
            await self._let_go()

    async def _let_go(self) -> None:
        state = self._coordinator.state
        held = {version for replica in state.replicas.values() for version in replica.held}
        for version in sorted(held):
            if state.versions[version].state in _GONE:
                await self._fleet.unload(version)
        for version in await self._coordinator.deletable_versions():
            if not self._fleet.is_held(version):
                await self._coordinator.version_deleted(version)
                await asyncio.to_thread(self._store.delete, (version,))

    async def _load_queued(self) -> None:
        while True:
            version = await self._to_load.get()
            while not self._to_load.empty():
                version = self._to_load.get_nowait()
            try:
                if not self._is_gone(version):
                    await self.load(version)
            except IllegalTransition:
                if not self._is_gone(version):
                    raise

    def _is_gone(self, version: int) -> bool:
        """Whether nobody wants a version any more: it was overtaken, or given up by a replay meanwhile."""
        known = self._coordinator.version(version)
        return known is None or known.state in _GONE

    async def _tidy_on_change(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            await self.tidy()

    def _on_effect(self, effect: Effect) -> None:
        if isinstance(effect, VersionChanged):
            self._changed.set()


_GONE = (VersionState.RELEASED, VersionState.ORPHANED, VersionState.DELETED)
