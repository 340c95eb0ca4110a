"""Which host processes carry sandboxes, written down so that the next owner can end what the last one left.

One small file per process: its id, and when it started, since ids are used again.
"""

import contextlib
import logging
import secrets
import shutil
import tempfile
from pathlib import Path

import msgspec
import psutil

logger = logging.getLogger(__name__)

_GONE_DEADLINE_S = 10.0
_PREFIX = "steelyard-"
_NOTE = ".folder"


class HostProcess(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A process that was started to carry a sandbox; ``directory`` is on the host's disk and goes with it."""

    pid: int
    created_at_s: float
    directory: str | None = None


class Registry:
    """The files below ``directory``, which belongs to one run."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def add(self, pid: int, directory: Path | None = None) -> None:
        """Note that ``pid``, just started by us, carries a sandbox.

        Raises:
            OSError: the note cannot be written.
        """
        self._directory.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(psutil.NoSuchProcess):
            created_at_s = psutil.Process(pid).create_time()
            entry = HostProcess(pid=pid, created_at_s=created_at_s, directory=str(directory) if directory else None)
            self._path(pid).write_bytes(msgspec.json.encode(entry))

    def remove(self, pid: int) -> None:
        """``pid`` has ended."""
        self._path(pid).unlink(missing_ok=True)

    def make_directory(self) -> Path:
        """A new directory under the system's temporary one, noted before it is made: a kill leaves none unknown.

        Raises:
            OSError: the note or the directory cannot be made.
        """
        self._directory.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.gettempdir()) / f"{_PREFIX}{secrets.token_hex(8)}"
        self._note_of(made).write_text(str(made), encoding="utf-8")
        made.mkdir(mode=0o700)
        return made

    def drop_directory(self, directory: Path) -> None:
        """Delete what :meth:`make_directory` made, and its note."""
        shutil.rmtree(directory, ignore_errors=True)
        self._note_of(directory).unlink(missing_ok=True)

    def sweep(self) -> int:
        """Kill what still runs, delete its directory, forget it; how many there were.

        Raises:
            OSError: a directory cannot be deleted.
        """
        num_swept = 0
        for path in sorted(self._directory.glob("*.json")):
            try:
                entry = msgspec.json.decode(path.read_bytes(), type=HostProcess)
            except msgspec.DecodeError:
                # Its owner was killed while it wrote; the process died with its owner.
                logger.warning("dropped an unreadable note of a sandbox process: %s", path.name)
                path.unlink()
                continue
            num_swept += self._end(entry)
            if entry.directory is not None:
                shutil.rmtree(entry.directory, ignore_errors=True)
            path.unlink()
        for note in sorted(self._directory.glob(f"{_PREFIX}*{_NOTE}")):
            made = Path(note.read_text(encoding="utf-8"))
            # A note that was cut off names something else.
            if made.name == note.name.removesuffix(_NOTE):
                shutil.rmtree(made, ignore_errors=True)
            note.unlink()
        return num_swept

    def _note_of(self, directory: Path) -> Path:
        return self._directory / f"{directory.name}{_NOTE}"

    def _end(self, entry: HostProcess) -> bool:
        try:
            process = psutil.Process(entry.pid)
            if abs(process.create_time() - entry.created_at_s) > 0.05:
                return False
            logger.warning("process %d of an earlier owner still carried a sandbox; killed", entry.pid)
            family = [process, *process.children(recursive=True)]
            for member in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    member.kill()
            psutil.wait_procs(family, timeout=_GONE_DEADLINE_S)
        except psutil.NoSuchProcess:
            return False
        return True

    def _path(self, pid: int) -> Path:
        return self._directory / f"{pid}.json"


def end_abandoned_sandboxes(root: Path) -> int:
    """Sweep the registries below ``root``, each the folder of an owner that is dead; how many processes there were.

    To be called by whoever holds the run, before any new owner starts.

    Raises:
        OSError: a note cannot be read or deleted.
    """
    return sum(Registry(folder).sweep() for folder in sorted(root.glob("*/")))
