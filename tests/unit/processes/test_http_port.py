"""One listening port: taken ports are named, long bodies refused, keys read from their header."""

import asyncio
import socket

import aiohttp
import pytest
from aiohttp import web

from steelyard.errors import InputError
from steelyard.processes.http_port import HttpPort, PortOptions, bearer_key


def options(port: int = 0) -> PortOptions:
    return PortOptions(field="test.port", host="127.0.0.1", port=port, max_body_bytes=10, shutdown_s=5.0)


async def echo(request: web.BaseRequest) -> web.Response:
    """The key, then the body; the status where the body is too large."""
    try:
        body = await request.read()
    except web.HTTPRequestEntityTooLarge:
        return web.Response(status=413)
    return web.Response(text=f"{bearer_key(request.headers)} {body.decode()}")


async def ask(url: str, body: bytes, headers: dict[str, str]) -> tuple[int, str]:
    async with (
        asyncio.timeout(20),
        aiohttp.ClientSession() as session,
        session.post(url, data=body, headers=headers) as response,
    ):
        return response.status, await response.text()


@pytest.mark.parametrize(
    ("headers", "key"),
    [
        ({"Authorization": "Bearer abc"}, "abc"),
        ({"Authorization": "bearer  abc "}, "abc"),
        ({"Authorization": "Basic abc"}, "None"),
        ({"Authorization": "Bearer"}, "None"),
        ({}, "None"),
    ],
)
def test_requests_reach_the_answer_with_their_key(headers: dict[str, str], key: str) -> None:
    async def main() -> None:
        port = HttpPort(echo, options())
        url = await port.start()
        try:
            assert await ask(f"{url}/any/path", b"hello", headers) == (200, f"{key} hello")
        finally:
            await port.stop()

    asyncio.run(main())


def test_a_body_beyond_the_limit_is_refused_and_the_port_goes_on() -> None:
    async def main() -> None:
        port = HttpPort(echo, options())
        url = await port.start()
        try:
            assert (await ask(url, b"x" * 11, {}))[0] == 413
            assert (await ask(url, b"x" * 10, {}))[0] == 200
        finally:
            await port.stop()
        with pytest.raises(aiohttp.ClientConnectionError):
            await ask(url, b"", {})

    asyncio.run(main())


def test_a_port_that_is_taken_is_named() -> None:
    async def main(number: int) -> None:
        with pytest.raises(InputError, match=f"test.port: 127.0.0.1:{number} must be free"):
            await HttpPort(echo, options(number)).start()

    with socket.create_server(("127.0.0.1", 0)) as taken:
        asyncio.run(main(taken.getsockname()[1]))
