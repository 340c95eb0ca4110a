"""What the gateway adds to a model call, and how many calls it takes in, over real HTTP.

Three processes. The gateway, with its recorder, trace store and ledger on a real disk, is pinned to one core and
reaches its engine as in a run, over a Unix socket. On the other core are a client on kept-alive connections and a
trivial upstream, which answers a call at once with 15 KB of ids and log-probabilities; it is also an HTTP server of
its own, which answers the same to whoever calls it directly.

An attempt makes four calls, each extending the one before with our tool call and its result, and is then sealed, as in
a run. System prompt and tools are those of all attempts; question and tool results are new in every call, and are
pieces of real program text, for a tokenizer trained on such text. With the first of two loads a call brings 512 bytes
of new text, and its body has 4 KB in the mean; with the second it brings 4 KB.

    steady      300 calls/s at fixed times whatever the answers do, gateway and direct in turn; what is added to the
                direct call's median and 99th percentile
    saturation  16, 64 and 256 calls in flight, each answered call followed by the next; calls answered per second,
                CPU time of the gateway's process for a call, and the share of its core that the process got

    python benchmarks/gateway.py            three rounds, medians of the three
    python benchmarks/gateway.py --check    the same; exit code 1 below a floor
    python benchmarks/gateway.py --quick    one short round
"""

import argparse
import asyncio
import collections
import functools
import itertools
import json
import multiprocessing
import os
import random
import statistics
import sys
import sysconfig
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import uvloop

from steelyard.clock import SystemClock
from steelyard.gateway.app import GatewayServer
from steelyard.gateway.capability import KeyRing
from steelyard.gateway.codec import TokenCodec
from steelyard.gateway.recorder import Recorder
from steelyard.gateway.renderer import Renderer
from steelyard.gateway.service import Gateway
from steelyard.ids import RandomIds
from steelyard.inference.client import ClientDeadlines, EngineClient
from steelyard.metrics import Counters
from steelyard.processes.channel import Client
from steelyard.processes.garbage import collect_rarely
from steelyard.testing.gateway_load import CALL, SECRET, TURNS_PER_ATTEMPT, Agent, Agents, Load
from steelyard.testing.tokenizer import write_tokenizer
from steelyard.testing.trivial_upstream import HttpConnection, TrivialUpstream
from steelyard.traces.ledger import TokenLedger
from steelyard.traces.store import TraceStore
from steelyard.types import (
    AttemptBinding,
    EndReason,
    GenerateRequest,
    GenerateResult,
    Sampling,
    TokenChunk,
)

STEADY_CALLS_PER_S = 300.0
TURN_GAP_S = 0.25
IN_FLIGHT = (16, 64, 256)
NUM_SAMPLED_TOKENS = 765
VOCAB_SIZE = 16_384
STALL_S = 60.0
"""For so long not one call is answered: the gateway hangs. A slow one is no failure of the benchmark."""
FLOORS: dict[str, float] = tomllib.loads((Path(__file__).parent / "floors.toml").read_text())["gateway"]
SMALL, LARGE = Load("small", 512), Load("large", 4096)


def program_text() -> list[str]:
    """The sources of the standard library, in order of their names."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    return [path.read_text("utf-8", errors="ignore") for path in sorted(folder.glob("*.py"))]


def sampled_tokens(codec: TokenCodec, end_of_turn_id: int) -> tuple[int, ...]:
    """Many tokens of one character each, then a tool call: 15 KB of ids and log-probabilities in 4 KB of calls."""
    call = codec.encode(CALL)
    letters = [codec.encode(letter)[0] for letter in "abcdefghijklmnopqrstuvwxyz      "]
    draw = random.Random(0)
    thinking = draw.choices(letters, k=NUM_SAMPLED_TOKENS - len(call) - 1)
    return (*thinking, *call, end_of_turn_id)


class AnyAttempt:
    """Every attempt is alive."""

    def binding(self, attempt_id: str) -> AttemptBinding | None:
        return AttemptBinding(
            policy_version=0,
            sampling=Sampling(max_tokens=1024),
            max_context_tokens=1 << 20,
            deadline_at_s=4e9,
        )


class SealingEngine:
    """The engine's client; tells of each answer, so that finished attempts can be sealed."""

    def __init__(self, engine: EngineClient, after: Callable[[str], None]) -> None:
        self._engine = engine
        self._after = after
        self.abort = engine.abort

    async def generate(
        self, request: GenerateRequest, on_tokens: Callable[[TokenChunk], None] | None = None
    ) -> GenerateResult:
        result = await self._engine.generate(request, on_tokens)
        self._after(request.attempt_id)
        return result


async def serve(pipe: Connection, directory: Path) -> None:
    """The gateway's process: serves until told to stop, then says what it recorded."""
    clock, ids, counters = SystemClock(), RandomIds(), Counters()
    ledger = TokenLedger(directory / "ledger")
    store = TraceStore(directory / "traces", before_seal=ledger.sync)
    recorder = Recorder(store, ledger, counters, clock)
    num_answered: collections.Counter[str] = collections.Counter()
    seals: set[asyncio.Task[object]] = set()
    num_sealed = itertools.count()

    def after(attempt_id: str) -> None:
        num_answered[attempt_id] += 1
        if num_answered[attempt_id] == TURNS_PER_ATTEMPT:
            del num_answered[attempt_id]
            asyncio.get_running_loop().call_later(0.02, seal, attempt_id)

    def seal(attempt_id: str) -> None:
        task = asyncio.create_task(recorder.seal(attempt_id, EndReason.SUBMITTED, (), 0))
        seals.add(task)
        task.add_done_callback(sealed)

    def sealed(task: asyncio.Task[object]) -> None:
        seals.discard(task)
        task.result()
        next(num_sealed)

    channel = await Client.connect(directory / "engine", name="engine", deadline_s=10)
    engine = SealingEngine(EngineClient(channel, clock, ClientDeadlines()), after)
    renderer = Renderer.load(directory / "tokenizer")
    gateway = Gateway(renderer, engine, recorder, AnyAttempt(), ids=ids, clock=clock, counters=counters)
    server = GatewayServer(gateway, KeyRing(SECRET), ids=ids, clock=clock, counters=counters)
    pipe.send(await server.start())
    collect_rarely()
    await asyncio.get_running_loop().run_in_executor(None, pipe.recv)
    await asyncio.sleep(0.1)  # the last attempts seal a moment after their last answer
    await asyncio.gather(*seals)
    pipe.send((next(num_sealed), counters.read(), ledger.total))
    await server.stop()
    await channel.close()
    await store.close()


def run_server(pipe: Connection, directory: str, core: int) -> None:
    os.sched_setaffinity(0, {core})
    uvloop.run(serve(pipe, Path(directory)))


async def serve_upstream(pipe: Connection, directory: Path, token_ids: tuple[int, ...]) -> None:
    upstream = TrivialUpstream(token_ids)
    pipe.send((await upstream.serve(directory / "engine"), upstream.num_bytes))
    collect_rarely()
    await asyncio.get_running_loop().run_in_executor(None, pipe.recv)


def run_upstream(pipe: Connection, directory: str, core: int, token_ids: tuple[int, ...]) -> None:
    os.sched_setaffinity(0, {core})
    uvloop.run(serve_upstream(pipe, Path(directory), token_ids))


class Caller:
    """The client: makes calls on kept-alive connections to the gateway or directly to the upstream."""

    def __init__(self, url: str) -> None:
        host, _, port = url.removeprefix("http://").removesuffix("/v1").partition(":")
        self._address = (host, int(port))
        self._idle: list[HttpConnection] = []
        self._waiting: collections.deque[Callable[[HttpConnection], None]] = collections.deque()
        self.num_answered = 0

    async def connect(self, num_connections: int) -> None:
        loop = asyncio.get_running_loop()
        while len(self._idle) < num_connections:
            self._idle.append((await loop.create_connection(HttpConnection, *self._address))[1])

    def _with_connection(self, use: Callable[[HttpConnection], None]) -> None:
        """Now, or as soon as a call is answered: where the server is slow, all connections may be in use."""
        if self._idle:
            use(self._idle.pop())
        else:
            self._waiting.append(use)

    def _free(self, connection: HttpConnection) -> None:
        if self._waiting:
            self._waiting.popleft()(connection)
        else:
            self._idle.append(connection)

    async def _until(self, done: "asyncio.Future[None]") -> None:
        """Wait as long as calls are answered."""
        while not done.done():
            num_before = self.num_answered
            await asyncio.wait([done], timeout=STALL_S)
            if not done.done() and self.num_answered == num_before:
                raise RuntimeError(f"not one call was answered within {STALL_S:.0f} s")

    async def steady(self, agents: Iterator[Agent], num_calls: int) -> list[float]:
        """Open loop: every attempt makes its calls at times fixed beforehand; seconds from due to answered."""
        loop = asyncio.get_running_loop()
        took_s: list[float] = []
        done = loop.create_future()

        def call(agent: Agent, due_s: float) -> None:
            request = agent.request()
            if request is None:
                return

            def use(connection: HttpConnection) -> None:
                connection.call(request, functools.partial(answered, connection))

            def answered(connection: HttpConnection, answer: bytes) -> None:
                took_s.append(time.perf_counter() - due_s)
                self.num_answered += 1
                agent.answered(answer)
                self._free(connection)
                if len(took_s) == num_calls:
                    done.set_result(None)
                next_due_s = due_s + TURN_GAP_S
                loop.call_later(max(0.0, next_due_s - time.perf_counter()), call, agent, next_due_s)

            self._with_connection(use)

        began_s = time.perf_counter() + 0.1
        for index in range(num_calls // TURNS_PER_ATTEMPT):
            due_s = began_s + index * TURNS_PER_ATTEMPT / STEADY_CALLS_PER_S
            loop.call_later(due_s - time.perf_counter(), call, next(agents), due_s)
        await self._until(done)
        return took_s

    async def saturate(
        self, agents: Iterator[Agent], num_in_flight: int, lengths: "Lengths", cpu_s: Callable[[], float]
    ) -> "Saturated":
        """Closed loop: what was answered in the time after the warm-up.

        Args:
            cpu_s: what the gateway's process has used so far.
        """
        loop = asyncio.get_running_loop()
        is_over = False
        num_open = 0
        done = loop.create_future()

        def call(connection: HttpConnection, agent: Agent) -> None:
            nonlocal num_open
            request = agent.request()
            if request is None:
                if is_over:
                    num_open -= 1
                    if not num_open:
                        done.set_result(None)
                    return
                agent = next(agents)
                request = agent.request()
                assert request is not None

            def answered(answer: bytes) -> None:
                self.num_answered += 1
                agent.answered(answer)
                call(connection, agent)

            connection.call(request, answered)

        for connection in self._idle[:num_in_flight]:
            num_open += 1
            call(connection, next(agents))
        await asyncio.sleep(lengths.warm_s)
        num_before, began_s, cpu_before_s = self.num_answered, time.perf_counter(), cpu_s()
        await asyncio.sleep(lengths.saturate_s)
        num_calls, took_s = self.num_answered - num_before, time.perf_counter() - began_s
        used_s = cpu_s() - cpu_before_s
        is_over = True
        await self._until(done)
        return Saturated(num_calls / took_s, 1e3 * used_s / max(1, num_calls), used_s / took_s)


@dataclass(frozen=True)
class Lengths:
    """How long one round is."""

    steady_calls: int
    warm_s: float
    saturate_s: float


@dataclass(frozen=True)
class Saturated:
    """``core_share``: how much of its core the gateway got; where it is far below 1, others were at work on it."""

    calls_per_s: float
    cpu_ms_per_call: float
    core_share: float


def cpu_seconds(process_id: int) -> float:
    """CPU time of all threads of a process so far, of user and system."""
    fields = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def measure_round(
    gateway: Caller,
    direct: Caller,
    agents: Callable[[Load, str], Iterator[Agent]],
    lengths: Lengths,
    cpu_s: Callable[[], float],
) -> dict[str, float]:
    """One round of everything; milliseconds and calls per second."""
    found: dict[str, float] = {}
    took_s = {}
    for name, caller, path in (("direct", direct, "/generate"), ("gateway", gateway, "/v1/chat/completions")):
        took_s[name] = sorted(await caller.steady(agents(SMALL, path), lengths.steady_calls))
        for quantile in (50, 99):
            found[f"{name}_p{quantile}_ms"] = 1e3 * took_s[name][len(took_s[name]) * quantile // 100]
    for quantile in (50, 99):
        found[f"added_p{quantile}_ms"] = found[f"gateway_p{quantile}_ms"] - found[f"direct_p{quantile}_ms"]
    for load in (SMALL, LARGE):
        for num in IN_FLIGHT:
            calls = agents(load, "/v1/chat/completions")
            seen = await gateway.saturate(calls, num, lengths, cpu_s)
            found[f"{load.name}_calls_per_s_at_{num}"] = seen.calls_per_s
            found[f"{load.name}_cpu_ms_per_call_at_{num}"] = seen.cpu_ms_per_call
            found[f"{load.name}_core_share_at_{num}"] = seen.core_share
        rates = [found[f"{load.name}_calls_per_s_at_{num}"] for num in IN_FLIGHT]
        found[f"{load.name}_calls_per_s"] = max(rates)
        found[f"{load.name}_most_in_flight_of_best"] = rates[-1] / max(rates) if max(rates) else 0.0
    return found


async def measure(
    urls: tuple[str, str],
    texts: list[str],
    thinking: str,
    lengths: Lengths,
    num_rounds: int,
    cpu_s: Callable[[], float],
) -> dict[str, float]:
    makers = {load: Agents(load, thinking, texts) for load in (SMALL, LARGE)}

    def agents(load: Load, path: str) -> Iterator[Agent]:
        return (makers[load].new(path) for _ in itertools.count())

    gateway, direct = map(Caller, urls)
    for caller in (gateway, direct):
        await caller.connect(max(IN_FLIGHT))
    collect_rarely()
    rounds = [await measure_round(gateway, direct, agents, lengths, cpu_s) for _ in range(num_rounds)]
    result = {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
    for load, maker in makers.items():
        result[f"{load.name}_bytes_in"] = statistics.mean(maker.num_bytes)
    result["num_calls"] = gateway.num_answered
    return result


def receive(pipe: Connection) -> Any:
    """What a process says, which may have died instead."""
    if not pipe.poll(2 * STALL_S):
        raise RuntimeError(f"a process of the benchmark did not answer within {2 * STALL_S:.0f} s")
    return pipe.recv()


def run(lengths: Lengths, num_rounds: int) -> dict[str, float]:
    """Starts the processes, measures, and checks that all was recorded."""
    context = multiprocessing.get_context("spawn")
    cores = sorted(os.sched_getaffinity(0))
    texts = program_text()
    with tempfile.TemporaryDirectory() as folder:
        renderer = Renderer.load(write_tokenizer(Path(folder) / "tokenizer", vocab_size=VOCAB_SIZE, texts=texts[:60]))
        token_ids = sampled_tokens(renderer.codec, renderer.end_of_turn_id)
        thinking = renderer.codec.decode(token_ids).partition("<tool_call>")[0].rstrip()
        upstream_pipe, upstream_end = context.Pipe()
        server_pipe, server_end = context.Pipe()
        upstream = context.Process(target=run_upstream, args=(upstream_end, folder, cores[-1], token_ids), daemon=True)
        server = context.Process(target=run_server, args=(server_end, folder, cores[0]), daemon=True)
        upstream.start()
        direct_url, num_bytes = receive(upstream_pipe)
        server.start()
        url = receive(server_pipe)
        os.sched_setaffinity(0, {cores[-1]})
        cpu_s = functools.partial(cpu_seconds, cast(int, server.pid))
        result = uvloop.run(measure((url, direct_url), texts[60:], thinking, lengths, num_rounds, cpu_s))
        server_pipe.send("stop")
        num_sealed, counters, num_tokens = receive(server_pipe)
        upstream_pipe.send("stop")
        server.join(10)
        upstream.join(10)
    num_calls = result["num_calls"]
    seen = (num_sealed * TURNS_PER_ATTEMPT, counters["gateway.segments.first"] * TURNS_PER_ATTEMPT, num_tokens)
    if seen != (num_calls, num_calls, num_calls * len(token_ids)):
        raise RuntimeError(
            f"{num_calls} calls must be recorded in whole attempts of one segment, but: {seen} {counters}"
        )
    return {**result, "bytes_out": num_bytes}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit with 1 if a floor is not reached")
    parser.add_argument("--quick", action="store_true", help="one short round")
    options = parser.parse_args()
    result = run(Lengths(300, 0.5, 1.0), 1) if options.quick else run(Lengths(1200, 1.0, 3.0), 3)
    print(json.dumps({name: round(value, 3) for name, value in result.items()}, indent=2))
    return int(not check(result) and options.check)


def check(result: dict[str, float]) -> bool:
    """Prints every figure beside its floor; whether all are reached."""
    at_most = {"added_p50_ms": "max_added_p50_ms", "added_p99_ms": "max_added_p99_ms"}
    at_least = {
        "small_calls_per_s": "min_small_calls_per_s",
        "large_calls_per_s": "min_large_calls_per_s",
        "small_most_in_flight_of_best": "min_most_in_flight_of_best",
        "large_most_in_flight_of_best": "min_most_in_flight_of_best",
    }
    reached = []
    for name, floor in (at_most | at_least).items():
        is_reached = result[name] <= FLOORS[floor] if name in at_most else result[name] >= FLOORS[floor]
        reached.append(is_reached)
        mark = "ok" if is_reached else "MISSED"
        print(
            f"{name:32} {result[name]:10.3f}  {'at most' if name in at_most else 'at least'} {FLOORS[floor]:g}  {mark}"
        )
    return all(reached)


if __name__ == "__main__":
    sys.exit(main())
