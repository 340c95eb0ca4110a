"""What events cost as a journal grows, how long it takes to come back, and what live rollouts take of memory.

A history is made by driving the real state machine through whole lives of groups (``steelyard.testing.histories``).
Its events then go through the state machine and into a SQLite journal in groups of 256, fsync and all, which is
measured; driving is not. Decades are 1,000 to 10,000 events, and the last one up to all of them; each group of events
is timed by itself, and a decade's cost is the median of its groups, in processor time of this process over that of
encoding and chaining the same events once more, just afterwards: what slows the whole machine down for a while slows
both. Beside it, in turns, the same rows go into a bare SQLite table ("bare").

The rate is that of a second pass over the same events, through the queue of commits that the coordinator uses: groups
are applied while the ones before are committed, at most 2,048 events ahead of what is durable.

Recovery opens the same journal again, from all events and from a snapshot that was written as many events before the
end as a run writes them by default. Live rollouts are pending, leased, running, sealed or accepted ones of a whole
coordinator with a SQLite journal, measured in a process of its own: the growth of its resident memory at its peak, the
snapshots that it writes included.

    python benchmarks/recovery.py            1,000,000 events, 100,000 live rollouts
    python benchmarks/recovery.py --check    the same; exit code 1 where a floor of floors.toml is missed
    python benchmarks/recovery.py --quick    100,000 events; times are scaled up to the full number, and said so
"""

import argparse
import asyncio
import gc
import multiprocessing
import sqlite3
import statistics
import sys
import tempfile
import time
import tomllib
from pathlib import Path

from steelyard.clock import SystemClock
from steelyard.config import JournalConfig
from steelyard.coordinator.commits import CommitQueue
from steelyard.coordinator.entities import State
from steelyard.coordinator.events import AnyEvent, Rules
from steelyard.coordinator.journal.base import EMPTY_HEAD, chain
from steelyard.coordinator.journal.sqlite import SqliteJournal
from steelyard.coordinator.protocol import MAX_GRANTS
from steelyard.coordinator.records import CoordinatorSettings
from steelyard.coordinator.recovery import recover
from steelyard.coordinator.service import Coordinator
from steelyard.coordinator.snapshot import take
from steelyard.coordinator.state import apply
from steelyard.digests import digest_bytes
from steelyard.ids import RandomIds
from steelyard.tasks.sampler import ShuffledStream
from steelyard.testing.histories import History
from steelyard.testing.run_rig import make_manifest, make_proof, make_score
from steelyard.types import ArtifactReport, EndReason, Lease, Sampling, SealedTrace

FLOORS = Path(__file__).parent / "floors.toml"
FULL_EVENTS = 1_000_000
LIVE_ROLLOUTS = 100_000
GROUP_EVENTS = 256
MAX_AHEAD_EVENTS = 2048
GROUPS_PER_BATCH = 24
GROUP_SIZE = 8
NUM_WORKERS = 16


def main() -> int:
    """Run, print, and compare with the floors."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="exit with 1 where a floor is missed")
    parser.add_argument("--quick", action="store_true", help="100,000 events")
    arguments = parser.parse_args()
    floors = tomllib.loads(FLOORS.read_text())["recovery"]
    num_events = FULL_EVENTS // 10 if arguments.quick else FULL_EVENTS
    live_bytes = in_own_process()
    with tempfile.TemporaryDirectory() as directory:
        found = asyncio.run(measure(Path(directory), num_events))
    found["max_live_bytes"] = live_bytes
    is_good = True
    for name, floor in floors.items():
        reached = found[name] <= floor if name.startswith("max_") else found[name] >= floor
        is_good &= reached
        print(f"{name}: {found[name]:,.3f}, floor {floor:,.1f}: {'reached' if reached else 'MISSED'}")
    return 0 if is_good or not arguments.check else 1


class Writing:
    """Feeds a history into state machine and journal, group by group, and keeps what each group cost."""

    def __init__(self, directory: Path) -> None:
        self.journal = SqliteJournal(directory / "journal.sqlite")
        self.state = State()
        self.costs: list[tuple[int, float, float]] = []
        self.wall_s = 0.0
        self.bare_s = 0.0
        self.snapshot_s = 0.0
        self._bare = sqlite3.connect(directory / "bare.sqlite", isolation_level=None)
        self._bare.execute("pragma journal_mode=wal")
        self._bare.execute("pragma synchronous=full")
        self._bare.execute("create table records (number integer primary key, payload text, digest text)")

    async def write(self, events: list[AnyEvent]) -> None:
        """One group: applied and committed, then its rows alone into the bare table."""
        started_s, started_cpu_s = time.perf_counter(), time.process_time()
        for event in events:
            apply(self.state, event)
        await self.journal.append(events)
        cpu_s = time.process_time() - started_cpu_s
        self.wall_s += time.perf_counter() - started_s
        started_cpu_s = time.process_time()
        records, _ = chain(EMPTY_HEAD, events)
        self.costs.append((self.state.num_events, cpu_s / len(events), cpu_s / (time.process_time() - started_cpu_s)))
        first = self.state.num_events - len(events)
        rows = [(first + record.number, record.payload.decode(), record.digest) for record in records]
        started_s = time.perf_counter()
        self._bare.execute("begin")
        self._bare.executemany("insert into records values (?, ?, ?)", rows)
        self._bare.execute("commit")
        self.bare_s += time.perf_counter() - started_s

    async def snapshot(self) -> None:
        """Keep a snapshot of the state as it is."""
        head = await self.journal.head_at(self.state.num_events)
        if head is None:
            raise ValueError(f"the journal must hold record {self.state.num_events}")
        started_s = time.perf_counter()
        await self.journal.save_snapshot(head.number, take(self.state, head))
        self.snapshot_s = time.perf_counter() - started_s

    async def close(self) -> None:
        """Close both files."""
        self._bare.close()
        await self.journal.close()


async def measure(directory: Path, num_events: int) -> dict[str, float]:
    """All figures but memory, by the name of their floor."""
    writing = Writing(directory)
    await write_history(writing, num_events)
    first, first_relative = median_costs(writing, 1_000, 10_000)
    last, last_relative = median_costs(writing, num_events // 10, num_events)
    total = writing.state.num_events
    print(f"{total:,} events one group at a time: {total / writing.wall_s:,.0f} per second")
    print(f"bare rows one group at a time: {total / writing.bare_s:,.0f} per second")
    print(f"processor time an event: first decade {first * 1e6:.1f} us, last decade {last * 1e6:.1f} us")
    print(f"one snapshot takes {writing.snapshot_s:.2f} s")
    await writing.close()
    rate = await events_per_s(directory)
    with_snapshot_s = await recovery_s(directory, is_from_snapshot=True, num_events=total)
    whole_s = await recovery_s(directory, is_from_snapshot=False, num_events=total)
    scale = FULL_EVENTS / total
    if scale > 1.01:
        print(f"recovery of all events took {whole_s:.2f} s; scaled by {scale:.1f} below")
    return {
        "max_recovery_s": whole_s * scale,
        "max_recovery_with_snapshot_s": with_snapshot_s,
        "min_events_per_s": rate,
        "max_last_decade_of_first": last_relative / first_relative,
    }


def median_costs(writing: Writing, start: int, end: int) -> tuple[float, float]:
    """Processor seconds an event, and their ratio to the reference, over the groups that end in this range."""
    chosen = [(cpu_s, relative) for number, cpu_s, relative in writing.costs if start <= number < end]
    return statistics.median(cpu_s for cpu_s, _ in chosen), statistics.median(relative for _, relative in chosen)


async def write_history(writing: Writing, num_events: int) -> None:
    """Drive a history of at least so many events into state machine and journal, with one snapshot near its end."""
    pending: list[AnyEvent] = []
    history = History(pending.append, groups_per_batch=GROUPS_PER_BATCH)
    history.start()
    snapshot_at = num_events - JournalConfig().snapshot_every_events
    is_taken = False
    while writing.state.num_events < num_events:
        history.step()
        while len(pending) >= GROUP_EVENTS:
            group, pending[:GROUP_EVENTS] = pending[:GROUP_EVENTS], []
            await writing.write(group)
        if not is_taken and writing.state.num_events >= snapshot_at:
            await writing.snapshot()
            is_taken = True


async def events_per_s(directory: Path) -> float:
    """Durable events per second through state machine and commit queue, over the events of the first pass.

    Raises:
        StorageFailed: the journal refused.
    """
    source, target = SqliteJournal(directory / "journal.sqlite"), SqliteJournal(directory / "rate.sqlite")
    state, seconds = State(), 0.0
    commits = CommitQueue(
        target, num_committed=0, delay_s=0.0, sleep=asyncio.sleep, on_failure=print, on_commit=lambda number: None
    )
    async for page in source.replay_from(EMPTY_HEAD):
        started_s = time.perf_counter()
        for start in range(0, len(page), GROUP_EVENTS):
            for event in page[start : start + GROUP_EVENTS]:
                apply(state, event)
                commits.add(event)
            await asyncio.sleep(0)  # lets the queue begin
            await commits.reached(state.num_events - MAX_AHEAD_EVENTS)
        await commits.reached(state.num_events)  # reading the next page must not hide behind a commit
        seconds += time.perf_counter() - started_s
    num_commits = commits.num_commits
    await commits.close()
    await source.close()
    await target.close()
    rate = state.num_events / seconds
    print(f"through the commit queue: {rate:,.0f} events per second, {state.num_events / num_commits:,.0f} a commit")
    return rate


async def recovery_s(directory: Path, *, is_from_snapshot: bool, num_events: int) -> float:
    """Seconds to bring the state back; without snapshots where they are not wanted."""
    if not is_from_snapshot:
        for path in (directory / "journal.sqlite.snapshots").iterdir():
            path.unlink()
    gc.collect()
    journal = SqliteJournal(directory / "journal.sqlite")
    started_s = time.perf_counter()
    state, start = await recover(journal)
    seconds = time.perf_counter() - started_s
    await journal.close()
    if state.num_events != num_events or (start > 0) is not is_from_snapshot:
        raise ValueError(f"{num_events} events must come back, got {state.num_events} from {start} on")
    print(f"recovery from event {start:,} on: {seconds:.2f} s")
    return seconds


def in_own_process() -> float:
    """Bytes that LIVE_ROLLOUTS take, measured where nothing else has been allocated."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        return pool.apply(live_bytes)


def live_bytes() -> float:
    """Peak growth of this process's resident memory by a whole coordinator with LIVE_ROLLOUTS."""
    before = resident_bytes()
    with tempfile.TemporaryDirectory() as directory:
        num_live = asyncio.run(live_coordinator(Path(directory)))
    grown = resident_bytes() - before
    print(f"a coordinator with {num_live:,} live rollouts and its snapshots: {grown / 1e6:,.0f} MB")
    return float(grown)


async def live_coordinator(directory: Path) -> int:
    """Bring up a coordinator on a SQLite journal, a fifth of its rollouts in each stage up to accepted; how many."""
    coordinator = await open_coordinator(directory, LIVE_ROLLOUTS // GROUP_SIZE)
    manifest = make_manifest(0, 0, None)
    await coordinator.published(manifest)
    await coordinator.loaded(make_proof(manifest))
    await coordinator.ready(0)
    for number in range(LIVE_ROLLOUTS * 4 // 5 // MAX_GRANTS):
        leases = await coordinator.lease(f"wrk_{number % NUM_WORKERS}", MAX_GRANTS, 0.0, frozenset())
        begun = [lease for index, lease in enumerate(leases) if index % 4]
        ended = [lease for index, lease in enumerate(leases) if index % 4 > 1]
        await asyncio.gather(*(coordinator.start(lease.attempt_id, lease.attempt_number) for lease in begun))
        await asyncio.gather(*(coordinator.artifact_ready(report_of(lease)) for lease in ended))
    for _ in range(LIVE_ROLLOUTS // 5 // MAX_GRANTS):
        jobs = await coordinator.lease_scores("scr_0", MAX_GRANTS, 0.0)
        await asyncio.gather(*(coordinator.score(make_score(job, 1.0)) for job in jobs))
    num_live = len(coordinator.state.rollouts)
    await coordinator.close()
    return num_live


async def open_coordinator(directory: Path, num_groups: int) -> Coordinator:
    """One that admits so many groups at once."""
    rules = Rules(max_policy_lag=0, groups_per_batch=num_groups, group_size=GROUP_SIZE, min_scored=2)
    return await Coordinator.open(
        journal=SqliteJournal(directory / "live.sqlite"),
        settings=CoordinatorSettings(
            rules=rules, sampling=Sampling(seed=7), max_turns=4, lease_s=86_400.0, group_commit_s=0.0
        ),
        clock=SystemClock(),
        ids=RandomIds(),
        run_id="run_benchmark",
        seed=0,
        config_digest="c0",
        open_traces=NoTraces(),
        stream=ShuffledStream(num_groups, 0, "task-{:06d}".format, num_epochs=None),
    )


class NoTraces:
    """Nothing is recorded, so nothing is lost."""

    def discard(self, attempt_id: str) -> int:
        return 0


def report_of(lease: Lease) -> ArtifactReport:
    """What a harness would say of an attempt of one turn."""
    trace = SealedTrace(
        attempt_id=lease.attempt_id,
        digest=digest_bytes(lease.attempt_id.encode()),
        num_turns=1,
        num_tokens=100,
        oldest_version=0,
        newest_version=0,
        mean_version=0.0,
        num_segments=1,
        end_reason=EndReason.SUBMITTED,
    )
    return ArtifactReport(
        attempt_id=lease.attempt_id,
        attempt_number=lease.attempt_number,
        trace=trace,
        artifact_digest=digest_bytes(lease.rollout_id.encode()),
    )


def resident_bytes() -> int:
    """The most resident memory that this process has had."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status must have a line VmHWM")


if __name__ == "__main__":
    sys.exit(main())
