"""Run by path as root, for a moment: gives up root, then becomes bubblewrap.

A limit on processes does not hold for root, and bubblewrap needs no root. But an unprivileged user may not
see what is to be mounted (an interpreter below ``/root``). So first, in a mount namespace of our own that
dies with us, the needed files are bound below ``/tmp``, where that user sees them and nothing of the host
is changed.

``launch.py JSON`` with ``{"uid": int, "stage": [[name, source], ...], "command": [...]}``: every source
appears as ``/tmp/NAME``. Standard library only.
"""

import ctypes
import json
import os
import sys
from pathlib import Path
from typing import NoReturn

STAGE = "/tmp"
_CLONE_NEWNS = 0x20000
_MS_REC, _MS_BIND, _MS_PRIVATE = 0x4000, 0x1000, 1 << 18


def main() -> NoReturn:
    """Stage, drop, exec."""
    job = json.loads(sys.argv[1])
    libc = ctypes.CDLL(None, use_errno=True)
    _check(libc.unshare(_CLONE_NEWNS), "unshare the mount namespace")
    _check(libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None), "make mounts private")
    # Sources may lie below the stage: hold them open before it is covered.
    sources = [(name, os.open(source, os.O_PATH)) for name, source in job["stage"]]
    _check(libc.mount(b"none", STAGE.encode(), b"tmpfs", 0, b"mode=0755,size=1m"), f"mount a tmpfs at {STAGE}")
    for name, fd in sources:
        target = Path(STAGE) / name
        source = Path(f"/proc/self/fd/{fd}")
        if source.is_dir():
            target.mkdir(parents=True)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.touch()
        _check(libc.mount(bytes(source), bytes(target), None, _MS_BIND | _MS_REC, None), f"bind {target}")
        os.close(fd)
    os.setgroups([])
    os.setresgid(job["uid"], job["uid"], job["uid"])
    os.setresuid(job["uid"], job["uid"], job["uid"])
    os.chdir("/")
    os.execve(job["command"][0], job["command"], {})


def _check(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


if __name__ == "__main__":
    main()
