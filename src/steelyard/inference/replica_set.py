"""The replicas of a router: who is there, who drains, who is probed."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from steelyard.clock import Clock
from steelyard.errors import DeadlineExceeded, EngineError, RunError
from steelyard.inference.dispatcher import Decision, Dispatcher
from steelyard.inference.engine import Engine
from steelyard.inference.projection import Pace
from steelyard.inference.replica import Replica
from steelyard.inference.replica_state import ReplicaState
from steelyard.processes.supervision import task_group

logger = logging.getLogger(__name__)

Sleep = Callable[[float], Awaitable[None]]


@dataclass(frozen=True, kw_only=True)
class RouterSettings:
    """Times in seconds.

    ``probe_every_s``: pause between probes of replicas that are not at full weight. ``probe_deadline_s``: how long one
    probe may take. ``look_every_s``: how often the queue is looked at where nothing else makes it move.

    ``queue_deadline_s``: how long a request may wait for room; None, as long as its own deadline lets it.
    ``recovery_wait_s``: how long it may wait while all replicas that hold its version are dead. ``answer_grace_s``: how
    long after a request's deadline a replica may still answer before it counts as failed. ``max_tries``: replicas that
    one request is tried on. ``projection_quantile``: share of requests whose memory is projected large enough.

    ``hedge_quantile``: a request that has waited longer for its first token than this share of the last requests is
    given to a second replica as well, and the first that answers wins; None, never. ``abort_deadline_s``: how long the
    other may take to end.
    """

    probe_every_s: float = 1.0
    probe_deadline_s: float = 5.0
    look_every_s: float = 0.1
    queue_deadline_s: float | None = None
    recovery_wait_s: float = 10.0
    answer_grace_s: float = 3.0
    max_tries: int = 2
    projection_quantile: float = 0.9
    hedge_quantile: float | None = None
    abort_deadline_s: float = 2.0


class ReplicaSet:
    """Replicas that come, go, drain and are probed.

    Args:
        engines: replicas by id; more may come, and go, while it runs.
        on_decision: gets what the dispatcher decides whenever something changes.
    """

    def __init__(
        self,
        engines: Mapping[str, Engine],
        clock: Clock,
        settings: RouterSettings,
        on_decision: Callable[[Decision], None],
    ) -> None:
        if not engines:
            raise EngineError("a router must have at least one engine, got none")
        self._clock = clock
        self._settings = settings
        self._on_decision = on_decision
        self._replicas: dict[str, Replica] = {}
        self._changed = asyncio.Event()
        self._fleet = Pace()
        self.dispatcher = Dispatcher(
            self._fleet,
            projection_quantile=settings.projection_quantile,
            recovery_wait_s=settings.recovery_wait_s,
        )
        for replica_id, engine in engines.items():
            self._put(self._new(replica_id, engine))

    @property
    def replicas(self) -> Mapping[str, Replica]:
        """The engines by id, as they are now; versions are loaded and unloaded through these."""
        return MappingProxyType(self._replicas)

    @property
    def states(self) -> Mapping[str, ReplicaState]:
        """What is known of them."""
        return self.dispatcher.replicas

    def look(self) -> None:
        """Decide upon what can be decided now, and wake whoever waits for a change."""
        for decision in self.dispatcher.dispatch(self._clock.now_s()):
            self._on_decision(decision)
        self._changed.set()

    async def add(self, replica_id: str, engine: Engine) -> None:
        """Take a replica on, with the versions that it says it holds.

        Raises:
            EngineError: the name is taken.
            RunError: it does not answer; then it is not taken on.
        """
        if replica_id in self._replicas:
            raise EngineError(f"replica {replica_id} must not be known to be added, but it is")
        replica = self._new(replica_id, engine)
        await self._ask_health(replica)
        self._put(replica)
        self.look()

    def remove(self, replica_id: str) -> None:
        """Send nothing there any more. What is open there ends as its engine lets it; drain it before, or stop it.

        Raises:
            EngineError: it is not known.
        """
        self._known(replica_id)
        del self._replicas[replica_id]
        self.dispatcher.remove_replica(replica_id)
        self.look()

    def replace(self, replica_id: str, engine: Engine) -> None:
        """A replica was started anew: its KV and versions are gone, its name stays. Load versions through it.

        Requests that only its versions can serve wait for it to load them again, at most ``recovery_wait_s``.

        Raises:
            EngineError: it is not known.
        """
        before = self._known(replica_id)
        self.dispatcher.remove_replica(replica_id)
        replica = self._new(replica_id, engine)
        replica.state.awaited_versions = before.versions | before.awaited_versions
        self._put(replica)
        self.look()

    def home_of(self, attempt_id: str) -> str | None:
        """The replica that an attempt was served on last; None where it was not, or that one is gone."""
        return self.dispatcher.homes.of_attempt(attempt_id)

    def drain(self, replica_id: str) -> None:
        """Send no new attempts to a replica from now on; see :meth:`wait_drained`.

        An attempt that was served there goes on elsewhere at its next call, where another replica holds its version;
        else it goes on here until it is released.

        Raises:
            EngineError: the replica is not known.
        """
        self._known(replica_id).now_drains(True)

    async def wait_drained(self, replica_id: str, deadline_s: float) -> None:
        """Wait until nothing is open on a draining replica and nobody needs it.

        Raises:
            EngineError: the replica is not known, or was removed meanwhile.
            DeadlineExceeded: names the attempts that still need it, or else the replica. It drains on.
        """
        try:
            async with asyncio.timeout(deadline_s):
                while self._known(replica_id) and not self.dispatcher.is_drained(replica_id):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            culprits = self.dispatcher.stuck_attempts(replica_id) or (f"requests open on {replica_id}",)
            raise DeadlineExceeded(f"replica {replica_id} to drain", culprits, deadline_s) from None

    def undrain(self, replica_id: str) -> None:
        """A drained replica takes new attempts again.

        Raises:
            EngineError: it is not known.
        """
        self._known(replica_id).now_drains(False)

    def weights(self) -> dict[str, float]:
        """Weight of each replica, 0 to 1."""
        return {name: state.weight for name, state in self.states.items()}

    async def run(self, sleep: Sleep) -> None:
        """Probe weak replicas and look at the queue, for ever. To be supervised.

        *Consumes* health answers; *waits for* each at most ``probe_deadline_s``; *unblocked by* time.
        """
        async with task_group() as group:
            group.create_task(self._probe_always(sleep), name="probe replicas")
            group.create_task(self._look_always(sleep), name="look at the queue")

    async def probe(self) -> None:
        """Ask once each replica that is not at full weight; a sound answer raises its weight."""
        weak = [replica for replica in self._replicas.values() if replica.weight < 1.0]
        await asyncio.gather(*(self._probe_one(replica) for replica in weak))

    async def _probe_always(self, sleep: Sleep) -> None:
        while True:
            await sleep(self._settings.probe_every_s)
            await self.probe()

    async def _look_always(self, sleep: Sleep) -> None:
        while True:
            await sleep(self._settings.look_every_s)
            if self.dispatcher.num_waiting:
                self.look()

    async def _probe_one(self, replica: Replica) -> None:
        try:
            await self._ask_health(replica)
        except RunError as error:
            logger.info("replica %s does not answer a probe: %s", replica.replica_id, error)

    async def _ask_health(self, replica: Replica) -> None:
        deadline_s = self._settings.probe_deadline_s
        try:
            async with asyncio.timeout(deadline_s):
                await replica.health()
        except TimeoutError:
            replica.state.failed(f"no answer to a probe within {deadline_s} s")
            raise DeadlineExceeded("an answer to a probe", (replica.replica_id,), deadline_s) from None

    def _new(self, replica_id: str, engine: Engine) -> Replica:
        return Replica(ReplicaState(replica_id, self._fleet, self.look), engine)

    def _put(self, replica: Replica) -> None:
        self._replicas[replica.replica_id] = replica
        self.dispatcher.add_replica(replica.state)

    def _known(self, replica_id: str) -> ReplicaState:
        state = self.states.get(replica_id)
        if state is None:
            raise EngineError(f"replica {replica_id} must be one of {sorted(self.states)}")
        return state
