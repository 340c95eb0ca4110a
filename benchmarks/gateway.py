"""What the gateway adds to a model call, over real HTTP.

A server process holds the gateway, its recorder, trace store and ledger on a real disk, and an engine that
answers each call after a fixed 20 ms. A client process of its own sends calls at fixed times whatever the
answers do (open loop), on kept-alive connections. An attempt makes four calls, each extending the one before
with a tool result, and is then sealed, as in a run. Added time is the client's time for a call, from the first
byte sent to the last byte read, less 20 ms.

    python benchmarks/gateway.py            three runs of 2,000 calls, medians of the three
    python benchmarks/gateway.py --check    the same; exit code 1 below the floor
    python benchmarks/gateway.py --quick    one run of 400 calls
"""

import argparse
import asyncio
import collections
import gc
import json
import multiprocessing
import select
import socket
import statistics
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import uvloop

from steelyard.clock import SystemClock
from steelyard.gateway.app import GatewayServer
from steelyard.gateway.capability import KeyRing
from steelyard.gateway.recorder import Recorder
from steelyard.gateway.renderer import Renderer
from steelyard.gateway.service import Gateway
from steelyard.ids import RandomIds
from steelyard.metrics import Counters
from steelyard.testing.gateway import scripted_result
from steelyard.testing.tokenizer import write_tokenizer
from steelyard.traces.ledger import TokenLedger
from steelyard.traces.store import TraceStore
from steelyard.types import (
    AttemptBinding,
    EndReason,
    FinishReason,
    GenerateRequest,
    GenerateResult,
    Sampling,
    TokenChunk,
)

ENGINE_S = 0.020
CALLS_PER_S = 200.0
TURNS_PER_ATTEMPT = 4
SECRET = b"benchmark".ljust(32, b".")
REPLY = '<tool_call>{"name": "replace_line", "arguments": {"line": 3, "text": "return a - b"}}</tool_call>'
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "replace_line",
            "description": "Replace one line.",
            "parameters": {
                "type": "object",
                "properties": {"line": {"type": "integer"}, "text": {"type": "string"}},
            },
        },
    }
]
QUESTION = "The function add has a bug. Repair it.\n" + "".join(f"{i}: x{i} = f(a, {i})\n" for i in range(1, 25))
RESULT = "line 3 is now: return a - b\n" * 3


def run_engine(calls: socket.socket) -> None:
    """The engine's process: every 8-byte call that comes in goes back out ENGINE_S later."""
    due: collections.deque[tuple[float, bytes]] = collections.deque()
    while True:
        wait_s = max(0.0, due[0][0] - time.perf_counter()) if due else None
        if select.select([calls], [], [], wait_s)[0]:
            data = calls.recv(1 << 16)
            if not data:
                return
            due_s = time.perf_counter() + ENGINE_S
            due.extend((due_s, data[at : at + 8]) for at in range(0, len(data), 8))
        while due and due[0][0] <= time.perf_counter():
            calls.send(due.popleft()[1])


class FixedTimeEngine:
    """Stands for an engine in another process, as engines are, over a Unix socket."""

    def __init__(self, calls: socket.socket, reply: tuple[int, ...], after: Callable[[str], None]) -> None:
        self._calls = calls
        self._reply = reply
        self._after = after
        self._open: dict[bytes, asyncio.Future[None]] = {}
        self._num_calls = 0
        self.took_s: list[float] = []
        calls.setblocking(False)
        asyncio.get_running_loop().add_reader(calls.fileno(), self._answered)

    async def generate(
        self, request: GenerateRequest, on_tokens: Callable[[TokenChunk], None] | None = None
    ) -> GenerateResult:
        began_s = time.perf_counter()
        self._num_calls += 1
        name = self._num_calls.to_bytes(8, "little")
        done = self._open[name] = asyncio.get_running_loop().create_future()
        self._calls.send(name)
        await done
        self.took_s.append(time.perf_counter() - began_s)
        self._after(request.attempt_id)
        return scripted_result(request, self._reply, FinishReason.STOP)

    async def abort(self, request_id: str) -> None:
        raise NotImplementedError(request_id)

    def _answered(self) -> None:
        data = self._calls.recv(1 << 16)
        for at in range(0, len(data), 8):
            self._open.pop(data[at : at + 8]).set_result(None)


class AnyAttempt:
    """Every attempt is alive."""

    def binding(self, attempt_id: str) -> AttemptBinding | None:
        return AttemptBinding(
            policy_version=0,
            sampling=Sampling(max_tokens=128),
            max_context_tokens=1 << 20,
            deadline_at_s=4e9,
        )


async def serve(pipe: Connection, calls: socket.socket, directory: Path) -> None:
    clock, ids, counters = SystemClock(), RandomIds(), Counters()
    renderer = Renderer.load(write_tokenizer(directory / "tokenizer"))
    ledger = TokenLedger(directory / "ledger")
    store = TraceStore(directory / "traces", before_seal=ledger.sync)
    recorder = Recorder(store, ledger, counters, clock)
    num_answered: collections.Counter[str] = collections.Counter()
    seals: set[asyncio.Task[object]] = set()

    def after(attempt_id: str) -> None:
        num_answered[attempt_id] += 1
        if num_answered[attempt_id] == TURNS_PER_ATTEMPT:
            asyncio.get_running_loop().call_later(0.02, seal, attempt_id)

    def seal(attempt_id: str) -> None:
        seals.add(asyncio.create_task(recorder.seal(attempt_id, EndReason.SUBMITTED, (), 0)))

    engine = FixedTimeEngine(calls, (*renderer.codec.encode(REPLY), renderer.end_of_turn_id), after)
    gateway = Gateway(renderer, engine, recorder, AnyAttempt(), ids=ids, clock=clock, counters=counters)
    server = GatewayServer(gateway, KeyRing(SECRET), ids=ids, clock=clock, counters=counters)
    pipe.send(await server.start())
    gc.collect()
    gc.freeze()
    cpu_began_s = time.process_time()
    await asyncio.get_running_loop().run_in_executor(None, pipe.recv)
    await asyncio.sleep(0.1)  # the last attempts seal a moment after their last answer
    sealed = await asyncio.gather(*seals)
    cpu_s = time.process_time() - cpu_began_s
    pipe.send((engine.took_s, len(sealed), cpu_s, counters.read()))
    await server.stop()
    await store.close()


def run_server(pipe: Connection, calls: socket.socket, directory: str) -> None:
    uvloop.run(serve(pipe, calls, Path(directory)))


class CallClient:
    """A bare HTTP/1.1 client, so that what is measured is not the client library."""

    def __init__(self, url: str) -> None:
        host, _, port = url.removeprefix("http://").removesuffix("/v1").partition(":")
        self._address = (host, int(port))
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def post(self, key: str, body: bytes) -> tuple[bytes, float]:
        reader, writer = self._idle.pop() if self._idle else await asyncio.open_connection(*self._address)
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        began_s = time.perf_counter()
        writer.write(head.encode() + body)
        answer = await reader.readuntil(b"\r\n\r\n")
        length = next(line for line in answer.split(b"\r\n") if line.lower().startswith(b"content-length"))
        content = await reader.readexactly(int(length.split(b":")[1]))
        took_s = time.perf_counter() - began_s
        self._idle.append((reader, writer))
        if not answer.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"the gateway answered {answer!r} {content!r}")
        return content, took_s


async def send_calls(url: str, num_calls: int) -> list[float]:
    """Open loop: attempt i makes its turn t at its own fixed time; returns added seconds per call."""
    client, keys = CallClient(url), KeyRing(SECRET)
    added_s: list[float] = []
    num_attempts = num_calls // TURNS_PER_ATTEMPT
    gap_s = TURNS_PER_ATTEMPT / CALLS_PER_S
    turn_gap_s = 0.25 + 1 / CALLS_PER_S
    began_s = time.perf_counter() + 0.2

    async def attempt(index: int) -> None:
        key = keys.issue(f"att_{index}", 4e9)
        messages: list[object] = [
            {"role": "system", "content": "Repair the function with the tools."},
            {"role": "user", "content": f"Task {index}. {QUESTION}"},
        ]
        for turn in range(TURNS_PER_ATTEMPT):
            body = msgspec.json.encode({"model": "policy", "messages": messages, "tools": TOOLS})
            await asyncio.sleep(began_s + index * gap_s + turn * turn_gap_s - time.perf_counter())
            content, took_s = await client.post(key, body)
            added_s.append(took_s - ENGINE_S)
            message = msgspec.json.decode(content)["choices"][0]["message"]
            call_id = message["tool_calls"][0]["id"]
            messages += [message, {"role": "tool", "tool_call_id": call_id, "content": RESULT}]

    await asyncio.gather(*(attempt(index) for index in range(num_attempts)))
    return added_s


def run_client(pipe: Connection, url: str, num_calls: int) -> None:
    pipe.send(uvloop.run(send_calls(url, num_calls)))


def measure(num_calls: int) -> dict[str, float]:
    """One run: milliseconds added at the median and the tail, and what the server used."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as directory:
        server_pipe, server_end = context.Pipe()
        server_calls, engine_calls = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        engine = context.Process(target=run_engine, args=(engine_calls,), daemon=True)
        server = context.Process(target=run_server, args=(server_end, server_calls, directory), daemon=True)
        engine.start()
        server.start()
        server_calls.close()
        url = server_pipe.recv()
        client_pipe, client_end = context.Pipe()
        client = context.Process(target=run_client, args=(client_end, url, num_calls), daemon=True)
        client.start()
        added_s = client_pipe.recv()
        server_pipe.send("stop")
        engine_s, num_sealed, cpu_s, counters = server_pipe.recv()
        client.join(10)
        server.join(10)
        engine.terminate()
    if num_sealed != num_calls // TURNS_PER_ATTEMPT or counters["gateway.segments.first"] != num_sealed:
        raise RuntimeError(f"every attempt must be sealed as one segment, but {num_sealed} were sealed: {counters}")
    ordered = sorted(added_s)
    return {
        "added_p50_ms": 1e3 * statistics.median(ordered),
        "added_p90_ms": 1e3 * ordered[int(0.9 * len(ordered))],
        "added_p99_ms": 1e3 * ordered[int(0.99 * len(ordered))],
        "engine_late_p50_ms": 1e3 * (statistics.median(engine_s) - ENGINE_S),
        "server_cpu_ms_per_call": 1e3 * cpu_s / num_calls,
        "sealed_per_s": num_sealed / (num_calls / CALLS_PER_S),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit with 1 if the floor is not reached")
    parser.add_argument("--quick", action="store_true", help="one short run")
    options = parser.parse_args()
    runs = [measure(400)] if options.quick else [measure(2000) for _ in range(3)]
    result = {name: round(statistics.median(run[name] for run in runs), 3) for name in runs[0]}
    floor = tomllib.loads((Path(__file__).parent / "floors.toml").read_text())["gateway"]
    result["floor_added_p50_ms"] = floor["max_added_p50_ms"]
    print(json.dumps(result, indent=2))
    return int(options.check and result["added_p50_ms"] > floor["max_added_p50_ms"])


if __name__ == "__main__":
    sys.exit(main())
