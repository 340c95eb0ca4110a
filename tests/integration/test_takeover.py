"""Two processes and one journal: the holder dies or is stopped, the standby takes over, and nothing is lost."""

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from steelyard.cli.main import EXIT_RUN_FAILED
from steelyard.coordinator import events as e
from steelyard.testing.journals import PostgresStore, replay
from steelyard.testing.postgres import PostgresServer

LEASE_S = 3.0
ENDS_WITHIN_S = 60.0


class WriterProcess:
    """A process of :mod:`steelyard.testing.journal_writer`, read line by line; the deadline is the test's."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process
        self.acknowledged: list[str] = []

    def read(self) -> list[str]:
        assert self.process.stdout is not None
        words = self.process.stdout.readline().split()
        assert words, "the process must say why it ends"
        if words[0] == "acknowledged":
            self.acknowledged.append(words[1])
        return words

    def read_until(self, word: str) -> list[str]:
        while (words := self.read())[0] != word:
            pass
        return words

    def read_acknowledged(self, count: int) -> None:
        for _ in range(count):
            self.read_until("acknowledged")

    def rest(self) -> None:
        """What it had said before it was killed."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.acknowledged += line.split()[1:]


@contextmanager
def writer(store: PostgresStore, owner: str) -> Iterator[WriterProcess]:
    command = [sys.executable, "-m", "steelyard.testing.journal_writer", store.url, store.name, owner, str(LEASE_S)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield WriterProcess(process)
        finally:
            process.kill()


def stored(store: PostgresStore) -> list[str]:
    """Names of all events, with the chain checked."""
    store.end_lease()
    found = asyncio.run(replay(store.open()))
    return [event.attempt_id for event in found if isinstance(event, e.Running)]


def test_a_standby_takes_over_from_a_holder_that_was_killed_and_no_acknowledged_event_is_lost(
    postgres: PostgresServer,
) -> None:
    store = PostgresStore(postgres)
    with writer(store, "old") as old, writer_after(old, store, "new") as new:
        old.read_acknowledged(20)
        old.process.kill()
        old.rest()
        (_, num_found) = new.read_until("taken")
        new.read_acknowledged(5)
        new.process.kill()
        new.rest()
    found = stored(store)
    num_old = int(num_found)
    assert [name.partition("-")[0] for name in found] == ["old"] * num_old + ["new"] * (len(found) - num_old)
    assert len(set(found)) == len(found)
    assert set(old.acknowledged + new.acknowledged) <= set(found)


def test_a_holder_that_was_stopped_finds_itself_fenced_when_it_goes_on_and_writes_nothing(
    postgres: PostgresServer,
) -> None:
    store = PostgresStore(postgres)
    with writer(store, "old") as old, writer_after(old, store, "new") as new:
        old.process.send_signal(signal.SIGSTOP)
        (_, num_found) = new.read_until("taken")
        new.read_acknowledged(5)
        old.process.send_signal(signal.SIGCONT)
        told = " ".join(old.read_until("ended"))
        assert f"JournalFenced: journal {store.name} was taken over by new at epoch 2; this writer has epoch 1" in told
        assert old.process.wait(ENDS_WITHIN_S) == EXIT_RUN_FAILED
        new.read_acknowledged(5)
        new.process.kill()
        new.rest()
    found = stored(store)
    num_old = int(num_found)
    assert [name.partition("-")[0] for name in found] == ["old"] * num_old + ["new"] * (len(found) - num_old)
    assert len(set(found)) == len(found)
    assert set(old.acknowledged + new.acknowledged) <= set(found)


@contextmanager
def writer_after(first: WriterProcess, store: PostgresStore, owner: str) -> Iterator[WriterProcess]:
    """A standby, started when ``first`` has the journal."""
    first.read_acknowledged(3)
    with writer(store, owner) as second:
        yield second
