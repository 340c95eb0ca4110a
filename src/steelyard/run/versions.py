"""Versions on their way: published by the trainer, proven by every replica, READY, released, deleted.

::

    consumes      published versions, and what the coordinator says of releases
    waits for     replicas that load; each load has a deadline
    unblocked by  the training loop's next publication, the end of the last attempt on a version
    produces      READY versions; memory and disk that are free again
"""

import asyncio
import logging
from collections.abc import Mapping

from steelyard.coordinator.effects import Effect, VersionChanged
from steelyard.coordinator.service import Coordinator
from steelyard.coordinator.transitions import VersionState
from steelyard.errors import DeadlineExceeded, EngineError
from steelyard.inference.engine import Engine
from steelyard.processes.supervision import end_all, task_group
from steelyard.trainer.client import TrainerClient
from steelyard.trainer.records import PublishRequest
from steelyard.types import LoadProof, Manifest
from steelyard.weights.retention import VersionStore

logger = logging.getLogger(__name__)


class VersionKeeper:
    """Moves versions through their life.

    Args:
        engines: all replicas, by name.
        load_deadline_s: how long one replica may take to load and prove a version, in seconds.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        trainer: TrainerClient,
        engines: Mapping[str, Engine],
        store: VersionStore,
        load_deadline_s: float,
    ) -> None:
        self._coordinator = coordinator
        self._trainer = trainer
        self._engines = engines
        self._store = store
        self._load_deadline_s = load_deadline_s
        self._held: set[int] = set()
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
        await self._coordinator.wait_for_room(self._load_deadline_s)
        manifest = await self._trainer.publish(PublishRequest(version=version, parent_version=parent_version))
        await self._coordinator.published(manifest)
        return manifest

    def use_trainer(self, trainer: TrainerClient) -> None:
        """Publish from this trainer from now on: the one before was ended."""
        self._trainer = trainer

    def load_soon(self, version: int) -> None:
        """Have :meth:`run` load a published version."""
        self._to_load.put_nowait(version)

    async def load(self, version: int) -> None:
        """Load a version on every replica and declare it READY. One at a time, and while none is let go of.

        Raises:
            IntegrityError: a replica does not hold what was published.
            DeadlineExceeded: names the replicas that did not finish.
        """
        async with self._moving:
            await self._load(version)
        self._changed.set()

    async def _load(self, version: int) -> None:
        with self._coordinator.reading(version):
            await self._let_go()
            self._held.add(version)
            proofs = await self._load_everywhere(version)
            for proof in proofs:
                await self._coordinator.loaded(proof)
            await self._coordinator.ready(version)
        self.load_s[version] = max(proof.loaded_in_s for proof in proofs)

    async def run(self) -> None:
        """Load what is published and let go of what is released, for ever."""
        async with task_group() as group:
            group.create_task(self._load_queued(), name="load versions")
            group.create_task(self._tidy_on_change(), name="release versions")

    async def tidy(self) -> None:
        """Unload what is released, delete what nobody needs."""
        async with self._moving:
            await self._let_go()

    async def _let_go(self) -> None:
        for version in sorted(self._held):
            known = self._coordinator.version(version)
            if known is not None and known.state in _GONE:
                await self._unload(version)
        for version in await self._coordinator.deletable_versions():
            if version not in self._held:
                await self._coordinator.version_deleted(version)
                await asyncio.to_thread(self._store.delete, (version,))

    async def _load_queued(self) -> None:
        while True:
            await self.load(await self._to_load.get())

    async def _tidy_on_change(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            await self.tidy()

    async def _load_everywhere(self, version: int) -> list[LoadProof]:
        path = str(self._store.path(version))
        loads = {
            asyncio.create_task(engine.load(path, version), name=name): name for name, engine in self._engines.items()
        }
        try:
            done, late = await asyncio.wait(loads, timeout=self._load_deadline_s, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
            if late:
                names = tuple(loads[task] for task in late)
                raise DeadlineExceeded(f"version {version} to load", names, self._load_deadline_s)
        finally:
            await end_all(loads)
        return [task.result() for task in loads]

    async def _unload(self, version: int) -> None:
        self._held.discard(version)
        for name, engine in self._engines.items():
            try:
                await engine.unload(version)
            except EngineError as error:
                # A request that is just being aborted still reads it; the next change looks again.
                logger.info("%s keeps version %d: %s", name, version, error)
                self._held.add(version)

    def _on_effect(self, effect: Effect) -> None:
        if isinstance(effect, VersionChanged):
            self._changed.set()


_GONE = (VersionState.RELEASED, VersionState.ORPHANED, VersionState.DELETED)
