"""The run directory: where everything of a run is, and the lock that keeps it to one run at a time.

::

    runs/<name>-<NNN>/
      config.yaml  journal.sqlite  journal.sqlite.snapshots/  traces/  artifacts/  batches/  weights/v000000/
      checkpoints/step-000000/  metrics.jsonl  log.jsonl  logs/  sandboxes/  report.html  run.lock
      coordinator.secret  coordinator.url
"""

import errno
import fcntl
import os
import re
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from steelyard import config_file
from steelyard.config import Config
from steelyard.errors import RunDirectoryError, StorageFailed

_RUNS = Path("runs")
_LEFT_BY_A_CRASH = {"run.lock", "config.tmp"}
"""All that can be in the directory of a run that died before it had a configuration."""


@dataclass(frozen=True)
class RunDirectory:
    """Paths inside one run directory. ``path`` is absolute."""

    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def journal(self) -> Path:
        return self.path / "journal.sqlite"

    @property
    def traces(self) -> Path:
        return self.path / "traces"

    @property
    def artifacts(self) -> Path:
        return self.path / "artifacts"

    @property
    def batches(self) -> Path:
        return self.path / "batches"

    @property
    def weights(self) -> Path:
        return self.path / "weights"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def log(self) -> Path:
        return self.path / "log.jsonl"

    @property
    def process_logs(self) -> Path:
        return self.path / "logs"

    @property
    def sandboxes(self) -> Path:
        """Notes of the processes that carry sandboxes, in a folder for each owner."""
        return self.path / "sandboxes"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    @property
    def secret(self) -> Path:
        """What signs the keys of workers, scorers, trainers and operators; for its owner's eyes only."""
        return self.path / "coordinator.secret"

    @property
    def url(self) -> Path:
        """Where the coordinator was last reached, for commands on this machine."""
        return self.path / "coordinator.url"

    @property
    def recorded(self) -> Path:
        """What gateways outside the control process recorded, in a file for each attempt."""
        return self.traces / "recorded"

    @property
    def lock(self) -> Path:
        return self.path / "run.lock"

    def version(self, version: int) -> Path:
        """Directory of a policy version."""
        return self.weights / f"v{version:06d}"

    def first_version(self) -> Path | None:
        """The oldest version that is stored; None before the first publication.

        That is version 0 as long as no checkpoint takes its place, and config, tokenizer and template are the same
        in all.
        """
        return min((path.parent for path in self.weights.glob("v*/manifest.json")), default=None)

    def make_folders(self) -> None:
        """Make the folders that are missing.

        Raises:
            StorageFailed: the disk refuses.
        """
        folders = (self.traces, self.artifacts, self.batches, self.weights, self.checkpoints, self.process_logs)
        try:
            for folder in folders:
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageFailed(f"{self.path} must be writable, got: {error.strerror}") from None


def new_directory(name: str, wanted: str | None, go_on: str = "steelyard train --resume") -> RunDirectory:
    """Make the directory of a new run: ``wanted``, or the next free ``runs/<name>-<NNN>``.

    Args:
        go_on: the command that goes on with a run, for the message.

    Raises:
        RunDirectoryError: ``wanted`` exists and is not empty; the message has the line to type.
        StorageFailed: the disk refuses.
    """
    try:
        if wanted is None:
            return _next_numbered(name)
        path = Path(wanted).absolute()
        path.mkdir(parents=True, exist_ok=True)
        if {entry.name for entry in path.iterdir()} - _LEFT_BY_A_CRASH:
            hint = f"; to go on with it, type: {go_on} {wanted}" if (path / "config.yaml").exists() else ""
            raise RunDirectoryError(f"run.dir must be new or empty, got {wanted} which is not empty{hint}")
        return RunDirectory(path)
    except OSError as error:
        raise StorageFailed(f"run.dir must be writable, got {wanted or _RUNS}: {error.strerror}") from None


def write_config(config: Config, directory: RunDirectory) -> None:
    """Write ``config.yaml``, last of what makes a run: a directory with it can be resumed.

    Raises:
        StorageFailed: the disk refuses.
    """
    try:
        temporary = directory.config.with_suffix(".tmp")
        temporary.write_text(config_file.to_yaml(config), encoding="utf-8")
        temporary.rename(directory.config)
    except OSError as error:
        raise StorageFailed(f"{directory.config} must be writable, got: {error.strerror}") from None


def existing_directory(path: str) -> RunDirectory:
    """The directory of a run that was started.

    Raises:
        RunDirectoryError: there is no run at ``path``.
    """
    directory = RunDirectory(Path(path).absolute())
    if not directory.path.is_dir():
        raise RunDirectoryError(f"RUN must be a run directory, got {path} which does not exist")
    if not directory.config.is_file():
        raise RunDirectoryError(f"RUN must be a run directory, got {path} which has no config.yaml")
    return directory


class RunLock:
    """Exclusive right to a run directory, held by the open file: it ends with the process, however that ends."""

    def __init__(self, directory: RunDirectory) -> None:
        self._path = directory.lock
        self._fd: int | None = None

    def __enter__(self) -> Self:
        """Take the lock.

        Raises:
            RunDirectoryError: another process holds it; names its pid.
        """
        try:
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise StorageFailed(f"{self._path} must be writable, got: {error.strerror}") from None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(fd)
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise StorageFailed(f"{self._path} must be lockable, got: {error.strerror}") from None
            raise RunDirectoryError(f"{self._path.parent} is in use by another run (process {holder})") from None
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        self._fd = fd
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _next_numbered(name: str) -> RunDirectory:
    _RUNS.mkdir(exist_ok=True)
    pattern = re.compile(re.escape(name) + r"-(\d+)$")
    taken = [int(found[1]) for path in _RUNS.iterdir() if (found := pattern.match(path.name))]
    number = max(taken, default=0) + 1
    while True:
        path = (_RUNS / f"{name}-{number:03d}").absolute()
        try:
            path.mkdir()
            return RunDirectory(path)
        except FileExistsError:
            number += 1
