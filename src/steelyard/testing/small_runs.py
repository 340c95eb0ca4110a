"""Whole runs by the command line with a random policy: small enough for a test, real in every process."""

import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from steelyard import config_file
from steelyard.coordinator.events import AnyEvent
from steelyard.coordinator.journal.base import decode
from steelyard.run.directory import RunDirectory
from steelyard.run.journals import open_journal_reader

_DEADLINE_S = 100.0


@dataclass(frozen=True)
class CrashedRun:
    """A run whose only replica was killed (how it ended then), and which was resumed to its end (how that ended)."""

    directory: Path
    returncode: int
    stderr: str
    resumed: "subprocess.CompletedProcess[str]"


def write_small_config(directory: Path, policy: Path, **sections: dict[str, Any]) -> Path:
    """Write ``run.yaml`` for a run of a few steps of two groups of two; ``sections`` add to or replace its keys."""
    tree: dict[str, dict[str, Any]] = {
        "model": {"policy": str(policy), "max_context_tokens": 320},
        "rollout": {"group_size": 2, "max_turns": 2, "max_tokens": 8, "max_concurrent": 8},
        "train": {"batch_size": 4, "max_steps": 3, "checkpoint_every": 1, "learning_rate": 0.01, "weight_decay": 0.5},
        "sandbox": {"num_warm": 1},
        "inference": {"kv_tokens": 4096},
        "observe": {"display": "plain", "report": False},
    }
    for name, keys in sections.items():
        tree[name] = {**tree.get(name, {}), **keys}
    path = directory / "run.yaml"
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    return path


def command(*arguments: str | Path) -> list[str]:
    """The command line of ``steelyard arguments...`` in this interpreter."""
    return [sys.executable, "-m", "steelyard.cli", *map(str, arguments)]


def environment() -> dict[str, str]:
    """The environment of a command: ours, with output that is not held back."""
    return {**os.environ, "PYTHONUNBUFFERED": "1"}


def steelyard(
    *arguments: str | Path, cwd: Path | None = None, deadline_s: float = _DEADLINE_S
) -> "subprocess.CompletedProcess[str]":
    """Run a command to its end.

    Raises:
        subprocess.TimeoutExpired: it did not end in time.
    """
    return subprocess.run(
        command(*arguments),
        capture_output=True,
        text=True,
        timeout=deadline_s,
        cwd=cwd,
        env=environment(),
        check=False,
    )


def journal_events(run: Path) -> list[AnyEvent]:
    """All events of a run, in order; without a configuration it is one with the default journal."""
    directory = RunDirectory(run)
    config = config_file.load(directory.config if directory.config.is_file() else None)
    reader = open_journal_reader(config, directory)
    return [decode(record.payload) for record in reader.records()]


def free_port() -> int:
    """A TCP port of the loopback interface that nobody listens on at the moment."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
