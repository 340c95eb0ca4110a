"""The secret of a run, which signs the keys of those who work for it. Made once, readable by its owner alone."""

import os
import secrets
from pathlib import Path

from steelyard.coordinator.capability import CapabilityRing, Role
from steelyard.durable import storage_errors
from steelyard.errors import RunDirectoryError
from steelyard.run.directory import RunDirectory

_SECRET_BYTES = 32
_OTHERS = 0o077


def run_secret(directory: RunDirectory) -> bytes:
    """The 32 bytes in ``coordinator.secret``, in hex there; made at the first call.

    Raises:
        RunDirectoryError: the file can be read or written by others, or holds something else.
        StorageFailed: the disk refuses.
    """
    path = directory.secret
    if not path.exists():
        _make(path)
    with storage_errors(str(path)):
        mode, text = path.stat().st_mode & 0o777, path.read_text(encoding="ascii", errors="replace").strip()
    if mode & _OTHERS:
        raise RunDirectoryError(f"{path} must be for its owner alone (chmod 600), got mode {mode:04o}")
    try:
        secret = bytes.fromhex(text)
    except ValueError:
        secret = b""
    if len(secret) != _SECRET_BYTES:
        raise RunDirectoryError(f"{path} must hold {_SECRET_BYTES} bytes in hex, it does not")
    return secret


def _make(path: Path) -> None:
    """Whoever is first makes it; nobody ever sees a part of it, nor two different ones."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    with storage_errors(str(path)):
        os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        try:
            with temporary.open("wb") as file:
                file.write(secrets.token_hex(_SECRET_BYTES).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
            path.hardlink_to(temporary)
        except FileExistsError:
            pass
        finally:
            temporary.unlink()


def issue_key(directory: RunDirectory, role: Role, name: str, expires_at_s: float) -> str:
    """A key of ``name`` in ``role`` for this run, until ``expires_at_s`` (seconds since the Unix epoch).

    Raises:
        InputError: the name is none, or the secret cannot be used.
    """
    return CapabilityRing(run_secret(directory)).issue(role, name, expires_at_s)
