"""A small run of which attempts and gradings are done by processes of their own, each started by its command."""

import os
import re
import select
import signal
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from steelyard.coordinator import events as e
from steelyard.coordinator.capability import Role
from steelyard.run.directory import RunDirectory
from steelyard.run.secret import issue_key
from steelyard.testing.small_runs import command, environment, journal_events, write_small_config

_DEADLINE_S = 100.0
_EXPIRES_AT_S = 4e9
"""Of keys, in the year 2096."""
_LOOK_EVERY_S = 0.05
JOIN = re.compile(r"join at (?P<coordinator>\S+), gateway (?P<gateway>\S+)")


class JoinedRun:
    """The run, and the processes that work for it. Use as a context manager: at its end nothing is left running.

    Args:
        home: an empty folder.
        policy: a Hugging Face directory.
        sections: add to or replace keys of the small configuration.
    """

    def __init__(self, home: Path, policy: Path, **sections: dict[str, Any]) -> None:
        self.home = home
        self.run = home / "run"
        own: dict[str, dict[str, Any]] = {"coordinator": {"port": 0}, "rollout": {}, "scoring": {}}
        merged = {name: {**own.get(name, {}), **sections.get(name, {})} for name in {*own, *sections}}
        merged["rollout"].setdefault("num_workers", 0)
        merged["scoring"].setdefault("num_workers", 0)
        base = {"group_size": 2, "max_turns": 2, "max_tokens": 8, "max_concurrent": 4}
        merged["rollout"] = {**base, **merged["rollout"]}
        self.config = write_small_config(home, policy, **merged)
        self.processes: dict[str, subprocess.Popen[str]] = {}
        self.urls: dict[str, str] = {}
        self.lines: list[str] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()
            process.wait(_DEADLINE_S)

    def train(self, on_line: Callable[[str], None], *, resume: bool = False) -> int:
        """Run ``steelyard train`` to its end, give each of its lines to ``on_line``; the exit code.

        ``urls`` holds ``coordinator`` and ``gateway`` from the line on that names them.
        """
        what: list[str | Path] = ["--resume", self.run] if resume else [self.config, f"run.dir={self.run}"]
        process = self._start("train", "train", *what, "--cache-dir", self.home / "cache", stdout=subprocess.PIPE)
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                self.lines.append(line)
                if (found := JOIN.search(line)) is not None:
                    self.urls = found.groupdict()
                on_line(line)
        return process.wait(_DEADLINE_S)

    def worker(self, name: str, *arguments: str | Path) -> "subprocess.Popen[str]":
        """Start a worker under this name."""
        return self._join(Role.WORKER, name, "--gateway", self.urls["gateway"], *arguments)

    def scorer(self, name: str, *arguments: str | Path) -> "subprocess.Popen[str]":
        """Start a scorer under this name."""
        return self._join(Role.SCORER, name, *arguments)

    def stop(self, name: str) -> int:
        """Ask a process to stop, as a service manager does; its exit code."""
        self.processes[name].send_signal(signal.SIGTERM)
        return self.processes[name].wait(_DEADLINE_S)

    def kill(self, name: str) -> None:
        """Kill a process as ``kill -9`` does; returns when it is gone."""
        self.processes[name].kill()
        self.processes[name].wait(_DEADLINE_S)

    def until(self, holds: Callable[[list[e.AnyEvent]], bool]) -> None:
        """Look at the journal until something holds of its events.

        Raises:
            AssertionError: the run ended first.
        """
        while not holds(journal_events(self.run)):
            assert self.processes["train"].poll() is None, "the run ended before it held"
            select.select([], [], [], _LOOK_EVERY_S)

    def kill_at_work(self, name: str) -> set[str]:
        """Kill a worker while it holds attempts, once a step has been taken; the attempts.

        Raises:
            AssertionError: the run ended first.
        """
        process = self.processes[name]
        while True:
            assert self.processes["train"].poll() is None, f"the run ended before {name} could be killed at work"
            process.send_signal(signal.SIGSTOP)
            events = journal_events(self.run)
            held = attempts_held(events, name)
            if held and any(isinstance(event, e.StepBegun) for event in events):
                self.kill(name)
                return held
            process.send_signal(signal.SIGCONT)
            select.select([], [], [], _LOOK_EVERY_S)

    def said(self, name: str) -> str:
        """What a worker or scorer has printed so far."""
        return (self.home / f"{name}.out").read_text(encoding="utf-8")

    def errors(self, name: str) -> str:
        """The standard error of a process so far."""
        return (self.home / f"{name}.err").read_text(encoding="utf-8")

    def key_file(self, role: Role, name: str) -> Path:
        """A file with a key, for its owner alone."""
        path = self.home / f"{name}.key"
        path.touch(mode=0o600)
        path.write_text(issue_key(RunDirectory(self.run), role, name, _EXPIRES_AT_S) + "\n", encoding="ascii")
        return path

    def _join(self, role: Role, name: str, *arguments: str | Path) -> "subprocess.Popen[str]":
        return self._start(
            name, str(role), self.config, "--coordinator", self.urls["coordinator"], *arguments,
            "--key-file", self.key_file(role, name), "--home", self.home / "workers",
        )  # fmt: skip

    def _start(self, name: str, *arguments: str | Path, stdout: int | None = None) -> "subprocess.Popen[str]":
        # Appended, so that a process that is started again under its name goes on in its file.
        with (
            (self.home / f"{name}.err").open("a", encoding="utf-8") as err,
            (self.home / f"{name}.out").open("a", encoding="utf-8") as out,
        ):
            process = subprocess.Popen(
                command(*arguments),
                stdout=out if stdout is None else stdout,
                stderr=err,
                text=True,
                env={**environment(), "HOME": os.fspath(self.home)},
            )
        self.processes[name] = process
        return process


def attempts_held(events: Iterable[e.AnyEvent], worker_id: str) -> set[str]:
    """Attempts that a worker holds by the journal."""
    held: set[str] = set()
    for event in events:
        match event:
            case e.Leased() if event.worker_id == worker_id:
                held.add(event.attempt_id)
            case e.ArtifactReady():
                held.discard(event.report.attempt_id)
            case e.InfraFailed() | e.LeaseExpired():
                held.discard(event.attempt_id)
            case _:
                pass
    return held
