"""Replicas as the journal knows them: what each has proven to hold, what it goes over to, who keeps it from doing so.

Every method is durable when it returns, and does nothing where its event has nothing new to say or the run is over.
"""

from collections.abc import Awaitable, Callable
from typing import Protocol

from steelyard.coordinator import effects as fx
from steelyard.coordinator import events as e
from steelyard.coordinator.core import Core, short
from steelyard.coordinator.entities import Replica, State
from steelyard.coordinator.transitions import ReplicaState
from steelyard.types import LoadProof

HomeOf = Callable[[str], str | None]
"""The replica that an attempt was last served by, by attempt id."""


class Answer(Protocol):
    """Acts on the state and waits for the commit of what was written."""

    def __call__(self, act: Callable[[], None]) -> Awaitable[None]: ...


class Replicas:
    """The events of replicas. Raises IllegalTransition where one cannot follow.

    Args:
        prove: records a proof, as :meth:`steelyard.coordinator.versions.Versions.load` does.
    """

    def __init__(self, core: Core, prove: Callable[[LoadProof], None], answer: Answer) -> None:
        self._core = core
        self._prove = prove
        self._answer = answer
        core.subscribe(fx.ReplicaChanged, lambda _: core.progress.notify())

    def find(self, replica_id: str) -> Replica | None:
        """What is known of a replica."""
        return self._core.state.replicas.get(replica_id)

    def holds(self, replica_id: str, version: int) -> bool:
        """Whether a replica has proven to hold ``version``, and is up."""
        known = self.find(replica_id)
        return known is not None and version in known.held

    def is_up(self, replica_id: str) -> bool:
        """Whether a replica was started and has not gone since."""
        known = self.find(replica_id)
        return known is not None and known.state is not ReplicaState.DOWN

    async def started(self, replica_id: str) -> None:
        """Its process is up and holds nothing."""
        await self._say(e.ReplicaStarted(at_s=self._core.now_s(), replica_id=replica_id))

    async def draining(self, replica_id: str, version: int) -> None:
        """No new attempts for it, so that it can go over to ``version``."""
        await self._say(e.ReplicaDraining(at_s=self._core.now_s(), replica_id=replica_id, version=version))

    async def loading(self, replica_id: str, version: int, *, in_place: bool = False) -> None:
        """It is about to load ``version``."""
        event = e.ReplicaLoading(at_s=self._core.now_s(), replica_id=replica_id, version=version, in_place=in_place)
        await self._say(event)

    async def updated(self, proof: LoadProof, replaced: int) -> None:
        """It went over from version ``replaced``, in place, and proved the other."""

        def act() -> None:
            self._prove(proof)
            self._record(e.ReplicaUnloaded(at_s=self._core.now_s(), replica_id=proof.replica_id, version=replaced))

        await self._answer(act)

    async def unloaded(self, replica_id: str, version: int) -> None:
        """It no longer holds ``version``."""
        if self.holds(replica_id, version):
            await self._say(e.ReplicaUnloaded(at_s=self._core.now_s(), replica_id=replica_id, version=version))

    async def refused(self, replica_id: str, version: int, detail: str) -> None:
        """What it loaded is not what was published; it is being ended."""
        event = e.ReplicaRefused(at_s=self._core.now_s(), replica_id=replica_id, version=version, detail=short(detail))
        await self._say(event)

    async def down(self, replica_id: str, detail: str) -> None:
        """It died, was ended, or answers no more."""
        if self.is_up(replica_id):
            await self._say(e.ReplicaDown(at_s=self._core.now_s(), replica_id=replica_id, detail=short(detail)))

    async def all_down(self, detail: str) -> None:
        """Whoever held the processes of all replicas was started again."""
        for replica_id in tuple(self._core.state.replicas):
            await self.down(replica_id, detail)

    def held_back_by(self, replica_id: str, version: int, home_of: HomeOf) -> tuple[str, ...]:
        """The live attempts that only this replica can carry on; see :func:`attempts_that_need`."""
        return attempts_that_need(self._core.state, replica_id, version, home_of)

    async def _say(self, event: e.AnyEvent) -> None:
        await self._answer(lambda: self._record(event))

    def _record(self, event: e.AnyEvent) -> None:
        if not self._core.is_finished:
            self._core.record(event)


def attempts_that_need(state: State, replica_id: str, version: int, home_of: HomeOf) -> tuple[str, ...]:
    """The live attempts that would lose ``version`` if ``replica_id`` let go of it.

    Those that it served last; and those not served yet that no other replica which takes attempts could serve.
    """
    others = {name: replica for name, replica in state.replicas.items() if name != replica_id}
    is_taken = any(version in other.held and other.takes_attempts for other in others.values())
    found = []
    for rollout in state.held():
        if rollout.policy_version != version or rollout.attempt_id is None:
            continue
        home = home_of(rollout.attempt_id)
        is_elsewhere = is_taken if home is None else home in others and version in others[home].held
        if not is_elsewhere:
            found.append(rollout.attempt_id)
    return tuple(found)
