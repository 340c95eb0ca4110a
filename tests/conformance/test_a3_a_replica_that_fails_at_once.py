"""A3: an instance that failed at once kept the fewest requests and drew nearly all traffic."""

import asyncio
from pathlib import Path

import aiohttp

from steelyard.clock import SystemClock
from steelyard.errors import RemoteFailed
from steelyard.inference.engine import OnTokens
from steelyard.inference.router import Router
from steelyard.testing.engine import FakeEngine
from steelyard.testing.gateway import GatewayWorld, binding
from steelyard.types import GenerateRequest, GenerateResult

NUM_REPLICAS = 8
NUM_CALLS = 160
NUM_AT_A_TIME = 16
FAILURE_S = 0.001
WORK_S = 0.02


class Instance(FakeEngine):
    """Takes its time to answer; where it is broken it fails with a 500, after a millisecond."""

    async def generate(self, request: GenerateRequest, on_tokens: OnTokens | None = None) -> GenerateResult:
        await asyncio.sleep(FAILURE_S if self.failure is not None else WORK_S)
        return await super().generate(request, on_tokens)


def test_a3_a_replica_that_fails_at_once_draws_a_handful_of_requests_and_comes_back_by_probes(tmp_path: Path) -> None:
    clock = SystemClock()
    bindings = {f"att_{index}": binding(policy_version=0) for index in range(2 * NUM_CALLS)}

    async def scenario() -> None:
        instances = [Instance(clock, replica_id=f"rep{index}") for index in range(NUM_REPLICAS)]
        router = Router({instance.replica_id: instance for instance in instances}, clock)
        world = GatewayWorld(tmp_path, engine=router, bindings=bindings, clock=clock)
        for instance in instances:
            instance.script = lambda _request: (*world.renderer.codec.encode("done"), world.renderer.end_of_turn_id)
        try:
            for replica in router.replicas.values():
                await replica.load("somewhere", 0)
            url = await world.server.start()
            broken = instances[0]
            broken.failure = RemoteFailed("HTTP 500")
            await call_all(world, url, range(NUM_CALLS))
            assert 1 <= broken.num_failed <= 4, "a weight of 1 is halved four times before it is 0"
            assert world.counters.read()["gateway.recorded_turns"] == NUM_CALLS, "nobody saw the failures"
            for _ in range(4):
                await router.probe()
            assert router.weights()["rep0"] == 0.0, "probes that fail leave it at zero"
            broken.failure = None
            for _ in range(4):
                await router.probe()
            assert router.weights()["rep0"] == 1.0
            await call_all(world, url, range(NUM_CALLS, 2 * NUM_CALLS))
            assert len(broken.requests) > NUM_CALLS / NUM_REPLICAS / 4
        finally:
            await world.close()

    asyncio.run(scenario())


async def call_all(world: GatewayWorld, url: str, numbers: range) -> None:
    """One call for each attempt, a few at a time; every one must be answered."""
    slots = asyncio.Semaphore(NUM_AT_A_TIME)

    async def call(number: int) -> None:
        key = world.key(f"att_{number}")
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
        headers = {"Authorization": f"Bearer {key}"}
        async with slots, client.post(f"{url}/chat/completions", json=body, headers=headers) as answer:
            assert answer.status == 200, await answer.text()
            assert (await answer.json())["choices"][0]["finish_reason"] == "stop"

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(30)) as client:
        await asyncio.gather(*(call(number) for number in numbers))
