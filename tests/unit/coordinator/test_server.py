"""The server over plain HTTP: keys, versions, limits, and messages that are none."""

import asyncio
import socket
from collections.abc import Callable, Mapping
from typing import Any

import aiohttp
import msgspec
import pytest

from steelyard.coordinator import protocol as p
from steelyard.coordinator.capability import CapabilityRing, Role
from steelyard.coordinator.events import Running
from steelyard.coordinator.server import CoordinatorServer, ServerLimits
from steelyard.errors import InputError, JournalFenced, StorageFailed
from steelyard.metrics import Counters
from steelyard.processes.http_failures import Failed
from steelyard.testing.coordinator_server import ServedRig, serve
from steelyard.testing.manual_clock import settle
from steelyard.testing.run_rig import SCORER, WORKER, RunRig

HEARTBEAT = p.HeartbeatCall(attempt_ids=())


def request_of(*calls: p.Call, session_id: str = "ses_test", first: int = 0) -> bytes:
    numbered = tuple(p.NumberedCall(sequence=first + index, call=call) for index, call in enumerate(calls))
    return msgspec.msgpack.encode(p.CallRequest(session_id=session_id, answered_below=0, calls=numbered))


async def post(
    served: ServedRig, body: bytes, *, headers: Mapping[str, str | None] | None = None, path: str = p.CALLS_PATH
) -> tuple[int, Any]:
    """Status, and the decoded body of an answer."""
    sent = {
        "Authorization": f"Bearer {served.key(Role.WORKER, WORKER)}",
        p.VERSION_HEADER: str(p.PROTOCOL_VERSION),
        **(headers or {}),
    }
    present = {name: value for name, value in sent.items() if value is not None}
    async with (
        aiohttp.ClientSession() as http,
        http.post(served.proxy.upstream + path, data=body, headers=present) as response,
    ):
        data = await response.read()
        kind = p.CallReply if response.status == 200 else Failed
        return response.status, msgspec.msgpack.decode(data, type=kind)


def results(reply: p.CallReply) -> list[Any]:
    return [answer.result for answer in reply.answers]


def test_health_needs_no_key_and_names_the_version() -> None:
    async def scene(served: ServedRig) -> None:
        async with aiohttp.ClientSession() as http, http.get(served.proxy.upstream + p.HEALTH_PATH) as response:
            assert (response.status, await response.json()) == (200, {"status": "ok", "protocol": p.PROTOCOL_VERSION})

    serve(scene)


def test_calls_are_answered_in_order_each_by_itself() -> None:
    async def scene(served: ServedRig) -> None:
        calls = (
            p.LeaseCall(max_leases=1, wait_s=0.0),
            p.StartCall(attempt_id="att_unknown", attempt_number=1),
            p.HeartbeatCall(attempt_ids=("att_unknown",)),
        )
        _, reply = await post(served, request_of(*calls, first=5))
        assert [answer.sequence for answer in reply.answers] == [5, 6, 7]
        leased, refused, lost = results(reply)
        assert len(leased.leases) == 1
        assert (refused.kind, refused.reason) == ("Refused", "unknown")
        assert lost == p.Lost(attempt_ids=("att_unknown",))

    serve(scene)


def test_the_same_number_gets_the_same_answer_and_another_call_under_it_is_refused() -> None:
    async def scene(served: ServedRig) -> None:
        body = request_of(p.LeaseCall(max_leases=1, wait_s=0.0))
        (_, first), (_, second) = await asyncio.gather(post(served, body), post(served, body))
        assert first == second == (await post(served, body))[1]
        assert served.counters.read()["coordinator.repeated"] == 2
        _, other = await post(served, request_of(HEARTBEAT))
        assert results(other)[0].reason == "double"
        _, elsewhere = await post(served, request_of(p.LeaseCall(max_leases=1, wait_s=0.0), session_id="ses_other"))
        # Another session does not know of the answer to the first one: the lease is handed out again.
        assert results(elsewhere) == results(first)

    serve(scene)


@pytest.mark.parametrize(
    ("authorization", "reason"),
    [(None, "unknown"), ("Basic x", "unknown"), ("Bearer stc-worker.wrk_rig.9999999999.x", "foreign"), ("", "unknown")],
)
def test_who_has_no_key_of_ours_is_answered_401_and_counted(authorization: str | None, reason: str) -> None:
    async def scene(served: ServedRig) -> None:
        status, failed = await post(served, request_of(HEARTBEAT), headers={"Authorization": authorization})
        assert (status, failed.kind, failed.reason) == (401, "Refused", reason)
        counts = served.counters.read()
        assert (counts[f"coordinator.key.{reason}"], counts["coordinator.http.401"]) == (1, 1)

    serve(scene)


def test_an_expired_key_is_answered_401() -> None:
    async def scene(served: ServedRig) -> None:
        key = served.keys.issue(Role.WORKER, WORKER, served.rig.clock.now_s() - 1)
        status, failed = await post(served, request_of(HEARTBEAT), headers={"Authorization": f"Bearer {key}"})
        assert (status, failed.reason) == (401, "expired")

    serve(scene)


@pytest.mark.parametrize("role", [Role.SCORER, Role.TRAINER, Role.OPERATOR])
def test_a_call_of_another_role_is_answered_403_and_nothing_of_the_request_is_done(role: Role) -> None:
    async def scene(served: ServedRig) -> None:
        headers = {"Authorization": f"Bearer {served.key(role, SCORER)}"}
        calls = (p.LeaseScoresCall(max_jobs=1, wait_s=0.0), p.LeaseCall(max_leases=1, wait_s=0.0))
        num_events = served.rig.coordinator.state.num_events
        status, failed = await post(served, request_of(*calls), headers=headers)
        assert (status, failed.kind, failed.reason) == (403, "Refused", "foreign")
        assert served.rig.coordinator.state.num_events == num_events
        assert served.counters.read()["coordinator.key.role"] == 1

    serve(scene)


@pytest.mark.parametrize(("version", "said"), [("1", "speaks version 1"), (None, "names none"), ("x", "version x")])
def test_an_unlike_version_is_refused_with_both_named(version: str | None, said: str) -> None:
    async def scene(served: ServedRig) -> None:
        status, failed = await post(served, request_of(HEARTBEAT), headers={p.VERSION_HEADER: version})
        assert (status, failed.kind) == (426, "ProtocolMismatch")
        assert f"speaks version {p.PROTOCOL_VERSION}" in failed.message
        assert said in failed.message

    serve(scene)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        b"not msgpack at all",
        msgspec.msgpack.encode([1, 2]),
        msgspec.msgpack.encode({"session_id": "s", "answered_below": 0, "calls": [{"sequence": 0, "call": {}}]}),
        request_of(HEARTBEAT)[:-1],
        request_of(HEARTBEAT) + b"\x00",
        request_of(p.LeaseCall(max_leases=1, wait_s=0.0), p.LeaseCall(max_leases=1, wait_s=float("inf"))),
    ],
)
def test_a_body_that_is_no_request_is_answered_400_and_changes_nothing(body: bytes) -> None:
    async def scene(served: ServedRig) -> None:
        num_events = served.rig.coordinator.state.num_events
        status, failed = await post(served, body)
        assert (status, failed.kind) == (400, "InputError")
        assert served.counters.read() == {"coordinator.http.400": 1}
        assert served.rig.coordinator.state.num_events == num_events
        assert (await post(served, request_of(HEARTBEAT)))[0] == 200

    serve(scene)


def test_a_body_that_is_too_large_is_answered_413() -> None:
    async def scene(served: ServedRig) -> None:
        status, failed = await post(served, request_of(p.HeartbeatCall(attempt_ids=("x" * 100,) * 20)))
        assert (status, failed.message) == (413, "the body must be at most 1000 bytes")

    serve(scene, limits=ServerLimits(max_body_bytes=1000))


def test_a_body_that_does_not_come_is_answered_408() -> None:
    async def scene(served: ServedRig) -> None:
        host, port = served.proxy.upstream.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        version = f"{p.VERSION_HEADER}: {p.PROTOCOL_VERSION}\r\n"
        head = f"POST {p.CALLS_PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n{version}"
        writer.write(f"{head}Authorization: Bearer {served.key(Role.WORKER, WORKER)}\r\n\r\n".encode())
        assert b" 408 " in await reader.readline()
        writer.close()

    serve(scene, limits=ServerLimits(read_deadline_s=0.05))


def test_an_unknown_place_is_answered_404_with_those_that_there_are() -> None:
    async def scene(served: ServedRig) -> None:
        status, failed = await post(served, request_of(HEARTBEAT), path="/v1/call")
        assert (status, failed.kind) == (404, "InputError")
        assert p.CALLS_PATH in failed.message

    serve(scene)


def test_a_poll_ends_at_the_longest_wait_of_the_server() -> None:
    async def scene(served: ServedRig) -> None:
        _, reply = await post(served, request_of(p.LeaseCall(max_leases=1000, wait_s=0.0)))
        assert results(reply)[0].leases
        wait = request_of(p.LeaseCall(max_leases=1, wait_s=1e9, unstarted=attempts(reply)), first=1)
        _, empty = await post(served, wait)
        assert results(empty) == [p.Leased(leases=())]

    serve(scene, limits=ServerLimits(max_wait_s=0.0))


def attempts(reply: p.CallReply) -> tuple[str, ...]:
    return tuple(lease.attempt_id for lease in results(reply)[0].leases)


def test_a_client_that_leaves_does_not_undo_its_call() -> None:
    async def scene(served: ServedRig) -> None:
        (lease,) = results((await post(served, request_of(p.LeaseCall(max_leases=1, wait_s=0.0))))[1])[0].leases
        started = request_of(p.StartCall(attempt_id=lease.attempt_id, attempt_number=1), first=1)
        served.journal.hold()
        gone = asyncio.create_task(post(served, started))
        await served.journal.waiting.wait()
        gone.cancel()
        await asyncio.wait([gone])
        served.journal.release()
        _, reply = await post(served, started)
        assert results(reply) == [p.Done()]
        assert served.counters.read()["coordinator.repeated"] == 1

    serve(scene)


async def until(holds: Callable[[], bool]) -> None:
    while not holds():
        await settle()


def renewed_until_s(served: ServedRig, attempt_id: str) -> float:
    lease = served.rig.coordinator.live_lease(attempt_id)
    return lease.expires_at_s if lease is not None else 0.0


def test_nothing_is_answered_before_its_commit_neither_a_repetition_nor_a_read() -> None:
    async def scene(served: ServedRig) -> None:
        (lease,) = results((await post(served, request_of(p.LeaseCall(max_leases=1, wait_s=0.0))))[1])[0].leases
        started = request_of(p.StartCall(attempt_id=lease.attempt_id, attempt_number=1), first=1)
        heartbeat = p.HeartbeatCall(attempt_ids=(lease.attempt_id,))
        served.journal.hold()
        first = asyncio.create_task(post(served, started))
        await served.journal.waiting.wait()
        again = asyncio.create_task(post(served, started))
        await until(lambda: served.counters.read().get("coordinator.repeated") == 1)
        served.rig.clock.advance(1.0)
        read = asyncio.create_task(post(served, request_of(heartbeat, session_id="ses_other")))
        await until(lambda: renewed_until_s(served, lease.attempt_id) > lease.expires_at_s)
        assert not any(task.done() for task in (first, again, read))
        served.journal.release()
        answers = await asyncio.gather(first, again, read)
        assert [results(reply) for _, reply in answers] == [[p.Done()], [p.Done()], [p.Lost(attempt_ids=())]]
        assert sum(isinstance(event, Running) for event in await served.rig.journal.replay()) == 1

    serve(scene)


def test_a_server_that_stops_tells_those_who_wait_for_a_commit_to_come_again() -> None:
    async def scene(served: ServedRig) -> None:
        (lease,) = results((await post(served, request_of(p.LeaseCall(max_leases=1, wait_s=0.0))))[1])[0].leases
        started = request_of(p.StartCall(attempt_id=lease.attempt_id, attempt_number=1), first=1)
        served.journal.hold()
        waiting = asyncio.create_task(post(served, started))
        await served.journal.waiting.wait()
        restarting = asyncio.create_task(served.restart())
        status, failed = await waiting
        assert (status, failed.kind) == (503, "RunError")
        assert failed.message == "the coordinator stops before the commit of a call: come again"
        served.journal.release()
        await restarting
        assert results((await post(served, started))[1]) == [p.Done()]

    serve(scene, limits=ServerLimits(shutdown_s=600.0, answer_deadline_s=600.0))


@pytest.mark.parametrize("failure", [StorageFailed("the disk is full"), JournalFenced("taken over")])
def test_no_answer_is_final_once_the_journal_has_failed(failure: StorageFailed) -> None:
    async def scene(served: ServedRig) -> None:
        (lease,) = results((await post(served, request_of(p.LeaseCall(max_leases=1, wait_s=0.0))))[1])[0].leases
        served.journal.refuse(failure)
        calls: tuple[p.Call, ...] = (p.StartCall(attempt_id=lease.attempt_id, attempt_number=1), HEARTBEAT)
        for first, call in enumerate(calls, start=1):
            status, failed = await post(served, request_of(call, first=first))
            assert (status, failed.kind, failed.message) == (503, type(failure).__name__, str(failure))

    with pytest.raises(type(failure)):
        serve(scene)


def test_a_port_in_use_is_bad_input_that_names_it() -> None:
    async def scene() -> None:
        rig = await RunRig().start()
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            server = CoordinatorServer(
                rig.coordinator, CapabilityRing(b"k" * 32), clock=rig.clock, counters=Counters(), port=port
            )
            with pytest.raises(InputError, match=rf"coordinator\.port: 127\.0\.0\.1:{port} must be free"):
                await server.start()
        await rig.coordinator.close()

    asyncio.run(scene())


def test_an_answer_that_is_longer_than_a_writers_buffer_arrives_whole() -> None:
    async def scene(served: ServedRig) -> None:
        _, reply = await post(served, request_of(p.LeaseCall(max_leases=1000, wait_s=0.0)))
        assert len(msgspec.msgpack.encode(reply)) > 64 << 10
        assert len(set(attempts(reply))) == 400

    serve(scene, groups_per_batch=25, group_size=8)
