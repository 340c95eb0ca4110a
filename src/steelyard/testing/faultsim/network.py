"""A network that delays, loses, doubles and reorders datagrams, and calls on top of it that try again.

A call is sent again until it is answered, so that each request arrives at least once, or never; nothing here filters
repetitions. Requests and answers cross as msgpack: no object is ever shared between two processes.
"""

import asyncio
import contextvars
import random
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple

import msgspec

from steelyard.errors import (
    DeadlineExceeded,
    EngineError,
    IllegalTransition,
    IntegrityError,
    Refused,
    RemoteFailed,
    SteelyardError,
)
from steelyard.testing.faultsim.loop import OWNER, VirtualLoop
from steelyard.testing.faultsim.processes import Life
from steelyard.types import Record

_PASSED_ON: dict[str, type[SteelyardError]] = {
    error.__name__: error for error in (IllegalTransition, IntegrityError, EngineError)
}


class Weather(Record, frozen=True, kw_only=True):
    """How bad the network is. Fractions of datagrams; delays in seconds, exponential around the mean."""

    loss_frac: float = 0.0
    double_frac: float = 0.0
    mean_delay_s: float = 0.002
    slow_frac: float = 0.0
    slow_s: float = 5.0


FAIR = Weather()


class Packet(Record, frozen=True, kw_only=True):
    """One datagram. ``number`` joins an answer to its request; ``error`` names the type of a failed answer."""

    source: str
    number: int
    method: str
    body: bytes
    is_answer: bool = False
    error: str = ""


_ENCODE = msgspec.msgpack.Encoder().encode
_DECODE_PACKET = msgspec.msgpack.Decoder(Packet).decode


class Network:
    """Carries packets between names. ``weather`` and ``cut`` may be changed at any time."""

    def __init__(self, loop: VirtualLoop, draw: random.Random) -> None:
        self.weather = FAIR
        self.cut: set[frozenset[str]] = set()
        self._loop = loop
        self._draw = draw
        self._receivers: dict[str, tuple[Life, Callable[[bytes], None]]] = {}
        self._outside = contextvars.copy_context()
        self._outside.run(OWNER.set, None)

    def attach(self, life: Life, receive: Callable[[bytes], None]) -> None:
        """From now on packets to the name of ``life`` go to it."""
        self._receivers[life.name] = (life, receive)

    def send(self, source: str, target: str, data: bytes) -> None:
        """Send one datagram; it may arrive never, once or twice, and after others that were sent later."""
        weather, draw = self.weather, self._draw
        copies = 2 if draw.random() < weather.double_frac else 1
        for _ in range(copies):
            delay_s = draw.expovariate(1.0 / weather.mean_delay_s)
            if draw.random() < weather.slow_frac:
                delay_s += draw.uniform(0.0, weather.slow_s)
            if draw.random() >= weather.loss_frac:
                self._loop.call_later(delay_s, self._arrive, source, target, data, context=self._outside)

    def _arrive(self, source: str, target: str, data: bytes) -> None:
        if frozenset((source, target)) in self.cut or target not in self._receivers:
            return
        life, receive = self._receivers[target]
        life.deliver(receive, data)


class Method(NamedTuple):
    """One thing that a server does. ``act`` gets the decoded arguments."""

    arguments: Any
    act: Callable[..., Awaitable[Any]]


class Server:
    """Answers calls: each request that arrives is carried out, however often it came before.

    Args:
        on_failure: told of errors that the process cannot go on after.
    """

    def __init__(
        self,
        life: Life,
        network: Network,
        methods: Mapping[str, Method],
        on_failure: Callable[[BaseException], None],
        on_request: Callable[[Packet], None],
    ) -> None:
        self._life = life
        self._network = network
        self._methods = methods
        self._decoders = {name: msgspec.msgpack.Decoder(method.arguments) for name, method in methods.items()}
        self._on_failure = on_failure
        self._on_request = on_request
        network.attach(life, self._receive)

    def _receive(self, data: bytes) -> None:
        packet = _DECODE_PACKET(data)
        self._on_request(packet)
        self._life.spawn(self._serve(packet), f"{packet.method} for {packet.source}")

    async def _serve(self, packet: Packet) -> None:
        error = ""
        try:
            result = await self._methods[packet.method].act(*self._decoders[packet.method].decode(packet.body))
        except Refused as refused:
            error, result = "Refused", (refused.reason, refused.detail)
        except SteelyardError as failure:
            error, result = type(failure).__name__, str(failure)
            self._on_failure(failure)
        except Exception as failure:  # noqa: BLE001 (a server must not die silently: this is a finding)
            self._on_failure(failure)
            return
        answer = Packet(
            source=self._life.name, number=packet.number, method=packet.method, body=_ENCODE(result),
            is_answer=True, error=error,
        )  # fmt: skip
        self._network.send(self._life.name, packet.source, _ENCODE(answer))


class Caller:
    """Calls one server, again and again until it answers.

    Args:
        retry_s: how long one sending may remain unanswered, beyond what the call itself may wait.
        give_up_s: after so long without an answer the call fails.
    """

    def __init__(self, life: Life, network: Network, server: str, *, retry_s: float, give_up_s: float) -> None:
        self._life = life
        self._network = network
        self._server = server
        self._retry_s = retry_s
        self._give_up_s = give_up_s
        self._num_calls = 0
        self._waiting: dict[int, asyncio.Future[Packet]] = {}
        network.attach(life, self._receive)

    async def call(self, method: str, arguments: tuple[Any, ...], result: Any = None, wait_s: float = 0.0) -> Any:
        """Have ``method`` carried out at least once; returns its answer, decoded as ``result``.

        Args:
            wait_s: how long the server itself may wait.

        Raises:
            Refused, IllegalTransition, IntegrityError, EngineError: the server said so.
            RemoteFailed: it failed otherwise.
            DeadlineExceeded: there was no answer.
        """
        self._num_calls += 1
        # A number is used once by all lives of a process together: a late answer must not meet another question.
        number = self._life.number * 1_000_000 + self._num_calls
        request = Packet(source=self._life.name, number=number, method=method, body=_ENCODE(arguments))
        loop = asyncio.get_running_loop()
        ends_at, data = loop.time() + wait_s + self._give_up_s, _ENCODE(request)
        waiter = self._waiting[number] = loop.create_future()
        try:
            while loop.time() < ends_at:
                self._network.send(self._life.name, self._server, data)
                await asyncio.wait((waiter,), timeout=wait_s + self._retry_s)
                if waiter.done():
                    return _unpack(waiter.result(), result)
        finally:
            del self._waiting[number]
        raise DeadlineExceeded(f"an answer to {method}", (self._server,), wait_s + self._give_up_s)

    def _receive(self, data: bytes) -> None:
        packet = _DECODE_PACKET(data)
        waiter = self._waiting.get(packet.number)
        if waiter is not None and not waiter.done():
            waiter.set_result(packet)


def _unpack(packet: Packet, result: Any) -> Any:
    if packet.error == "Refused":
        reason, detail = msgspec.msgpack.decode(packet.body, type=tuple[str, str])
        raise Refused(reason, detail)
    if packet.error:
        detail = msgspec.msgpack.decode(packet.body, type=str)
        if (kind := _PASSED_ON.get(packet.error)) is not None:
            raise kind(detail)
        raise RemoteFailed(f"{packet.method}: {packet.error}: {detail}")
    return msgspec.msgpack.decode(packet.body, type=result)
