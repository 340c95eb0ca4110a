"""The host's end, against a supervisor that is played by the test."""

import asyncio
import socket
from collections.abc import Awaitable, Callable

import pytest

from steelyard.errors import SandboxLost
from steelyard.sandbox import inside
from steelyard.sandbox.connection import ConnectedSandbox
from steelyard.types import SandboxCall, SandboxStatus

CALL = SandboxCall(program=b"print(1)", stdin=b"in", deadline_s=5.0)


class Rig:
    """A sandbox whose other end is ``peer``; ``gone`` is done when it is closed."""

    def __init__(self, grace_s: float = 60.0, is_host_alive: bool = True) -> None:
        ours, self.peer = socket.socketpair()
        self.peer.setblocking(False)
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.num_ends = 0
        self.sandbox = ConnectedSandbox(ours, self.gone, self.end, lambda: is_host_alive, grace_s)

    async def end(self) -> None:
        self.num_ends += 1
        if not self.gone.done():
            self.gone.set_result(None)

    async def request(self) -> tuple[bytes, float, bytes, bytes]:
        head = await self._read(inside.REQUEST.size)
        operation, deadline_s, num_first, num_second = inside.REQUEST.unpack(head)
        return operation, deadline_s, await self._read(num_first), await self._read(num_second)

    async def reply(self, status: int, returncode: int, first: bytes, second: bytes) -> None:
        head = inside.REPLY.pack(status, returncode, 0.25, len(first), len(second))
        await asyncio.get_running_loop().sock_sendall(self.peer, head + first + second)

    async def _read(self, num_bytes: int) -> bytes:
        data = b""
        while len(data) < num_bytes:
            data += await asyncio.get_running_loop().sock_recv(self.peer, num_bytes - len(data))
        return data


def run(body: Callable[[], Awaitable[Rig]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(60):
            rig = await body()
        await rig.sandbox.close()
        rig.peer.close()

    asyncio.run(main())


def test_a_call_is_sent_whole_and_its_reply_read_whole() -> None:
    async def body() -> Rig:
        rig = Rig()
        running = asyncio.create_task(rig.sandbox.run(CALL))
        assert await rig.request() == (inside.RUN, 5.0, b"print(1)", b"in")
        await rig.reply(inside.OUTPUT_LIMIT, -9, b"x" * 300_000, b"err")
        result = await running
        assert (result.status, result.returncode, result.duration_s) == (SandboxStatus.OUTPUT_LIMIT, -9, 0.25)
        assert (result.stdout, result.stderr) == (b"x" * 300_000, b"err")
        return rig

    run(body)


def test_no_reply_within_the_grace_is_a_fault_of_the_system() -> None:
    async def body() -> Rig:
        rig = Rig(grace_s=0.0)
        with pytest.raises(SandboxLost, match="no reply within 0 s") as caught:
            await rig.sandbox.run(SandboxCall(program=b"", deadline_s=0.0))
        assert not caught.value.is_by_program
        with pytest.raises(SandboxLost, match="no reply"):
            await rig.sandbox.write_file("x", b"")
        return rig

    run(body)


@pytest.mark.parametrize("is_host_alive", [True, False])
def test_an_end_in_mid_run_is_the_programs_doing_only_if_the_host_stands(is_host_alive: bool) -> None:
    async def body() -> Rig:
        rig = Rig(is_host_alive=is_host_alive)
        running = asyncio.create_task(rig.sandbox.run(CALL))
        await rig.request()
        rig.peer.close()
        await rig.end()
        if is_host_alive:
            result = await running
            assert (result.status, result.returncode, result.stdout) == (SandboxStatus.KILLED, None, b"")
        else:
            with pytest.raises(SandboxLost, match="by the system"):
                await running
        return rig

    run(body)


def test_an_end_between_runs_is_never_the_programs_doing() -> None:
    async def body() -> Rig:
        rig = Rig()
        rig.peer.close()
        await rig.end()
        with pytest.raises(SandboxLost) as caught:
            await rig.sandbox.read_file("x")
        assert not caught.value.is_by_program
        return rig

    run(body)


def test_a_second_request_at_the_same_time_is_refused() -> None:
    async def body() -> Rig:
        rig = Rig()
        running = asyncio.create_task(rig.sandbox.run(CALL))
        await rig.request()
        with pytest.raises(RuntimeError, match="one at a time"):
            await rig.sandbox.read_file("x")
        await rig.reply(inside.OK, 0, b"", b"")
        assert (await running).status is SandboxStatus.OK
        return rig

    run(body)


def test_a_run_that_somebody_waits_for_ends_when_the_sandbox_is_closed() -> None:
    async def body() -> Rig:
        rig = Rig()
        running = asyncio.create_task(rig.sandbox.run(CALL))
        await rig.request()
        await rig.sandbox.close()
        with pytest.raises(SandboxLost, match="was closed"):
            await running
        return rig

    run(body)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/etc/passwd", "a\0b"])
def test_a_name_with_directories_is_refused(name: str) -> None:
    async def body() -> Rig:
        rig = Rig()
        with pytest.raises(ValueError, match="plain"):
            await rig.sandbox.write_file(name, b"")
        return rig

    run(body)


def test_a_supervisor_that_cannot_set_itself_up_says_why() -> None:
    async def body() -> Rig:
        rig = Rig()
        await rig.reply(inside.REFUSED, 0, b"", b"mount a tmpfs at /box: Operation not permitted")
        with pytest.raises(SandboxLost, match="Operation not permitted"):
            await rig.sandbox.wait_ready(60.0)
        return rig

    run(body)
