"""What a run says of itself over HTTP: to whoever has a key, and to nobody else."""

import asyncio
import random
from collections.abc import Awaitable, Callable

import aiohttp
import pytest

from steelyard.coordinator.capability import CapabilityRing, Role
from steelyard.coordinator.description import RUN_PATH, RunDescription, read_description
from steelyard.coordinator.protocol import PROTOCOL_VERSION, VERSION_HEADER
from steelyard.coordinator.server import CoordinatorServer
from steelyard.errors import InputError, Refused
from steelyard.metrics import Counters
from steelyard.testing.run_rig import RunRig

KEYS = CapabilityRing(b"k" * 32)
DESCRIPTION = RunDescription(
    environment="repair",
    environment_version="1",
    options_digest="0" * 32,
    verifier_version="repair-1",
    artifacts_url="file:///there",
    lease_s=60.0,
)


def play(scene: Callable[[str, Counters], Awaitable[None]], description: RunDescription | None = DESCRIPTION) -> None:
    async def run() -> None:
        rig, counters = await RunRig().start(), Counters()
        server = CoordinatorServer(rig.coordinator, KEYS, clock=rig.clock, counters=counters, description=description)
        try:
            await scene(await server.start(), counters)
        finally:
            await server.stop()
            await rig.coordinator.close()

    asyncio.run(run())


async def read(url: str, key: str) -> RunDescription:
    return await read_description([url], key, counters=Counters(), draw=random.Random(0))


@pytest.mark.parametrize("role", [Role.WORKER, Role.SCORER])
def test_workers_and_scorers_read_what_the_run_says_of_itself(role: Role) -> None:
    async def scene(url: str, _: Counters) -> None:
        assert await read(url, KEYS.issue(role, "one", 4e9)) == DESCRIPTION

    play(scene)


def test_another_runs_key_is_refused_and_counted() -> None:
    async def scene(url: str, counters: Counters) -> None:
        with pytest.raises(Refused) as caught:
            await read(url, CapabilityRing(b"x" * 32).issue(Role.WORKER, "one", 4e9))
        assert caught.value.reason == "foreign"
        assert counters.read()["coordinator.key.foreign"] == 1

    play(scene)


def test_an_unlike_version_and_no_key_are_refused() -> None:
    async def scene(url: str, _: Counters) -> None:
        key = {"Authorization": f"Bearer {KEYS.issue(Role.WORKER, 'one', 4e9)}"}
        version = {VERSION_HEADER: str(PROTOCOL_VERSION)}
        async with aiohttp.ClientSession() as http:
            for headers, status in ((key, 426), ({**key, VERSION_HEADER: "99"}, 426), (version, 401)):
                async with http.get(url + RUN_PATH, headers=headers) as response:
                    assert response.status == status

    play(scene)


def test_a_server_that_says_nothing_of_its_run_is_not_one_to_work_for() -> None:
    async def scene(url: str, _: Counters) -> None:
        with pytest.raises(InputError, match=f"got GET {RUN_PATH}"):
            await read(url, KEYS.issue(Role.WORKER, "one", 4e9))

    play(scene, description=None)
