import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest

from steelyard.errors import DeadlineExceeded, Refused, RemoteFailed
from steelyard.processes.channel import Client, Endpoint, Server, StreamingEndpoint


class Word(msgspec.Struct, frozen=True):
    text: str


ECHO = Endpoint("echo", Word, Word)
SPELL = StreamingEndpoint("spell", Word, Word, Word)


def with_server(
    directory: Path, prepare: Callable[[Server], None], use: Callable[[Client, Server], Awaitable[None]]
) -> None:
    async def run() -> None:
        server = Server()
        prepare(server)
        await server.serve(directory / "s")
        client = await Client.connect(directory / "s", name="peer", deadline_s=5)
        try:
            await use(client, server)
        finally:
            await client.close()
            await server.close()

    asyncio.run(run())


async def echo(word: Word) -> Word:
    return word


async def refuse(word: Word) -> Word:
    raise Refused("late", word.text)


async def break_down(word: Word) -> Word:
    raise ZeroDivisionError(word.text)


async def never(word: Word) -> Word:
    await asyncio.Event().wait()
    return word


def test_a_call_returns_the_reply_and_many_calls_run_side_by_side(tmp_path: Path) -> None:
    async def use(client: Client, _server: Server) -> None:
        words = [Word(str(number)) for number in range(50)]
        assert await asyncio.gather(*(client.call(ECHO, word, deadline_s=5) for word in words)) == words

    with_server(tmp_path, lambda server: server.handle(ECHO, echo), use)


def test_events_arrive_in_order_before_the_reply(tmp_path: Path) -> None:
    async def spell(word: Word, emit: Callable[[Word], None]) -> Word:
        for letter in word.text:
            emit(Word(letter))
        return word

    async def use(client: Client, _server: Server) -> None:
        letters: list[str] = []
        reply = await client.call_streaming(SPELL, Word("abc"), lambda w: letters.append(w.text), deadline_s=5)
        assert (reply.text, letters) == ("abc", ["a", "b", "c"])

    with_server(tmp_path, lambda server: server.handle_streaming(SPELL, spell), use)


def test_a_refusal_keeps_its_reason_and_other_failures_name_the_method(tmp_path: Path) -> None:
    async def use_refusal(client: Client, _server: Server) -> None:
        with pytest.raises(Refused) as caught:
            await client.call(ECHO, Word("att_1"), deadline_s=5)
        assert (caught.value.reason, caught.value.detail) == ("late", "att_1")

    async def use_failure(client: Client, _server: Server) -> None:
        with pytest.raises(RemoteFailed, match="echo at peer failed with ZeroDivisionError: x"):
            await client.call(ECHO, Word("x"), deadline_s=5)

    with_server(tmp_path / "", lambda server: server.handle(ECHO, refuse), use_refusal)
    (tmp_path / "s").unlink(missing_ok=True)
    with_server(tmp_path, lambda server: server.handle(ECHO, break_down), use_failure)


def test_an_unknown_method_is_an_error_and_not_a_hang(tmp_path: Path) -> None:
    async def use(client: Client, _server: Server) -> None:
        with pytest.raises(RemoteFailed, match="no endpoint is named 'echo'"):
            await client.call(ECHO, Word("x"), deadline_s=5)

    with_server(tmp_path, lambda _server: None, use)


def test_a_call_out_of_time_names_the_culprit_and_is_cancelled_on_the_other_side(tmp_path: Path) -> None:
    cancelled = asyncio.Event()

    async def hang(word: Word) -> Word:
        try:
            return await never(word)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async def use(client: Client, _server: Server) -> None:
        with pytest.raises(DeadlineExceeded, match="echo at peer; still missing: peer"):
            await client.call(ECHO, Word("x"), deadline_s=0.01)
        await asyncio.wait_for(cancelled.wait(), 5)

    with_server(tmp_path, lambda server: server.handle(ECHO, hang), use)


def test_pending_calls_fail_at_once_when_the_server_goes(tmp_path: Path) -> None:
    started = asyncio.Event()

    async def hang(word: Word) -> Word:
        started.set()
        return await never(word)

    async def use(client: Client, server: Server) -> None:
        call = asyncio.create_task(client.call(ECHO, Word("x"), deadline_s=60))
        await asyncio.wait_for(started.wait(), 5)
        closing = asyncio.create_task(server.close())
        with pytest.raises(RemoteFailed, match="connection to peer ended"):
            await asyncio.wait_for(call, 5)
        await closing

    with_server(tmp_path, lambda server: server.handle(ECHO, hang), use)


def test_rubbish_on_the_socket_ends_that_connection_alone(tmp_path: Path) -> None:
    async def use(client: Client, _server: Server) -> None:
        for rubbish in (b"\xff\xff\xff\xff", b"\x00\x00\x00\x03abc", b"\x00\x00"):
            reader, writer = await asyncio.open_unix_connection(str(tmp_path / "s"))
            writer.write(rubbish)
            writer.write_eof()
            assert await asyncio.wait_for(reader.read(), 5) == b""
            writer.close()
        assert await client.call(ECHO, Word("still here"), deadline_s=5) == Word("still here")

    with_server(tmp_path, lambda server: server.handle(ECHO, echo), use)


def test_a_cancellation_that_meets_its_reply_ends_the_caller(tmp_path: Path) -> None:
    # Event and reply arrive together. The cancellation comes between the reply and the caller's next turn.
    async def answer_at_once(request: Word, emit: Callable[[Word], None]) -> Word:
        emit(request)
        return request

    async def use(client: Client, _server: Server) -> None:
        loop = asyncio.get_running_loop()
        went_on = False

        def cancel_soon(_: Word) -> None:
            loop.call_soon(asking.cancel)

        async def ask() -> None:
            nonlocal went_on
            await client.call_streaming(SPELL, Word("x"), cancel_soon, deadline_s=5)
            went_on = True

        asking = asyncio.create_task(ask())
        await asyncio.wait({asking})
        assert asking.cancelled()
        assert not went_on

    with_server(tmp_path, lambda server: server.handle_streaming(SPELL, answer_at_once), use)


def test_a_handler_that_misses_a_key_is_not_taken_for_a_missing_endpoint(tmp_path: Path) -> None:
    async def look_up(request: Word) -> Word:
        raise KeyError(request.text)

    async def use(client: Client, _server: Server) -> None:
        with pytest.raises(RemoteFailed, match="failed with KeyError"):
            await client.call(ECHO, Word("x"), deadline_s=5)

    with_server(tmp_path, lambda server: server.handle(ECHO, look_up), use)


def test_each_call_passes_a_fault_point_before_and_after_its_handler(tmp_path: Path) -> None:
    points: list[str] = []

    async def run() -> None:
        server = Server(points.append)
        server.handle(ECHO, echo)
        await server.serve(tmp_path / "s")
        client = await Client.connect(tmp_path / "s", name="server", deadline_s=5)
        await client.call(ECHO, Word("x"), deadline_s=5)
        await client.close()
        await server.close()

    asyncio.run(run())
    assert points == ["call:echo", "reply:echo"]
