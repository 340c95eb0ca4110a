"""Short-lived folders for sockets and options files; what a killed run left behind is cleared by the next one.

They lie under the system's temporary directory and not in the run's: the path of a Unix socket may have about a
hundred bytes only.
"""

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PREFIX = "steelyard-run-"
_LOCK = "lock"
_UNLOCKED_MAX_AGE_S = 3600.0
"""Between its making and its locking a folder belongs to somebody, too; never for so long."""


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """An empty folder that goes with the block. First clears those of this user whose owner is dead."""
    clear_abandoned(Path(tempfile.gettempdir()), time.time())
    with tempfile.TemporaryDirectory(prefix=_PREFIX, ignore_cleanup_errors=True) as name:
        folder = Path(name)
        # The kernel gives the lock up when its holder dies, however it dies. Children do not inherit it.
        with (folder / _LOCK).open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield folder


def clear_abandoned(root: Path, now_s: float) -> int:
    """Delete the scratch folders in ``root`` that nobody holds; returns how many. Never fails."""
    num_cleared = 0
    for folder in root.glob(f"{_PREFIX}*"):
        try:
            if folder.stat().st_uid == os.getuid() and _is_abandoned(folder, now_s):
                shutil.rmtree(folder)
                num_cleared += 1
        except OSError:
            # Another run clears at the same time, or the folder is not ours to delete.
            continue
    return num_cleared


def _is_abandoned(folder: Path, now_s: float) -> bool:
    try:
        with (folder / _LOCK).open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
    except BlockingIOError:
        return False
    except FileNotFoundError:
        return now_s - folder.stat().st_mtime > _UNLOCKED_MAX_AGE_S
