"""What of this interpreter a sandbox needs: the binary, the standard library, the shared libraries.

Inside, all of it lies under ``/python``, so that no path of the host shows. ``site-packages`` is covered.
"""

import os
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from steelyard.errors import InputError

HOME = "/python"
_LIBRARIES = f"{HOME}/so"
_LDD_DEADLINE_S = 60.0
# Modules for screens and name services: useless inside, and each of their many libraries would be one more mount.
_LEFT_OUT = ("_tkinter", "_curses", "readline", "nis.", "_test", "ossaudiodev")


@dataclass(frozen=True)
class Interpreter:
    """Mounts as (path here, path inside), read-only; directories to cover with an empty one; environment; command."""

    mounts: tuple[tuple[Path, str], ...]
    covers: tuple[str, ...]
    environment: dict[str, str]
    command: tuple[str, ...]


def find_interpreter() -> Interpreter:
    """The running interpreter, without its virtual environment.

    Raises:
        InputError: its standard library or its libraries cannot be found.
    """
    prefix = Path(sys.base_prefix).resolve()
    binary = _base_binary(prefix)
    standard = Path(os.__file__).resolve().parent
    if not standard.is_relative_to(prefix):
        raise InputError(f"the sandbox needs the standard library below {prefix}, found it at {standard}")
    inside = f"{HOME}/{standard.relative_to(prefix)}"
    extensions = Path(sysconfig.get_config_var("DESTSHARED") or standard / "lib-dynload").resolve()
    if not extensions.is_dir():
        extensions = standard / "lib-dynload"
    mounts = [(binary, f"{HOME}/bin/python3"), (standard, inside)]
    if not extensions.is_relative_to(standard) and extensions.is_dir():
        mounts.append((extensions, f"{inside}/lib-dynload"))
    modules = [path for path in sorted(extensions.glob("*.so")) if not path.name.startswith(_LEFT_OUT)]
    mounts += _shared_libraries([binary, *modules])
    covers = tuple(f"{inside}/{name}" for name in ("site-packages", "dist-packages") if (standard / name).is_dir())
    # One hash seed for all: a set must not list its items in another order in another sandbox.
    environment = {
        "PYTHONHOME": HOME,
        "LD_LIBRARY_PATH": _LIBRARIES,
        "PYTHONHASHSEED": "0",
        "PYTHONUTF8": "1",
        "PATH": f"{HOME}/bin",
        "HOME": "/box",
    }
    return Interpreter(tuple(mounts), covers, environment, (f"{HOME}/bin/python3", "-s", "-P", "-S", "-B"))


def _base_binary(prefix: Path) -> Path:
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for candidate in (prefix / "bin" / name, Path(sys.executable)):
        if candidate.resolve().is_file():
            return candidate.resolve()
    raise InputError(f"the sandbox needs the interpreter's binary, found none at {prefix / 'bin' / name}")


def _shared_libraries(binaries: list[Path]) -> list[tuple[Path, str]]:
    """What the dynamic linker would load for ``binaries``; the linker itself keeps its path, which binaries name."""
    try:
        listing = subprocess.run(
            ["ldd", *map(str, binaries)], capture_output=True, text=True, check=False, timeout=_LDD_DEADLINE_S
        ).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InputError(f"the sandbox needs `ldd` to find the interpreter's libraries: {error}") from error
    mounts: dict[str, Path] = {}
    for line in listing.splitlines():
        name, arrow, target = line.strip().partition(" => ")
        if line[:1].isspace() and arrow and target.startswith("/"):
            mounts[f"{_LIBRARIES}/{Path(name).name}"] = Path(target.split(" (")[0]).resolve()
        elif line[:1].isspace() and not arrow and name.startswith("/"):
            linker = name.split(" (")[0]
            mounts[linker] = Path(linker).resolve()
    return [(path, inside) for inside, path in sorted(mounts.items())]
