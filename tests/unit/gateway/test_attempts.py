"""Attempts that are opened, sealed and discarded over HTTP: by their holder, any number of times."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp
import msgspec
import pytest

from steelyard.coordinator.capability import Role
from steelyard.gateway import attempt_protocol as p
from steelyard.gateway.app import HttpLimits
from steelyard.gateway.attempts import AttemptLimits
from steelyard.processes.http_failures import Failed
from steelyard.testing.gateway import ATTEMPT, GatewayWorld
from steelyard.types import ChatRequest, EndReason, Message, Record, ToolRecord

VERSION = {p.VERSION_HEADER: str(p.PROTOCOL_VERSION)}
OPEN, DISCARD = p.OpenAttempt(attempt_id=ATTEMPT), p.DiscardAttempt(attempt_id=ATTEMPT)
SEAL = p.SealAttempt(
    attempt_id=ATTEMPT,
    end_reason=EndReason.SUBMITTED,
    tools=(ToolRecord(tool_call_id="call_1", turn_index=0, name="submit", outcome="ok", latency_s=0.5),),
)

Answer = p.AttemptResult | Failed
Post = Callable[..., Awaitable[tuple[int, Answer]]]


def play(world: GatewayWorld, scene: Callable[[Post], Awaitable[None]]) -> None:
    """Serve ``world``; ``scene`` gets a function that posts a call, or bytes, and gives status and answer."""

    async def run() -> None:
        url = (await world.server.start()).removesuffix("/v1") + p.ATTEMPTS_PATH
        async with aiohttp.ClientSession() as http:

            async def post(
                call: Record | bytes, key: str | None = None, headers: dict[str, str] = VERSION, method: str = "POST"
            ) -> tuple[int, Answer]:
                data = call if isinstance(call, bytes) else msgspec.msgpack.encode(call)
                sent = {**headers, "Authorization": f"Bearer {world.worker_key() if key is None else key}"}
                async with http.request(method, url, data=data, headers=sent) as response:
                    body = await response.read()
                    return response.status, msgspec.msgpack.decode(body, type=Answer)

            await scene(post)

    async def whole() -> None:
        try:
            await run()
        finally:
            await world.close()

    asyncio.run(whole())


async def say(world: GatewayWorld, attempt_id: str = ATTEMPT) -> None:
    """One recorded turn."""
    await world.gateway.chat(attempt_id, ChatRequest(messages=(Message(role="user", content="Go on."),)))


def test_opening_twice_gives_the_same_key_which_the_chat_endpoint_takes(tmp_path: Path) -> None:
    world = GatewayWorld(tmp_path)

    async def scene(post: Post) -> None:
        first, second = await post(OPEN), await post(OPEN)
        assert first == second
        assert isinstance(first[1], p.Opened)
        assert world.keys.verify(first[1].api_key, world.clock.now_s()) == ATTEMPT
        assert first[1].expires_at_s == world.directory.bindings[ATTEMPT].deadline_at_s

    play(world, scene)


def test_sealing_twice_gives_the_same_trace_and_another_ending_is_refused_as_double(tmp_path: Path) -> None:
    world = GatewayWorld(tmp_path, ["one"])

    async def scene(post: Post) -> None:
        await say(world)
        first, second = await post(SEAL), await post(SEAL)
        assert first == second
        assert isinstance(first[1], p.Sealed)
        trace, digest = await world.store.read(ATTEMPT)
        assert (first[1].trace.digest, first[1].trace.num_turns) == (digest, 1)
        assert trace.tools == SEAL.tools
        status, other = await post(msgspec.structs.replace(SEAL, end_reason=EndReason.MAX_TURNS))
        assert (status, isinstance(other, Failed) and other.reason) == (409, "double")
        assert world.counters.read()["gateway.attempts.refused.double"] == 1

    play(world, scene)


def test_discarding_twice_gives_the_same_number_and_the_attempt_takes_no_more(tmp_path: Path) -> None:
    world = GatewayWorld(tmp_path, ["one", "two"])

    async def scene(post: Post) -> None:
        await say(world)
        first, second = await post(DISCARD), await post(DISCARD)
        assert first == second == (200, p.Discarded(num_tokens=world.ledger.recorded(ATTEMPT)))
        assert world.ledger.recorded(ATTEMPT) > 0
        status, sealed = await post(SEAL)
        assert (status, isinstance(sealed, Failed) and sealed.reason) == (409, "late")

    play(world, scene)


@pytest.mark.parametrize("call", [OPEN, SEAL, DISCARD])
def test_a_foreign_a_late_and_an_unlike_key_change_nothing_and_are_counted(tmp_path: Path, call: p.AttemptCall) -> None:
    world = GatewayWorld(tmp_path, ["one"])

    async def scene(post: Post) -> None:
        await say(world)
        cases = (
            (call, world.worker_key("wrk_two"), 409, "foreign"),
            (msgspec.structs.replace(call, attempt_id="att_over"), world.worker_key(), 409, "late"),
            (call, world.worker_key(role=Role.SCORER), 401, "foreign"),
            (call, world.worker_key(valid_s=-1.0), 401, "expired"),
            (call, world.key(), 401, "foreign"),
        )
        for number, (asked, key, wanted_status, reason) in enumerate(cases, start=1):
            status, failed = await post(asked, key)
            assert isinstance(failed, Failed)
            assert (status, failed.kind, failed.reason) == (wanted_status, "Refused", reason)
            counts = world.counters.read()
            refused = {name: n for name, n in counts.items() if name.startswith("gateway.attempts.refused.")}
            assert sum(refused.values()) == number
        assert not world.store.is_sealed(ATTEMPT)
        assert len(world.store.open_turns(ATTEMPT)) == 1
        assert (await post(SEAL))[0] == 200, "its holder can still seal it"

    play(world, scene)


def test_unlike_versions_bad_bodies_and_large_ones_are_refused_by_their_kind(tmp_path: Path) -> None:
    world = GatewayWorld(tmp_path, http_limits=HttpLimits(max_body_bytes=1000))

    async def scene(post: Post) -> None:
        answers = [
            await post(OPEN, headers={}),
            await post(OPEN, headers={p.VERSION_HEADER: "2"}),
            await post(b"\xc1"),
            await post(msgspec.msgpack.encode({"call": "open", "attempt_id": ""})),
            await post(msgspec.msgpack.encode({"call": "seal", "attempt_id": "a", "end_reason": "bored"})),
            await post(b"x" * 1001),
        ]
        assert [status for status, _ in answers] == [426, 426, 400, 400, 400, 413]
        kinds = [failed.kind for _, failed in answers if isinstance(failed, Failed)]
        assert kinds == ["ProtocolMismatch"] * 2 + ["InputError"] * 4
        assert "attempt_id" in str(answers[3][1])

    play(world, scene)


def test_the_key_alone_can_be_checked(tmp_path: Path) -> None:
    world = GatewayWorld(tmp_path)

    async def scene(post: Post) -> None:
        assert await post(b"", method="GET") == (200, p.Known(worker_id="wrk_one"))
        assert (await post(b"", key="sk-nothing", method="GET"))[0] == 401

    play(world, scene)


def test_a_body_that_does_not_arrive_is_given_up(tmp_path: Path) -> None:
    world = GatewayWorld(tmp_path, attempt_limits=AttemptLimits(read_deadline_s=0.05))

    async def whole() -> None:
        try:
            url = (await world.server.start()).removesuffix("/v1")
            host, port = url.removeprefix("http://").split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            head = f"POST {p.ATTEMPTS_PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n"
            writer.write(f"{head}{p.VERSION_HEADER}: 1\r\nAuthorization: Bearer {world.worker_key()}\r\n\r\n".encode())
            assert b" 408 " in await asyncio.wait_for(reader.readline(), 20)
            writer.close()
        finally:
            await world.close()

    asyncio.run(whole())
