"""Several replicas over the versions of a :class:`~steelyard.testing.run_rig.RunRig`; they die and lie when told to."""

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import cast

import msgspec

from steelyard.errors import EngineError, IntegrityError, ProcessDied
from steelyard.inference.engine import EngineHealth, KvRule
from steelyard.inference.router import Router
from steelyard.run.fleet import Fleet, FleetRules
from steelyard.run.versions import VersionKeeper
from steelyard.testing.engine import FakeEngine
from steelyard.testing.run_rig import RunRig, make_proof
from steelyard.trainer.client import TrainerClient
from steelyard.types import LoadProof
from steelyard.weights.retention import VersionStore


class RigReplica(FakeEngine):
    """Proves what the rig has published, once ``gate`` is open.

    ``lies`` holds versions that it loads otherwise than they were published. ``num_loads`` go on now, ``most_loads``
    is how many ever did.
    """

    def __init__(self, rig: RunRig, replica_id: str, max_versions: int) -> None:
        super().__init__(rig.clock, replica_id)
        self.rig = rig
        self.max_versions = max_versions
        self.gate = asyncio.Event()
        self.gate.set()
        self.lies: set[int] = set()
        self.updates: list[tuple[int, KvRule]] = []
        self.num_loads = 0
        self.most_loads = 0

    async def load(self, version_dir: str, version: int) -> LoadProof:
        """Hold a version beside the others."""
        if len(self.loaded_dirs) >= self.max_versions and version not in self.loaded_dirs:
            raise EngineError(f"{self.replica_id} has room for {self.max_versions} versions, holds {self.loaded_dirs}")
        self.num_loads += 1
        self.most_loads = max(self.most_loads, self.num_loads)
        try:
            await self.gate.wait()
        finally:
            self.num_loads -= 1
        if version in self.lies:
            raise IntegrityError(f"version {version}: the loaded digest is another one")
        proof = await super().load(version_dir, version)
        return make_proof(self.rig.stores.versions[version].manifest, proof.replica_id)

    async def update(self, version_dir: str, version: int, kv: KvRule) -> LoadProof:
        """Hold a version in the place of the newest."""
        self.updates.append((version, kv))
        if version in self.lies:
            raise IntegrityError(f"version {version}: the loaded digest is another one")
        return await super().update(version_dir, version, kv)

    async def health(self) -> EngineHealth:
        """As the fake's, with the room that it has."""
        return msgspec.structs.replace(await super().health(), max_versions=self.max_versions)


class RigProcesses:
    """Implements :class:`~steelyard.run.fleet.ReplicaProcesses`.

    ``cannot_start``: names of replicas that do not come up. ``lies``: versions that each new process loads wrongly.
    """

    def __init__(self, rig: RunRig, names: Iterable[str], max_versions: int) -> None:
        self._rig = rig
        self._max_versions = max_versions
        self.engines = {name: RigReplica(rig, name, max_versions) for name in names}
        self._dead = {name: asyncio.Event() for name in self.engines}
        self.cannot_start: set[str] = set()
        self.lies: dict[str, set[int]] = {}
        self.num_starts = dict.fromkeys(self.engines, 1)

    def kill(self, name: str) -> None:
        """The process of a replica dies now."""
        self.engines[name].failure = ProcessDied(name, -9)
        self._dead[name].set()

    def process_of(self, name: str) -> object | None:
        """See :class:`~steelyard.run.fleet.ReplicaProcesses`."""
        return self._dead[name]

    async def death_of(self, name: str) -> ProcessDied:
        """See :class:`~steelyard.run.fleet.ReplicaProcesses`."""
        await self._dead[name].wait()
        return ProcessDied(name, -9)

    async def restart_replica(self, name: str) -> RigReplica:
        """See :class:`~steelyard.run.fleet.ReplicaProcesses`."""
        self._dead[name].set()
        self._dead[name] = asyncio.Event()
        self.num_starts[name] += 1
        if name in self.cannot_start:
            raise ProcessDied(name, 1)
        self.engines[name] = RigReplica(self._rig, name, self._max_versions)
        self.engines[name].lies = self.lies.get(name, set())
        return self.engines[name]


class RigFleet:
    """A fleet on a rig; its replicas have been started and hold nothing.

    Args:
        root: of the versions' directories.
        max_versions: that each replica can hold.
    """

    def __init__(
        self,
        rig: RunRig,
        root: Path,
        *,
        num_replicas: int = 1,
        max_versions: int = 3,
        rules: FleetRules | None = None,
    ) -> None:
        names = [f"replica-{index}" for index in range(num_replicas)]
        self.rig = rig
        self.processes = RigProcesses(rig, names, max_versions)
        self.router = Router(self.processes.engines, rig.clock)
        store = VersionStore(root)
        self.fleet = Fleet(
            rig.coordinator,
            self.router,
            self.processes,
            lambda version: str(store.path(version)),
            rules or FleetRules(load_deadline_s=5.0, drain_deadline_s=5.0),
        )
        # No scene publishes by the keeper itself.
        self.keeper = VersionKeeper(rig.coordinator, cast(TrainerClient, None), self.fleet, store, 5.0)

    def engine(self, index: int) -> RigReplica:
        """The present process of a replica."""
        return self.processes.engines[f"replica-{index}"]

    def held(self) -> list[list[int]]:
        """The versions that each replica holds."""
        return [sorted(engine.loaded_dirs) for engine in self.processes.engines.values()]

    async def publish(self, step: int) -> int:
        """One batch of rollouts and a step; its version published, not loaded. Others can still be leased."""
        rules = self.rig.settings.rules
        await self.rig.run_attempts(rules.groups_per_batch * rules.group_size)
        await self.rig.score_all()
        await self.rig.begin(step)
        return await self.rig.publish(step + 1, is_ready=False)
