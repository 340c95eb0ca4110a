"""Real processes on the loopback, killed and stopped at random while they work, and what must hold after each time.

A coordinator (``steelyard coordinator``), workers, scorers and a trainer without a model work on one run directory. A
fault kills one of them with SIGKILL, or stops it with SIGSTOP for a while, possibly longer than its leases. After each
fault all processes are held still, and then the audit of journal and stores must pass, and whatever was acknowledged to
any of them must be in the journal. What died is started again.

Faults are drawn from a seed; the moments at which they meet are the machine's.
"""

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
import yaml

from steelyard import config_file
from steelyard.cli.main import EXIT_RUN_FAILED
from steelyard.clock import SystemClock
from steelyard.coordinator import events as e
from steelyard.coordinator.books import prompt_book
from steelyard.coordinator.capability import Role
from steelyard.coordinator.entities import State
from steelyard.coordinator.groups import TaskStream
from steelyard.coordinator.journal.base import checked_events
from steelyard.coordinator.state import apply
from steelyard.environments.base import Services
from steelyard.environments.registry import make_environment
from steelyard.run.auditing import audit_run
from steelyard.run.coordinators import task_stream
from steelyard.run.directory import RunDirectory
from steelyard.run.journals import open_journal_reader
from steelyard.run.secret import issue_key
from steelyard.sandbox.function_calls import run_function_calls
from steelyard.testing.faultsim.witness import Witness
from steelyard.testing.kills.acknowledged import Finished, read_acknowledged, testify
from steelyard.testing.kills.options import EXIT_DIVERGED, ProgramOptions
from steelyard.testing.kills.trainer_program import FINISH_NAME
from steelyard.testing.small_runs import command, environment
from steelyard.types import Record

JOURNAL_NAME = "kills"
"""Of the journal in PostgreSQL."""
_POLL_S = 0.02
_START_DEADLINE_S = 60.0
_PROGRESS_DEADLINE_S = 90.0
_KEY_S = 86_400.0
_LEASE_S = 2.0
_STOP_FRAC = 0.3
_MAX_STOP_S = 1.5 * _LEASE_S
_MAX_PROGRESS_BYTES = 20_000
_LOST_JOURNAL = f"steelyard: journal {JOURNAL_NAME}"
_VICTIMS = {"coordinator": 3.0, "worker": 3.0, "scorer": 1.5, "trainer": 1.5}
"""Kinds of processes, and how often each is met."""


class KillPlan(Record, frozen=True, kw_only=True):
    """How many processes of each kind there are, beside one trainer; ``journal`` goes into the configuration."""

    num_coordinators: int = 1
    num_workers: int = 4
    num_scorers: int = 2
    diverge_frac: float = 0.2
    journal: dict[str, Any] = msgspec.field(default_factory=dict)


def postgres_plan(url: str) -> KillPlan:
    """Two coordinators, of which one stands by, on a new journal in the database at ``url``."""
    journal = {"kind": "postgres", "url": url, "name": JOURNAL_NAME, "lease_s": _LEASE_S}
    return KillPlan(num_coordinators=2, journal=journal)


class Verdict(Record, frozen=True, kw_only=True):
    """What one run with faults showed. ``failures`` is empty where all held; ``faults`` counts each kind by victim."""

    num_faults: int
    num_audits_passed: int
    failures: tuple[str, ...]
    faults: dict[str, int]
    num_events: int
    num_trained: int
    num_dropped: dict[str, int]
    num_acknowledged: int
    wall_s: float


class Fault(Record, frozen=True, kw_only=True):
    """What happens to ``name`` once ``num_bytes`` more acknowledgements are written.

    ``stop_s``: it does not run for so long; None: it is killed.
    """

    name: str
    num_bytes: int
    stop_s: float | None

    @property
    def kind(self) -> str:
        """For counting: ``worker killed``."""
        return f"{self.name.partition('-')[0]} {'killed' if self.stop_s is None else 'stopped'}"


def draw_faults(seed: int, num_faults: int, names: Sequence[str]) -> tuple[Fault, ...]:
    """Who, how, when and for how long."""
    draw = random.Random(f"faults of {seed}")
    faults = []
    for _ in range(num_faults):
        kind = draw.choices(list(_VICTIMS), list(_VICTIMS.values()))[0]
        name = draw.choice([name for name in names if name.startswith(kind)])
        stop_s = draw.uniform(0.05, _MAX_STOP_S) if draw.random() < _STOP_FRAC else None
        faults.append(Fault(name=name, num_bytes=draw.randrange(_MAX_PROGRESS_BYTES), stop_s=stop_s))
    return tuple(faults)


class KillRig:
    """One run. A context manager: at its end no process is left.

    Args:
        home: an empty directory for everything.
        seed: draws victims, faults, and what programs draw.
    """

    def __init__(self, home: Path, seed: int, plan: KillPlan) -> None:
        self._home = home
        self._plan = plan
        self._seed = seed
        self._draw = random.Random(seed)
        self._ports = _free_ports(plan.num_coordinators)
        self._directory = RunDirectory(home / "run")
        self._config = home / "run.yaml"
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._num_lives: Counter[str] = Counter()
        self._faults: Counter[str] = Counter()
        self._failures: list[str] = []
        self._is_finishing = False
        self._coordinators = tuple(f"coordinator-{index}" for index in range(plan.num_coordinators))
        self._roles = {
            **{f"worker-{index}": Role.WORKER for index in range(plan.num_workers)},
            **{f"scorer-{index}": Role.SCORER for index in range(plan.num_scorers)},
            "trainer": Role.TRAINER,
        }
        self._names = (*self._coordinators, *self._roles)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()

    def run(self, num_faults: int) -> Verdict:
        """Start everything, meet ``num_faults`` faults, end the run, and judge it.

        Raises:
            AssertionError: nothing went on for a long time, or a process does not start.
        """
        started_s = time.perf_counter()
        self._write_config()
        self._start_all()
        num_passed = 0
        for number, fault in enumerate(draw_faults(self._seed, num_faults, self._names)):
            self._await_progress(fault.num_bytes)
            self._meet(fault)
            found = self._look()
            self._failures += [f"after fault {number}, {fault}: {failure}" for failure in found]
            num_passed += not found
            self._restart_dead()
        self._finish()
        self._failures += [f"at the end: {failure}" for failure in (*self._look(), *self._unfinished())]
        return self._verdict(num_faults, num_passed, time.perf_counter() - started_s)

    # --- processes --------------------------------------------------------------------------------

    def _write_config(self) -> None:
        tree: dict[str, Any] = {
            "run": {"dir": str(self._directory.path)},
            "coordinator": {"port": self._ports[0]},
            "rollout": {"group_size": 2, "lease_s": _LEASE_S, "max_attempts": 12},
            "admission": {"max_tail_wait_s": 20.0, "max_drop_frac": 0.9},
            "scoring": {"deadline_s": 1.0, "max_attempts": 8},
            "train": {"batch_size": 8, "max_steps": 1_000_000},
            "journal": {"snapshot_every_events": 300, **self._plan.journal},
        }
        self._config.write_text(yaml.safe_dump(tree), encoding="utf-8")

    def _start_all(self) -> None:
        for name in self._names:
            self._start(name)
            if name == self._coordinators[0]:
                self._await(self._directory.url.exists, "the coordinator to listen", _START_DEADLINE_S)

    def _start(self, name: str) -> None:
        self._num_lives[name] += 1
        if name in self._coordinators:
            port = self._ports[self._coordinators.index(name)]
            target = self._directory.path if self._directory.config.exists() else self._config
            words = command("coordinator", target, f"coordinator.port={port}")
        else:
            words = [sys.executable, "-m", "steelyard.testing.kills", self._options(name)]
        with (self._home / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, env=environment()
            )

    def _options(self, name: str) -> str:
        options = ProgramOptions(
            role=self._roles[name],
            run=str(self._directory.path),
            urls=tuple(f"http://127.0.0.1:{port}" for port in self._ports),
            key=issue_key(self._directory, self._roles[name], name, SystemClock().now_s() + _KEY_S),
            notes=str(self._notes(name)),
            seed=self._draw.getrandbits(32),
            eval_task="repair/heldout/0",
            diverge_frac=self._plan.diverge_frac if self._num_lives[name] > 1 else 0.0,
        )
        return msgspec.json.encode(options).decode()

    def _notes(self, name: str) -> Path:
        return self._home / f"{name}.told"

    def _restart_dead(self) -> None:
        """Whoever was killed, a trainer that gave its weights up, a coordinator that lost its journal to a standby.

        Any other end is a failure.
        """
        for name, process in self._processes.items():
            returncode = process.poll()
            if returncode is None or (self._is_finishing and returncode == 0 and name == "trainer"):
                continue
            if returncode == EXIT_DIVERGED:
                self._faults["trainer diverged"] += 1
            elif self._has_lost_journal(name, returncode):
                self._faults["coordinator gave way"] += 1
            elif returncode != -signal.SIGKILL:
                self._failures.append(f"{name} ended with {returncode}: {self._tail(name)}")
            self._start(name)

    def _has_lost_journal(self, name: str, returncode: int) -> bool:
        """Whether a coordinator ended because a standby has its journal, or could have it for all that it knows."""
        has_standby = self._plan.num_coordinators > 1 and name in self._coordinators
        said = self._tail(name).strip().rpartition("\n")[2]
        return has_standby and returncode == EXIT_RUN_FAILED and said.startswith(_LOST_JOURNAL)

    # --- faults -----------------------------------------------------------------------------------

    def _meet(self, fault: Fault) -> None:
        process = self._processes[fault.name]
        if fault.stop_s is None:
            process.kill()
            process.wait()
        else:
            with _stopped([process]):
                time.sleep(fault.stop_s)  # the fault itself: so long it does not run
        self._faults[fault.kind] += 1

    def _await_progress(self, num_bytes: int) -> None:
        """Until so many more bytes of acknowledgements are written; a run in which nothing goes on is a failure."""
        wanted = self._num_told() + num_bytes
        self._await(lambda: self._num_told() >= wanted, "the run to go on", _PROGRESS_DEADLINE_S)

    def _num_told(self) -> int:
        paths = [self._notes(name) for name in self._names]
        return sum(path.stat().st_size for path in paths if path.exists())

    def _await(self, is_done: Callable[[], bool], what: str, deadline_s: float) -> None:
        ends_at_s = time.monotonic() + deadline_s
        while not is_done():
            self._restart_dead()
            if time.monotonic() > ends_at_s:
                ends = "; ".join(f"{name}: {self._tail(name)}" for name in self._names)
                raise AssertionError(f"waited {deadline_s:.0f} s for {what}; the logs end with {ends}")
            # Strangers tell nobody when they have written; the pause bounds the polling, nothing is ordered by it.
            time.sleep(_POLL_S)

    def _tail(self, name: str) -> str:
        path = self._home / f"{name}.log"
        return path.read_text(errors="replace")[-600:] if path.exists() else ""

    # --- judgement --------------------------------------------------------------------------------

    def _look(self) -> list[str]:
        """What is wrong with journal, stores and acknowledgements while everybody is held still."""
        with _stopped([process for process in self._processes.values() if process.poll() is None]):
            report = audit_run(self._directory)
            broken = [line for line in report.lines() if "BROKEN" in line or "counter-example" in line]
            return broken + self._witness().broken(self._events(), {}, self._stream())

    def _witness(self) -> Witness:
        witness = Witness()
        for acknowledged in self._acknowledged():
            testify(witness, acknowledged)
        return witness

    def _acknowledged(self) -> Iterator[Any]:
        for name in self._names:
            if self._notes(name).exists():
                yield from read_acknowledged(self._notes(name))

    def _events(self) -> Sequence[e.AnyEvent]:
        reader = open_journal_reader(config_file.load(self._directory.config), self._directory)
        return tuple(checked_events(reader.records(), reader.head()))

    def _state(self) -> State:
        state = State()
        for event in self._events():
            apply(state, event)
        return state

    def _stream(self) -> TaskStream:
        config = config_file.load(self._directory.config)
        services = Services(run_function=run_function_calls)
        stream = task_stream(make_environment(config.environment.kind, config.environment.options, services), config)
        assert stream is not None, "the run trains"
        return stream

    # --- the end ----------------------------------------------------------------------------------

    def _finish(self) -> None:
        """The trainer ends the run; then everybody is told to stop."""
        self._is_finishing = True
        (self._directory.path / FINISH_NAME).touch()
        self._await(lambda: self._processes["trainer"].poll() == 0, "the trainer to end the run", _PROGRESS_DEADLINE_S)
        for name, process in self._processes.items():
            if name != "trainer":
                process.terminate()
        for name, process in self._processes.items():
            returncode = process.wait(_START_DEADLINE_S)
            # One that was just started again may not listen to signals yet.
            is_in_order = returncode in {0, -signal.SIGTERM} or self._has_lost_journal(name, returncode)
            if name in self._coordinators and not is_in_order:
                self._failures.append(f"{name} was told to stop and ended with {returncode}: {self._tail(name)}")

    def _unfinished(self) -> list[str]:
        """Every prompt must be trained or dropped by now."""
        state = self._state()
        book = prompt_book(state)
        wrong = []
        if state.run is None or not state.run.is_finished:
            wrong.append("the run must be finished")
        if book.live or book.gap:
            wrong.append(f"every prompt must be trained or dropped once, got {book}")
        if not any(isinstance(one, Finished) for one in self._acknowledged()):
            wrong.append("the trainer must have been told that the run is finished")
        return wrong

    def _verdict(self, num_faults: int, num_passed: int, wall_s: float) -> Verdict:
        state = self._state()
        return Verdict(
            num_faults=num_faults,
            num_audits_passed=num_passed,
            failures=tuple(self._failures),
            faults=dict(sorted(self._faults.items())),
            num_events=state.num_events,
            num_trained=state.prompts.trained,
            num_dropped={str(reason): number for reason, number in state.prompts.dropped.items()},
            num_acknowledged=sum(1 for _ in self._acknowledged()),
            wall_s=round(wall_s, 1),
        )


@contextlib.contextmanager
def _stopped(processes: Sequence["subprocess.Popen[bytes]"]) -> Iterator[None]:
    """Hold processes still."""
    held = [process for process in processes if process.poll() is None]
    for process in held:
        os.kill(process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for process in held:
            os.kill(process.pid, signal.SIGCONT)


def _free_ports(count: int) -> tuple[int, ...]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return tuple(taken.getsockname()[1] for taken in sockets)
