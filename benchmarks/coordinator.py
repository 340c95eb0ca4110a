"""How many rollouts a second live their whole life through the coordinator's HTTP interface, durably.

A server process holds the coordinator on a SQLite journal on a real disk. A client process of its own plays workers and
scorers on kept-alive connections of the loopback. A life is lease, start, artifact_ready, lease_scores, score; the
coordinator accepts. The rollouts are admitted before the clock starts, and at the end the journal is read back and
must hold each life once.

    batched   8 connections, each as fast as it can; up to 32 calls in a request (a lease call takes up to 32 leases)
    single    64 connections, each as fast as it can; one call in a request, one lease or job in a call
    paced     256 workers at fixed times, 4 rollouts a turn, together half of the batched floor: time of lease calls
    postgres  as batched, with the journal in a PostgreSQL server that is started for this, its disk the same
    bare      the events of each run appended to a fresh journal of its kind in groups of the same mean size

Processor time is given for server and client apart: both are on the same machine, and the client's is no cost of the
coordinator. The client encodes and sends real requests and decodes every answer, without a client library.

    python benchmarks/coordinator.py            three runs of each, medians of the three
    python benchmarks/coordinator.py --check    the same; exit code 1 below a floor
    python benchmarks/coordinator.py --quick    one short run of each
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from steelyard.clock import SystemClock
from steelyard.coordinator import events as e
from steelyard.coordinator import protocol as p
from steelyard.coordinator.capability import CapabilityRing, Role
from steelyard.coordinator.journal.base import Journal
from steelyard.coordinator.journal.postgres import PostgresJournal
from steelyard.coordinator.journal.postgres_database import PostgresPlace
from steelyard.coordinator.journal.sqlite import SqliteJournal
from steelyard.coordinator.records import CoordinatorSettings
from steelyard.coordinator.server import CoordinatorServer
from steelyard.coordinator.service import Coordinator
from steelyard.ids import RandomIds
from steelyard.metrics import Counters
from steelyard.processes.garbage import collect_rarely
from steelyard.processes.http_failures import Failed
from steelyard.tasks.sampler import ShuffledStream
from steelyard.testing.postgres import PostgresServer, missing, postgres_server
from steelyard.testing.run_rig import make_manifest, make_proof, make_score
from steelyard.types import ArtifactReport, EndReason, Lease, Sampling, SealedTrace

SECRET = b"benchmark".ljust(32, b".")
GROUP_SIZE = 8
BATCHED_CONNECTIONS = 8
SINGLE_CONNECTIONS = 64
PACED_WORKERS = 256
PACED_ROLLOUTS_PER_TURN = 4
FLOORS: dict[str, float] = tomllib.loads((Path(__file__).parent / "floors.toml").read_text())["coordinator"]
_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(p.CallReply)


def journal_at(place: str) -> Journal:
    """The journal of a file, or of a database by its URL."""
    if place.startswith("postgresql:"):
        return PostgresJournal(PostgresPlace(url=place, name="benchmark"), owner="benchmark")
    return SqliteJournal(Path(place))


class NoTraces:
    """Nothing is recorded, so nothing is lost."""

    def discard(self, attempt_id: str) -> int:
        return 0


async def serve(pipe: Connection, place: str, num_rollouts: int) -> None:
    """Admit ``num_rollouts``, serve until told to stop, then send what the server used."""
    num_groups = num_rollouts // GROUP_SIZE
    rules = e.Rules(max_policy_lag=0, groups_per_batch=num_groups, group_size=GROUP_SIZE, min_scored=2)
    clock, ids = SystemClock(), RandomIds()
    coordinator = await Coordinator.open(
        journal=journal_at(place),
        settings=CoordinatorSettings(rules=rules, sampling=Sampling(seed=7), max_turns=4),
        clock=clock,
        ids=ids,
        run_id="run_benchmark",
        seed=0,
        config_digest="c0",
        open_traces=NoTraces(),
        stream=ShuffledStream(num_groups, 0, "task-{:06d}".format, num_epochs=None),
    )
    manifest = make_manifest(0, 0, None)
    await coordinator.published(manifest)
    await coordinator.loaded(make_proof(manifest))
    await coordinator.ready(0)
    server = CoordinatorServer(coordinator, CapabilityRing(SECRET), clock=clock, counters=Counters())
    collect_rarely()
    pipe.send(await server.start())
    num_events, num_commits, cpu_s = (
        coordinator.state.num_events,
        coordinator.worker_calls.num_commits,
        time.process_time(),
    )
    await asyncio.get_running_loop().run_in_executor(None, pipe.recv)
    cpu_s = time.process_time() - cpu_s
    num_lived, num_commits = (
        coordinator.state.num_events - num_events,
        coordinator.worker_calls.num_commits - num_commits,
    )
    pipe.send((cpu_s, num_events, num_lived, num_commits, coordinator.counters.read()))
    await server.stop()
    await coordinator.close()


def run_server(pipe: Connection, place: str, num_rollouts: int) -> None:
    uvloop.run(serve(pipe, place, num_rollouts))


class CallConnection:
    """A bare HTTP/1.1 client on one connection, so that what is measured is not the client library."""

    def __init__(self, url: str, worker_id: str) -> None:
        host, _, port = url.removeprefix("http://").partition(":")
        self._address = (host, int(port))
        self._sequence = 0
        self._session_id = f"ses_{worker_id}"
        keys = CapabilityRing(SECRET)
        self._heads = {
            role: f"POST {p.CALLS_PATH} HTTP/1.1\r\nHost: localhost\r\n{p.VERSION_HEADER}: {p.PROTOCOL_VERSION}\r\n"
            f"Authorization: Bearer {keys.issue(role, worker_id, 4e9)}\r\nContent-Length: "
            for role in (Role.WORKER, Role.SCORER)
        }

    async def open(self) -> None:
        self._reader, self._writer = await asyncio.open_connection(*self._address)

    async def call(self, role: Role, calls: Sequence[p.Call]) -> list[Any]:
        """The results of one request; raises where one is a failure."""
        first = self._sequence
        self._sequence += len(calls)
        numbered = tuple(p.NumberedCall(sequence=first + index, call=call) for index, call in enumerate(calls))
        body = _ENCODER.encode(p.CallRequest(session_id=self._session_id, answered_below=first, calls=numbered))
        self._writer.write(f"{self._heads[role]}{len(body)}\r\n\r\n".encode() + body)
        head = await self._reader.readuntil(b"\r\n\r\n")
        length = next(line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length"))
        content = await self._reader.readexactly(int(length.split(b":")[1]))
        if not head.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"the coordinator answered {head!r} {content!r}")
        results = [answer.result for answer in _DECODER.decode(content).answers]
        failures = [result for result in results if isinstance(result, Failed)]
        if failures:
            raise RuntimeError(f"the coordinator answered {failures[0]}")
        return results

    async def live(self, num_rollouts: int) -> tuple[int, float]:
        """Up to so many rollouts live their lives; how many were scored, and how long the lease call took."""
        began_s = time.perf_counter()
        (leased,) = await self.call(Role.WORKER, [p.LeaseCall(max_leases=num_rollouts, wait_s=0.0)])
        lease_s = time.perf_counter() - began_s
        if leased.leases:
            starts = [p.StartCall(attempt_id=lease.attempt_id, attempt_number=1) for lease in leased.leases]
            await self.call(Role.WORKER, starts)
            await self.call(Role.WORKER, [p.ArtifactReadyCall(report=report_of(lease)) for lease in leased.leases])
        (given,) = await self.call(Role.SCORER, [p.LeaseScoresCall(max_jobs=num_rollouts, wait_s=0.0)])
        if given.jobs:
            await self.call(Role.SCORER, [p.ScoreCall(score=make_score(job, 1.0)) for job in given.jobs])
        return len(given.jobs), lease_s


def report_of(lease: Lease) -> ArtifactReport:
    trace = SealedTrace(
        attempt_id=lease.attempt_id,
        digest="0" * 32,
        num_turns=4,
        num_tokens=100,
        oldest_version=0,
        newest_version=0,
        mean_version=0.0,
        num_segments=1,
        end_reason=EndReason.SUBMITTED,
    )
    return ArtifactReport(attempt_id=lease.attempt_id, attempt_number=1, trace=trace, artifact_digest="1" * 32)


async def open_connections(url: str, number: int) -> list[CallConnection]:
    connections = [CallConnection(url, f"wrk_{index}") for index in range(number)]
    for connection in connections:
        await connection.open()
    return connections


async def drive_closed(url: str, num_rollouts: int, num_connections: int, batch: int) -> float:
    """Lives a second, each connection as fast as it can."""
    connections = await open_connections(url, num_connections)
    num_scored = 0

    async def drive(connection: CallConnection) -> None:
        nonlocal num_scored
        while num_scored < num_rollouts:
            num_lived, _ = await connection.live(batch)
            num_scored += num_lived

    began_s = time.perf_counter()
    await asyncio.gather(*(drive(connection) for connection in connections))
    return num_rollouts / (time.perf_counter() - began_s)


async def drive_paced(url: str, num_rollouts: int) -> list[float]:
    """Seconds of each lease call; a turn that comes late because the one before it was slow counts the delay too."""
    connections = await open_connections(url, PACED_WORKERS)
    rate_per_s = FLOORS["min_batched_per_s"] / 2
    gap_s = PACED_ROLLOUTS_PER_TURN / rate_per_s
    num_turns = num_rollouts // PACED_ROLLOUTS_PER_TURN
    began_s = time.perf_counter() + 0.2
    lease_s: list[float] = []

    async def drive(index: int) -> None:
        for turn in range(index, num_turns, PACED_WORKERS):
            due_s = began_s + turn * gap_s
            await asyncio.sleep(due_s - time.perf_counter())
            late_s = max(0.0, time.perf_counter() - due_s) if turn >= PACED_WORKERS else 0.0
            lease_s.append(late_s + (await connections[index].live(PACED_ROLLOUTS_PER_TURN))[1])

    await asyncio.gather(*(drive(index) for index in range(PACED_WORKERS)))
    # A scorer may have come before the last artifacts; what is left is scored outside of the measurement.
    while (await connections[0].live(p.MAX_CALLS))[0]:
        pass
    return lease_s


async def drive(mode: str, url: str, num_rollouts: int) -> float | list[float]:
    if mode == "paced":
        return await drive_paced(url, num_rollouts)
    if mode == "single":
        return await drive_closed(url, num_rollouts, SINGLE_CONNECTIONS, 1)
    return await drive_closed(url, num_rollouts, BATCHED_CONNECTIONS, p.MAX_CALLS)


def run_client(pipe: Connection, mode: str, url: str, num_rollouts: int) -> None:
    began_s = time.process_time()
    answer = uvloop.run(drive(mode, url, num_rollouts))
    pipe.send((answer, time.process_time() - began_s))


async def check_journal(place: str, num_rollouts: int) -> tuple[e.AnyEvent, ...]:
    """All events; each life must be there once.

    Raises:
        RuntimeError: it is not.
    """
    journal = journal_at(place)
    events = await journal.replay()
    await journal.close()
    counts = Counter(type(event) for event in events)
    kinds = (e.Leased, e.Running, e.ArtifactReady, e.Scored, e.Accepted)
    found = {kind.__name__: counts[kind] for kind in kinds}
    if any(number != num_rollouts for number in found.values()):
        raise RuntimeError(f"each of {num_rollouts} lives must be in the journal once, but: {found}")
    return events


async def append_bare(place: str, events: Sequence[e.AnyEvent], group: int) -> float:
    """Seconds to append ``events`` in groups."""
    journal = journal_at(place)
    await journal.append(events[:1])  # opens it
    began_s = time.perf_counter()
    for at in range(1, len(events), group):
        await journal.append(events[at : at + group])
    took_s = time.perf_counter() - began_s
    await journal.close()
    return took_s


def measure(mode: str, num_rollouts: int, server: PostgresServer | None) -> dict[str, float]:
    """One run in one mode."""
    with tempfile.TemporaryDirectory() as directory:
        if mode == "postgres":
            assert server is not None
            place, bare_place = server.new_database(), server.new_database()
        else:
            place, bare_place = str(Path(directory) / "journal.sqlite"), str(Path(directory) / "bare.sqlite")
        answer, client_cpu_s, used = run_processes(mode, place, num_rollouts)
        events = asyncio.run(check_journal(place, num_rollouts))
        server_cpu_s, num_before, num_lived, num_commits, counters = used
        if counters:
            raise RuntimeError(f"nothing may be refused or lost, but: {counters}")
        result = {
            f"{mode}_server_cpu_us_per_rollout": 1e6 * server_cpu_s / num_rollouts,
            f"{mode}_client_cpu_us_per_rollout": 1e6 * client_cpu_s / num_rollouts,
            f"{mode}_client_share_of_cpu": client_cpu_s / (client_cpu_s + server_cpu_s),
        }
        if mode == "paced":
            ordered = sorted(answer)
            result["paced_lease_p50_ms"] = 1e3 * statistics.median(ordered)
            result["paced_lease_p99_ms"] = 1e3 * ordered[int(0.99 * len(ordered))]
            return result
        group = max(1, round(num_lived / num_commits))
        lived = events[num_before : num_before + num_lived]
        bare_s = asyncio.run(append_bare(bare_place, lived, group))
        return result | {
            f"{mode}_rollouts_per_s": answer,
            f"{mode}_events_per_commit": group,
            f"{mode}_bare_journal_rollouts_per_s": num_rollouts / bare_s,
        }


def run_processes(mode: str, place: str, num_rollouts: int) -> tuple[Any, float, Any]:
    """What the client found, the processor time that it used, and what the server used."""
    context = multiprocessing.get_context("spawn")
    server_pipe, server_end = context.Pipe()
    server = context.Process(target=run_server, args=(server_end, place, num_rollouts), daemon=True)
    server.start()
    url = server_pipe.recv()
    client_pipe, client_end = context.Pipe()
    client = context.Process(target=run_client, args=(client_end, mode, url, num_rollouts), daemon=True)
    client.start()
    answer, cpu_s = client_pipe.recv()
    server_pipe.send("stop")
    used = server_pipe.recv()
    client.join(10)
    server.join(30)
    return answer, cpu_s, used


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit with 1 if a floor is not reached")
    parser.add_argument("--quick", action="store_true", help="one short run of each")
    options = parser.parse_args()
    num_runs, scale = (1, 1) if options.quick else (3, 5)
    modes = {"batched": 4096, "single": 2048, "paced": 4096, "postgres": 4096}
    runs: dict[str, list[dict[str, float]]] = {mode: [] for mode in modes}
    with contextlib.ExitStack() as stack:
        reason = missing()
        server = stack.enter_context(postgres_server()) if reason is None else None
        if reason is not None:
            print(f"no PostgreSQL: {reason}")
            del modes["postgres"], runs["postgres"]
        # Modes take turns, so that what slows the machine down for a while is not one mode's alone.
        for _, mode in itertools.product(range(num_runs), modes):
            runs[mode].append(measure(mode, scale * modes[mode], server))
    result = {
        name: round(statistics.median(run[name] for run in found), 3) for found in runs.values() for name in found[0]
    }
    print(json.dumps(result | FLOORS, indent=2))
    is_reached = (
        result["batched_rollouts_per_s"] >= FLOORS["min_batched_per_s"]
        and result.get("postgres_rollouts_per_s", 0.0) >= FLOORS["min_postgres_per_s"]
        and result["single_rollouts_per_s"] >= FLOORS["min_single_per_s"]
        and result["paced_lease_p99_ms"] <= FLOORS["max_lease_p99_ms"]
    )
    return int(options.check and not is_reached)


if __name__ == "__main__":
    sys.exit(main())
