"""What a durable event costs in a bare journal: SQLite beside a PostgreSQL server on the same disk.

The events are those of whole lives of groups (``steelyard.testing.histories``), in groups of 16 and of 256, each a
transaction that is fsynced before the next begins. Nothing else goes on: no state machine, no HTTP. Kinds take turns,
run by run. The server is Debian's, started for this, reached by its Unix socket; where there is none, its figures are
left out.

A takeover is timed with two processes, a writer that appends without rest and a standby: from SIGKILL of the one to the
first durable event of the other, over the time of the lease.

    python benchmarks/journal.py            three runs of each, medians of the three
    python benchmarks/journal.py --check    the same; exit code 1 where a floor of floors.toml is missed
    python benchmarks/journal.py --quick    one short run of each
"""

import argparse
import contextlib
import itertools
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

import uvloop

from steelyard.coordinator.events import AnyEvent
from steelyard.coordinator.journal.base import Journal
from steelyard.coordinator.journal.postgres import PostgresJournal
from steelyard.coordinator.journal.postgres_database import PostgresPlace
from steelyard.coordinator.journal.sqlite import SqliteJournal
from steelyard.testing.histories import History
from steelyard.testing.postgres import PostgresServer, missing, postgres_server

GROUPS = (16, 256)
FULL_GROUPS = 600
QUICK_GROUPS = 60
LEASE_S = 3.0
FLOORS: dict[str, float] = tomllib.loads((Path(__file__).parent / "floors.toml").read_text())["journal"]


def history(num_events: int) -> list[AnyEvent]:
    """Events of whole lives."""
    events: list[AnyEvent] = []
    driven = History(events.append)
    driven.start()
    while len(events) < num_events:
        driven.step()
    return events[:num_events]


async def append_all(journal: Journal, events: Sequence[AnyEvent], group: int) -> float:
    """Durable events per second."""
    await journal.append(events[:group])  # opens it
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    for at in range(group, len(events), group):
        await journal.append(events[at : at + group])
    took_s, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
    num_events = len(events) - group
    stored = await journal.head_at(len(events))
    await journal.close()
    if stored is None:
        raise RuntimeError(f"the journal must hold {len(events)} events")
    print(f"{type(journal).__name__:<16} groups of {group:>3}: {num_events / took_s:>9,.0f} events per second, "
          f"{1e6 * cpu_s / num_events:5.1f} us of processor time each in this process")  # fmt: skip
    return num_events / took_s


def measure(server: PostgresServer | None, num_runs: int, num_groups: int) -> dict[str, float]:
    """Medians of events per second."""
    events = history(max(GROUPS) * num_groups)
    names = map("bare-{}".format, itertools.count())
    rates: dict[str, list[float]] = {}
    url = server.new_database() if server is not None else None
    with tempfile.TemporaryDirectory() as directory:
        for _, group in itertools.product(range(num_runs), GROUPS):
            chosen = events[: group * num_groups]
            sqlite = SqliteJournal(Path(directory) / next(names))
            rates.setdefault(f"sqlite_{group}_events_per_s", []).append(uvloop.run(append_all(sqlite, chosen, group)))
            if url is not None:
                postgres = PostgresJournal(PostgresPlace(url=url, name=next(names)), owner="benchmark")
                rate = uvloop.run(append_all(postgres, chosen, group))
                rates.setdefault(f"postgres_{group}_events_per_s", []).append(rate)
    return {name: round(statistics.median(found)) for name, found in rates.items()}


def takeover_s(url: str, name: str) -> float:
    """Seconds from the death of a writer to the first durable event of its standby."""
    with writer(url, name, "old") as old:
        until_said(old, "acknowledged")
        with writer(url, name, "new") as new:
            time.sleep(LEASE_S)  # the standby has come up, and has found the lease held
            old.kill()
            began_s = time.perf_counter()
            until_said(new, "acknowledged")
            took_s = time.perf_counter() - began_s
    print(f"takeover with a lease of {LEASE_S:g} s: {took_s:.3f} s")
    return took_s


@contextlib.contextmanager
def writer(url: str, name: str, owner: str) -> Iterator["subprocess.Popen[str]"]:
    """A process that appends whenever the journal is its own."""
    command = [sys.executable, "-m", "steelyard.testing.journal_writer", url, name, owner, str(LEASE_S)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def until_said(process: "subprocess.Popen[str]", word: str) -> None:
    """Read its lines up to the first that begins with ``word``."""
    if process.stdout is None or not any(line.startswith(word) for line in process.stdout):
        raise RuntimeError(f"the process must say {word!r}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit with 1 if a floor is not reached")
    parser.add_argument("--quick", action="store_true", help="one short run of each")
    options = parser.parse_args()
    num_runs, num_groups = (1, QUICK_GROUPS) if options.quick else (3, FULL_GROUPS)
    with contextlib.ExitStack() as stack:
        reason = missing()
        server = stack.enter_context(postgres_server()) if reason is None else None
        if reason is not None:
            print(f"no PostgreSQL: {reason}")
        result = measure(server, num_runs, num_groups)
        if server is not None:
            url = server.new_database()
            takeovers = [takeover_s(url, f"takeover-{index}") / LEASE_S for index in range(num_runs)]
            result["takeover_of_lease"] = round(statistics.median(takeovers), 4)
    print(json.dumps(result | FLOORS, indent=2))
    is_reached = result.get("takeover_of_lease", math.inf) <= FLOORS["max_takeover_of_lease"]
    return int(options.check and not is_reached)


if __name__ == "__main__":
    sys.exit(main())
