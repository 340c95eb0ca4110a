"""The isolation tests once more, as a user without any privilege."""

import ctypes
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ISOLATION_TESTS = Path(__file__).with_name("test_isolation.py")
REPOSITORY = Path(__file__).parents[3]
PLAIN_UID = 65_531
MS_REC, MS_BIND, MS_PRIVATE, CLONE_NEWNS = 0x4000, 0x1000, 1 << 18, 0x20000


def become_plain_user() -> None:
    """Between fork and exec, as root: drop to a plain user who can reach the interpreter and the repository.

    An interpreter below a home that is closed to others is made reachable in a mount namespace of our own.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.unshare(CLONE_NEWNS) == 0
    assert libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None) == 0
    needed = [path for path in (Path(sys.base_prefix).resolve(), REPOSITORY) if closed_ancestor(path) is not None]
    opened = [(path, os.open(path, os.O_PATH)) for path in needed]
    for path, fd in opened:
        while (closed := closed_ancestor(path)) is not None:
            assert libc.mount(b"none", bytes(closed), b"tmpfs", 0, b"mode=0755") == 0
        path.mkdir(parents=True, exist_ok=True)
        assert libc.mount(f"/proc/self/fd/{fd}".encode(), bytes(path), None, MS_BIND | MS_REC, None) == 0
    os.setgroups([])
    os.setresgid(PLAIN_UID, PLAIN_UID, PLAIN_UID)
    os.setresuid(PLAIN_UID, PLAIN_UID, PLAIN_UID)


def closed_ancestor(path: Path) -> Path | None:
    """The outermost directory on the way to ``path`` that others may not enter."""
    for ancestor in reversed(path.parents):
        if ancestor.exists() and not ancestor.stat().st_mode & 0o001:
            return ancestor
    return None


def test_walls_and_limits_hold_for_a_plain_user_too() -> None:
    """A plain user has run them already, by running the tests; for root they are run again."""
    script = "import os, sys, pytest; assert os.getuid() != 0; sys.exit(pytest.main(sys.argv[1:]))"
    arguments = [
        str(ISOLATION_TESTS),
        "-q",
        "-x",
        "--rootdir",
        str(REPOSITORY),
        "-c",
        str(REPOSITORY / "pyproject.toml"),
    ]
    is_root = os.geteuid() == 0
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o777)
        result = subprocess.run(
            [sys.executable, "-B", "-c", script, *(arguments if is_root else ["--version"])],
            preexec_fn=become_plain_user if is_root else None, cwd=directory, capture_output=True, text=True,
            env={"HOME": directory, "TMPDIR": directory, "PATH": os.environ["PATH"]}, check=False, timeout=110,
        )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
