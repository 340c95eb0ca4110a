"""The replicas of a run: how each goes over to a version, and how one that fails comes back.

::

    with room        load beside what it holds                                         (nobody notices)
    segmented        go over in place, under running requests                          (stops for the change itself)
    without room     drain -> its attempts end -> unload -> load                       (the others serve on)

    refused (digest, compatibility, probe) or dead -> ended -> started again -> loads what is needed

    consumes      published versions; deaths of processes
    waits for     loads and attempts that end, each with a deadline
    unblocked by  ends of attempts
    produces      proofs, each an event of the journal; READY with the first
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

from steelyard.coordinator.admission import evaluating
from steelyard.coordinator.effects import AttemptEnded, Effect, GroupChanged, ReplicaChanged
from steelyard.coordinator.service import Coordinator
from steelyard.coordinator.transitions import ReplicaState, VersionState
from steelyard.errors import DeadlineExceeded, EngineError, IntegrityError, ProcessDied, RunError, SteelyardError
from steelyard.inference.engine import Engine, KvRule
from steelyard.processes.supervision import task_group
from steelyard.types import LoadProof

logger = logging.getLogger(__name__)

T = TypeVar("T")
Publication = Literal["rolling", "blue_green", "drain"]


class ReplicaRouter(Protocol):
    """What routes requests to the replicas."""

    @property
    def replicas(self) -> Mapping[str, Engine]:
        """Engines by replica id; versions are loaded and unloaded through these."""
        ...

    def drain(self, replica_id: str) -> None:
        """Send no new attempts to a replica while another one can serve them."""
        ...

    def undrain(self, replica_id: str) -> None:
        """Send new attempts to a replica again."""
        ...

    def home_of(self, attempt_id: str) -> str | None:
        """The replica that served an attempt last."""
        ...

    def replace(self, replica_id: str, engine: Engine) -> None:
        """The process of a replica was started anew and holds nothing."""
        ...


class ReplicaProcesses(Protocol):
    """The processes behind the engines."""

    def process_of(self, name: str) -> object | None:
        """The present process of a replica, for comparison; None where it was ended."""
        ...

    async def death_of(self, name: str) -> ProcessDied:
        """Wait until the present process of a replica has ended, asked to or not."""
        ...

    async def restart_replica(self, name: str) -> Engine:
        """End what is left of a replica and start it anew.

        Raises:
            ProcessDied, DeadlineExceeded: it does not come up.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class FleetRules:
    """How replicas go over to a version.

    ``in_place``: weights may change under running requests (``weights.mode: segmented``), with ``kv`` as the rule.
    ``drain_deadline_s``: by then every attempt has ended by its own deadline. ``max_restarts``: in a row, for each
    replica, without a version proven in between.
    """

    publication: Publication = "rolling"
    in_place: bool = False
    kv: KvRule = KvRule.RECOMPUTE
    load_deadline_s: float = 60.0
    drain_deadline_s: float = 600.0
    max_restarts: int = 3


class Fleet:
    """All replicas of a run.

    Args:
        path_of: the directory of a version.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        router: ReplicaRouter,
        processes: ReplicaProcesses,
        path_of: Callable[[int], str],
        rules: FleetRules,
    ) -> None:
        self._coordinator = coordinator
        self._router = router
        self._processes = processes
        self._path_of = path_of
        self._rules = rules
        self._locks = {name: asyncio.Lock() for name in router.replicas}
        self._num_failures = dict.fromkeys(router.replicas, 0)
        self._max_versions: dict[str, int] = {}
        self._standby: str | None = tuple(router.replicas)[-1] if rules.publication == "blue_green" else None
        self._moved = asyncio.Event()
        coordinator.listen(self._on_effect)

    async def begin(self) -> None:
        """The processes have just been started; whatever the journal knows of earlier ones is gone."""
        await self._coordinator.replicas.all_down("the control process was started again")
        for name in self._router.replicas:
            await self._coordinator.replicas.started(name)

    async def go_over(self, version: int) -> list[LoadProof]:
        """Bring ``version`` to all replicas, as the rules say; READY once the first has proven it.

        A replica that cannot prove it is ended and started again, and after ``max_restarts`` left out.

        Raises:
            IntegrityError, RunError, EngineError: no replica could be brought to it; the error of the first.
        """
        proofs: list[LoadProof] = []
        errors: list[SteelyardError] = []

        async def one_after_another(names: Iterable[str]) -> None:
            for name in names:
                try:
                    proofs.extend(await self._bring(name, version))
                except (IntegrityError, RunError, EngineError) as error:
                    logger.error("replica %s is left out: %s", name, error)
                    errors.append(error)

        async with task_group() as group:
            for chain in await self._chains(version):
                group.create_task(one_after_another(chain), name=f"bring {chain} to version {version}")
        if not any(self._holds(name, version) for name in self._router.replicas):
            raise errors[0] if errors else RunError(f"version {version} needs a replica, all were given up")
        if self._standby is not None:
            await self._rotate(version)
        return proofs

    async def unload(self, version: int) -> None:
        """Let go of a version wherever it is held. Where a request still reads it, a later call does."""
        for name in self._router.replicas:
            if self._holds(name, version) and not self._locks[name].locked():
                async with self._locks[name]:
                    await self._unload(name, version)

    def is_held(self, version: int) -> bool:
        """Whether any replica holds a version."""
        return any(self._holds(name, version) for name in self._router.replicas)

    async def tend(self) -> None:
        """Bring replicas back that die. Ends only by an error.

        Raises:
            RunError: the last replica cannot be brought back.
        """
        async with task_group() as group:
            for name in self._router.replicas:
                group.create_task(self._tend(name), name=f"tend {name}")

    # --- one replica ------------------------------------------------------------------------------

    async def _bring(self, name: str, version: int) -> list[LoadProof]:
        async with self._locks[name]:
            while not self._holds(name, version):
                if self._num_failures[name] > self._rules.max_restarts:
                    return []
                try:
                    if not self._coordinator.replicas.is_up(name):
                        await self._start_again(name)
                    return [await self._load(name, version)]
                except (IntegrityError, RunError, EngineError) as error:
                    await self._fail(name, version, error)
        return []

    async def _load(self, name: str, version: int) -> LoadProof:
        coordinator, engine, rules = self._coordinator, self._router.replicas[name], self._rules
        path = self._path_of(version)
        if self._goes_in_place(name, version):
            replaced = max(self._held(name))
            await coordinator.replicas.loading(name, version, in_place=True)
            proof = await self._in_time(name, version, engine.update(path, version, rules.kv))
            await coordinator.replicas.updated(proof, replaced)
        else:
            await self._make_room(name, version)
            await coordinator.replicas.loading(name, version)
            proof = await self._in_time(name, version, engine.load(path, version))
            await coordinator.loaded(proof)
        self._router.undrain(name)
        self._num_failures[name] = 0
        await coordinator.ready(version)
        return proof

    async def _in_time(self, name: str, version: int, load: Awaitable[T]) -> T:
        deadline_s = self._rules.load_deadline_s
        try:
            async with asyncio.timeout(deadline_s):
                return await load
        except TimeoutError:
            raise DeadlineExceeded(f"version {version} to load", (name,), deadline_s) from None

    def _goes_in_place(self, name: str, version: int) -> bool:
        """Whether running requests may go over with the replica: not those of an evaluation, and only forwards."""
        state, held = self._coordinator.state, self._held(name)
        if not self._rules.in_place or not held or held & evaluating(state) or version in evaluating(state):
            return False
        return all(state.versions[number].step < state.versions[version].step for number in held)

    async def _make_room(self, name: str, version: int) -> None:
        """Unload the oldest version that nobody needs; where there is room for one only, attempts must end first."""
        limit = await self._room(name)
        if len(self._held(name)) < limit:
            return
        if limit == 1:
            await self._drain(name, version)
        until_s = asyncio.get_running_loop().time() + self._rules.drain_deadline_s
        while len(self._held(name)) >= limit:
            self._moved.clear()
            free = [number for number in self._lettable(name, limit) if not self._needed_by(name, number)]
            if free and await self._unload(name, free[0]):
                continue
            await self._wait_for_ends(name, version, until_s)

    def _lettable(self, name: str, limit: int) -> list[int]:
        """What may be let go of, oldest first: not the newest, which new attempts need, unless only one can be held."""
        held = sorted(self._held(name))
        return held if limit == 1 else held[:-1]

    def _needed_by(self, name: str, version: int) -> tuple[str, ...]:
        if version in evaluating(self._coordinator.state):
            return (f"an evaluation of version {version}",)
        return self._coordinator.replicas.held_back_by(name, version, self._router.home_of)

    async def _wait_for_ends(self, name: str, version: int, until_s: float) -> None:
        try:
            async with asyncio.timeout_at(until_s):
                await self._moved.wait()
        except TimeoutError:
            held = sorted(self._held(name))
            culprits = tuple(who for number in held for who in self._needed_by(name, number))
            what = f"replica {name} to have room for version {version}"
            raise DeadlineExceeded(what, culprits, self._rules.drain_deadline_s) from None

    async def _drain(self, name: str, version: int) -> None:
        self._router.drain(name)
        known = self._coordinator.replicas.find(name)
        if known is not None and known.state is ReplicaState.SERVING:
            await self._coordinator.replicas.draining(name, version)

    async def _unload(self, name: str, version: int) -> bool:
        """Whether it is unloaded now; a request that is just being aborted may still read it."""
        try:
            await self._router.replicas[name].unload(version)
        except EngineError as error:
            logger.info("%s keeps version %d: %s", name, version, error)
            return False
        except RunError as error:
            logger.warning("%s does not answer: %s", name, error)
            return False
        await self._coordinator.replicas.unloaded(name, version)
        return True

    async def _room(self, name: str) -> int:
        """How many versions a replica can hold."""
        if name not in self._max_versions:
            self._max_versions[name] = (await self._router.replicas[name].health()).max_versions
        return self._max_versions[name]

    # --- failures ---------------------------------------------------------------------------------

    async def _fail(self, name: str, version: int, error: SteelyardError) -> None:
        """End a replica that did not do what it should.

        Raises:
            SteelyardError: it has failed too often in a row; ``error``.
        """
        replicas = self._coordinator.replicas
        self._num_failures[name] += 1
        logger.warning("replica %s failed at version %d: %s", name, version, error)
        known = replicas.find(name)
        if isinstance(error, IntegrityError) and known is not None and known.goal == version:
            await replicas.refused(name, version, str(error))
        else:
            await replicas.down(name, str(error))
        if self._num_failures[name] > self._rules.max_restarts:
            raise error

    async def _start_again(self, name: str) -> None:
        engine = await self._processes.restart_replica(name)
        self._router.replace(name, engine)
        self._max_versions.pop(name, None)
        await self._coordinator.replicas.started(name)

    async def _tend(self, name: str) -> None:
        while True:
            async with self._locks[name]:
                process = self._processes.process_of(name)
            if process is None or self._num_failures[name] > self._rules.max_restarts:
                return
            death = await self._processes.death_of(name)
            async with self._locks[name]:
                if self._processes.process_of(name) is not process:
                    continue  # whoever had it in hand has started it again
                await self._coordinator.replicas.down(name, str(death))
                self._num_failures[name] += 1
                logger.warning("replica %s died: %s", name, death)
            await self._recover(name, death)

    async def _recover(self, name: str, death: ProcessDied) -> None:
        """Bring a replica that died back to what is needed, or, where one stands by, that one in its place."""
        others = [other for other in self._router.replicas if other not in (name, self._standby)]
        if self._standby not in (None, name) and not any(map(self._coordinator.replicas.is_up, others)):
            name, self._standby = self._standby or name, name
        for version in self._needed():
            try:
                await self._bring(name, version)
            except (IntegrityError, RunError, EngineError) as error:
                logger.error("replica %s is left out: %s", name, error)
            else:
                if name == self._standby:
                    await self._drain(name, version)
        if not any(map(self._coordinator.replicas.is_up, self._router.replicas)):
            raise death

    def _needed(self) -> list[int]:
        """Versions that a replica must hold to take part: what is evaluated, or the newest READY one."""
        state = self._coordinator.state
        newest = self._coordinator.newest_ready()
        open_ones = [v for v in sorted(evaluating(state)) if state.versions[v].state is VersionState.READY]
        return open_ones or ([] if newest is None else [newest.version])

    # --- order ------------------------------------------------------------------------------------

    async def _chains(self, version: int) -> list[list[str]]:
        """Who goes over beside whom: chains side by side, in each one after another."""
        names = [name for name in self._router.replicas if not self._holds(name, version)]
        if self._standby is not None:
            return [self._blue_green(names)]
        if self._rules.publication == "drain":
            return [[name] for name in names]
        with_room = [name for name in names if await self._goes_over_unnoticed(name)]
        return [[name] for name in with_room] + [[name for name in names if name not in with_room]]

    def _blue_green(self, names: list[str]) -> list[str]:
        """The one that stands by first, then the others but for the last, which will stand by."""
        active = [name for name in names if name != self._standby]
        is_first = not any(self._held(name) for name in self._router.replicas)
        return active if is_first or self._standby not in names else [self._standby, *active[:-1]]

    async def _rotate(self, version: int) -> None:
        """Let the replica stand by that did not go over."""
        behind = [name for name in self._router.replicas if not self._holds(name, version)]
        if behind and self._coordinator.replicas.is_up(behind[-1]):
            self._standby = behind[-1]
            await self._drain(self._standby, version)

    async def _goes_over_unnoticed(self, name: str) -> bool:
        try:
            return not self._held(name) or await self._room(name) > 1
        except RunError:
            return True  # it is dead; to start it again stops nobody

    def _held(self, name: str) -> set[int]:
        known = self._coordinator.replicas.find(name)
        return set() if known is None else set(known.held)

    def _holds(self, name: str, version: int) -> bool:
        return self._coordinator.replicas.holds(name, version)

    def _on_effect(self, effect: Effect) -> None:
        if isinstance(effect, AttemptEnded | GroupChanged | ReplicaChanged):
            self._moved.set()
