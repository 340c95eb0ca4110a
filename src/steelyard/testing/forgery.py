"""Forgeries of a finished run on its real files: what an attacker, a bad disk or a bug could leave behind.

A careful forger recomputes what depends on what was changed: the digest in a trace's file, the one in the journal, the
journal's chain. Each function here says how careful it is.
"""

import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from steelyard.coordinator.journal.base import link
from steelyard.digests import digest_bytes
from steelyard.types import StepBatch, Trace

Event = dict[str, Any]
"""One event of the journal as plain JSON."""


@dataclass(frozen=True)
class ForgedRun:
    """A copy of a run that may be spoiled."""

    path: Path

    # --- the journal ------------------------------------------------------------------------------

    def events(self) -> list[Event]:
        """All events in order."""
        with sqlite3.connect(self.path / "journal.sqlite") as connection:
            rows = connection.execute("select payload from records order by number").fetchall()
        connection.close()
        return [msgspec.json.decode(payload) for (payload,) in rows]

    def event(self, kind: str, index: int = 0) -> Event:
        """The ``index``-th event of a kind."""
        return [event for event in self.events() if event["kind"] == kind][index]

    def sql(self, statement: str) -> None:
        """Change the journal as a careless hand does: nothing else is made to fit."""
        with sqlite3.connect(self.path / "journal.sqlite") as connection:
            connection.execute(statement)
        connection.close()

    def rewrite(self, change: Callable[[list[Event]], None]) -> None:
        """Change the events in place and recompute numbers, chain and head."""
        events = self.events()
        change(events)
        rows, digest = [], ""
        for number, event in enumerate(events, start=1):
            payload = msgspec.json.encode(event)
            digest = link(digest, number, payload)
            rows.append((number, payload.decode(), digest))
        with sqlite3.connect(self.path / "journal.sqlite") as connection:
            connection.execute("delete from records")
            connection.executemany("insert into records values (?, ?, ?)", rows)
            connection.execute("insert or replace into head values (1, ?, ?)", (len(rows), digest))
        connection.close()

    def edit(self, kind: str, change: Callable[[Event], None], index: int = 0) -> None:
        """Change one event in place, with the chain recomputed."""
        self.rewrite(lambda events: change([event for event in events if event["kind"] == kind][index]))

    # --- traces -----------------------------------------------------------------------------------

    def trained_attempts(self, step: int = 0) -> list[str]:
        """Attempts in the batch of a step, in its order."""
        begun = next(e for e in self.events() if e["kind"] == "STEP_BEGUN" and e["step"] == step)
        return list(dict.fromkeys(sample.rpartition("/")[0] for sample in begun["sample_ids"]))

    def trace_file(self, attempt_id: str) -> Path:
        """The sealed trace of an attempt."""
        return self.path / "traces" / "sealed" / attempt_id

    def trace(self, attempt_id: str) -> Trace:
        """A sealed trace."""
        return msgspec.msgpack.decode(self.trace_file(attempt_id).read_bytes().partition(b"\n")[2], type=Trace)

    def put_trace(self, trace: Trace, *, is_journalled: bool = False) -> None:
        """Store a trace with the digest in its file recomputed, and with ``is_journalled`` that in the journal too."""
        data = msgspec.msgpack.encode(trace)
        digest = digest_bytes(data)
        self.trace_file(trace.attempt_id).write_bytes(digest.encode() + b"\n" + data)
        if is_journalled:

            def change(events: list[Event]) -> None:
                for event in events:
                    if event["kind"] == "ARTIFACT_READY" and event["report"]["attempt_id"] == trace.attempt_id:
                        event["report"]["trace"]["digest"] = digest

            self.rewrite(change)

    # --- batches ----------------------------------------------------------------------------------

    def batch_file(self, step: int) -> Path:
        """The stored batch of a step."""
        return self.path / "batches" / f"step-{step:06d}.msgpack"

    def batch(self, step: int) -> StepBatch:
        """A stored batch."""
        return msgspec.msgpack.decode(self.batch_file(step).read_bytes(), type=StepBatch)

    def put_batch(self, batch: StepBatch, *, is_journalled: bool = False) -> None:
        """Store a batch, and with ``is_journalled`` its digest in the journal."""
        data = msgspec.msgpack.encode(batch)
        self.batch_file(batch.step).write_bytes(data)
        if is_journalled:
            self.edit("STEP_BEGUN", lambda event: event.update(batch_digest=digest_bytes(data)), batch.step)


def flip_byte(path: Path, at: int = -1) -> None:
    """Change one byte of a file; its size stays."""
    data = bytearray(path.read_bytes())
    data[at] ^= 0x01
    path.write_bytes(data)


def swap(one: Path, other: Path) -> None:
    """Exchange two files."""
    mine, theirs = one.read_bytes(), other.read_bytes()
    assert mine != theirs, f"{one} and {other} must differ to be told apart"
    one.write_bytes(theirs)
    other.write_bytes(mine)
