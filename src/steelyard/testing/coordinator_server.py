"""A real coordinator behind its real server on the loopback, with a misbehaving network in front of it."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from steelyard.coordinator.capability import CapabilityRing, Role
from steelyard.coordinator.client import ClientSettings, CoordinatorClient
from steelyard.coordinator.events import AnyEvent
from steelyard.coordinator.journal.memory import MemoryJournal
from steelyard.coordinator.server import CoordinatorServer, ServerLimits
from steelyard.coordinator.trainer_link import OperatorLink, TrainerLink
from steelyard.errors import StorageFailed
from steelyard.metrics import Counters
from steelyard.testing.fault_proxy import Fault, FaultProxy
from steelyard.testing.run_rig import SCORER, WORKER, RunRig, make_settings

TRAINER = "trn_rig"


class HeldJournal(MemoryJournal):
    """A journal on a disk that can be made to wait. ``waiting`` is set while an append does."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting = asyncio.Event()
        self._free = asyncio.Event()
        self._free.set()
        self._failure: StorageFailed | None = None

    def refuse(self, failure: StorageFailed) -> None:
        """Appends fail from now on."""
        self._failure = failure

    def hold(self) -> None:
        """Appends wait from now on."""
        self._free.clear()

    def release(self) -> None:
        """They go on."""
        self._free.set()

    async def append(self, events: Sequence[AnyEvent]) -> None:
        self.waiting.set()
        await self._free.wait()
        self.waiting.clear()
        if self._failure is not None:
            raise self._failure
        await super().append(events)


class ServedRig:
    """A :class:`RunRig` that is reached over HTTP. Back-off of clients takes no time.

    Args:
        rig: version 0 must be READY.
        journal: that of the rig.
        limits: of the server.
    """

    def __init__(self, rig: RunRig, journal: HeldJournal, limits: ServerLimits | None = None) -> None:
        self.rig = rig
        self.keys = CapabilityRing(b"k" * 32)
        self.counters = Counters()
        self.client_counters = Counters()
        self.proxy = FaultProxy("")
        self.url = ""
        self.journal = journal
        self._limits = limits
        self._server: CoordinatorServer
        self._clients: list[CoordinatorClient] = []

    async def start(self) -> "ServedRig":
        """Server and proxy listen; ``url`` is that of the proxy."""
        await self._serve()
        self.url = await self.proxy.start()
        return self

    async def restart(self) -> None:
        """The coordinator dies with all that was not committed, and a new one takes over the journal."""
        await self._server.stop()
        await self.rig.coordinator.crash()
        await self.rig.open()
        await self._serve()

    async def stop(self) -> None:
        """Clients, proxy and server are closed; the rig is not."""
        for client in self._clients:
            await client.close()
        await self.proxy.stop()
        await self._server.stop()

    def key(self, role: Role, worker_id: str) -> str:
        """A key that is good for an hour."""
        return self.keys.issue(role, worker_id, self.rig.clock.now_s() + 3600)

    async def worker(self, worker_id: str = WORKER, **settings: Any) -> CoordinatorClient:
        """A client for a harness worker."""
        return await self._client(Role.WORKER, worker_id, settings)

    async def scorer(self, worker_id: str = SCORER, **settings: Any) -> CoordinatorClient:
        """A client for a scorer."""
        return await self._client(Role.SCORER, worker_id, settings)

    async def trainer(self, **settings: Any) -> TrainerLink:
        """A trainer's side."""
        return TrainerLink(await self._client(Role.TRAINER, TRAINER, settings))

    async def operator(self) -> OperatorLink:
        """An operator's side."""
        return OperatorLink(await self._client(Role.OPERATOR, "opr_rig", {}))

    def lose(self, *numbers: int, fault: Fault = Fault.LOSE_ANSWER) -> None:
        """From now on the requests with these numbers meet ``fault``; 0 is the next one."""
        chosen = {self.proxy.num_requests + number for number in numbers}
        self.proxy.plan = lambda number: fault if number in chosen else Fault.NONE

    async def _serve(self) -> None:
        self._server = CoordinatorServer(
            self.rig.coordinator, self.keys, clock=self.rig.clock, counters=self.counters, limits=self._limits
        )
        self.proxy.upstream = await self._server.start()

    async def _client(self, role: Role, worker_id: str, settings: dict[str, Any]) -> CoordinatorClient:
        client = CoordinatorClient(
            self.url,
            self.key(role, worker_id),
            ids=self.rig.ids,
            counters=self.client_counters,
            draw=random.Random(0),
            settings=ClientSettings(**settings),
            sleep=_no_time,
        )
        self._clients.append(client)
        return await client.__aenter__()


async def _no_time(_: float) -> None:
    await asyncio.sleep(0)


def serve(
    scene: Callable[[ServedRig], Awaitable[None]], *, limits: ServerLimits | None = None, **settings: Any
) -> RunRig:
    """Run a scene on a served rig; at its end both books must close.

    Args:
        scene: what happens.
        limits: of the server.
        settings: as of ``make_settings``.
    """

    async def run() -> RunRig:
        journal = HeldJournal()
        rig = await RunRig(make_settings(**settings), journal=journal).start()
        rig.memory_journal = journal  # which is what its audit reads
        served = await ServedRig(rig, journal, limits).start()
        try:
            await scene(served)
        finally:
            await served.stop()
        books = await rig.coordinator.books(rig.stores.recorded)
        assert books.are_closed, books
        await rig.coordinator.close()
        return rig

    return asyncio.run(run())
