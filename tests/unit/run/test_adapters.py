"""The gateway's attempts on a real coordinator: who may do what, and what becomes of a worker that dies."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from steelyard.coordinator.capability import CapabilityRing, Role
from steelyard.errors import Refused
from steelyard.gateway.client import GatewayClient
from steelyard.gateway.recorder import Recorder
from steelyard.metrics import Counters
from steelyard.run.adapters import LiveAttempts, WorkerKeys
from steelyard.testing.gateway import GatewayWorld
from steelyard.testing.manual_clock import settle
from steelyard.testing.run_rig import WORKER, MemoryStores, RunRig, make_settings, refusal_of
from steelyard.types import ChatRequest, EndReason, Lease, Message

ASK = ChatRequest(messages=(Message(role="user", content="Go on."),))


class RecorderStores(MemoryStores):
    """Stores of a rig whose tokens the gateway's recorder counts."""

    def __init__(self) -> None:
        super().__init__()
        self.recorder: Recorder

    def discard(self, attempt_id: str) -> int:
        return self.recorder.discard(attempt_id)


class Bench:
    """A coordinator, the gateway of its attempts, and workers that reach the gateway over HTTP."""

    def __init__(self) -> None:
        self.rig = RunRig(make_settings(retry_backoff_s=1.0))
        self.world: GatewayWorld
        self.url = ""

    async def run(self, folder: Path, scene: Callable[["Bench"], Awaitable[None]]) -> None:
        self.rig.stores = stores = RecorderStores()
        await self.rig.start()
        live = LiveAttempts(self.rig.coordinator, 4096, 600.0)
        self.world = GatewayWorld(folder, ["one", "two"], live=live, clock=self.rig.clock)
        stores.recorder = self.world.recorder
        try:
            self.url = await self.world.server.start()
            async with asyncio.timeout(30):
                await scene(self)
        finally:
            await self.world.close()
            await self.rig.coordinator.close()

    def worker(self, worker_id: str = WORKER) -> GatewayClient:
        key = self.world.worker_key(worker_id)
        return GatewayClient(self.url, key, clock=self.rig.clock, counters=Counters(), draw=random.Random(0))

    async def lease(self) -> Lease:
        (lease,) = await self.rig.coordinator.lease(WORKER, 1, 0.0)
        return lease

    async def ask(self, worker: GatewayClient, attempt_id: str) -> None:
        await worker.chat(attempt_id, ASK, self.rig.clock.now_s() + 60.0)


def test_the_tokens_of_a_worker_that_died_are_lost_with_its_lease_and_the_books_close(tmp_path: Path) -> None:
    async def scene(bench: Bench) -> None:
        lease = await bench.lease()
        async with bench.worker() as worker:
            await bench.ask(worker, lease.attempt_id)
            num_tokens = bench.world.ledger.recorded(lease.attempt_id)
            assert num_tokens > 0
            before = await bench.rig.coordinator.books(bench.world.ledger.by_attempt)
            assert (before.are_closed, before.tokens.in_flight) == (True, num_tokens)
            bench.rig.clock.advance(bench.rig.settings.lease_s + 1.0)
            await settle()
            books = await bench.rig.coordinator.books(bench.world.ledger.by_attempt)
            assert books.are_closed
            assert (books.tokens.in_flight, sum(books.tokens.lost.values())) == (0, num_tokens)
            # It was not dead, only late.
            assert await refusal_of(worker.seal(lease.attempt_id, EndReason.SUBMITTED, ())) == "expired"
            assert await refusal_of(bench.ask(worker, lease.attempt_id)) == "late"
            assert await worker.discard(lease.attempt_id) == 0
        assert bench.world.counters.read()["gateway.attempts.refused.expired"] == 2

    asyncio.run(Bench().run(tmp_path, scene))


def test_only_the_holder_of_an_attempt_may_open_seal_or_discard_it(tmp_path: Path) -> None:
    async def scene(bench: Bench) -> None:
        lease = await bench.lease()
        async with bench.worker() as holder, bench.worker("wrk_other") as other:
            await bench.ask(holder, lease.attempt_id)
            assert await refusal_of(bench.ask(other, lease.attempt_id)) == "foreign"
            assert await refusal_of(other.seal(lease.attempt_id, EndReason.SUBMITTED, ())) == "foreign"
            assert await other.discard(lease.attempt_id) == 0
            assert await refusal_of(holder.seal("att_nobody", EndReason.SUBMITTED, ())) == "unknown"
            sealed = await holder.seal(lease.attempt_id, EndReason.SUBMITTED, ())
            assert sealed.num_tokens == bench.world.ledger.recorded(lease.attempt_id)

    asyncio.run(Bench().run(tmp_path, scene))


def test_an_attempt_that_is_handed_in_can_be_neither_opened_nor_thrown_away(tmp_path: Path) -> None:
    async def scene(bench: Bench) -> None:
        lease = await bench.lease()
        async with bench.worker() as worker:
            await bench.ask(worker, lease.attempt_id)
            trace = await worker.seal(lease.attempt_id, EndReason.SUBMITTED, ())
            report = bench.rig.seal(lease)
            await bench.rig.coordinator.artifact_ready(msgspec.structs.replace(report, trace=trace))
            assert await refusal_of(bench.ask(worker, lease.attempt_id)) == "late"
            assert await worker.discard(lease.attempt_id) == 0
            assert bench.world.store.is_sealed(lease.attempt_id)

    asyncio.run(Bench().run(tmp_path, scene))


def test_only_keys_of_workers_open_the_gateway() -> None:
    ring = CapabilityRing(b"k" * 32)
    keys = WorkerKeys(ring)
    assert keys.worker_of(ring.issue(Role.WORKER, "w1", 100.0), 50.0) == "w1"
    for key, now_s in ((ring.issue(Role.SCORER, "w1", 100.0), 50.0), (ring.issue(Role.WORKER, "w1", 100.0), 100.0)):
        try:
            keys.worker_of(key, now_s)
        except Refused as refusal:
            assert refusal.reason == ("expired" if now_s == 100.0 else "foreign")
        else:
            raise AssertionError("the key must be refused")
