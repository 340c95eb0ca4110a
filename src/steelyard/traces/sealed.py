"""Reading sealed traces, by whoever must not write: ``audit``, ``show``, a second process."""

import re
from pathlib import Path

import msgspec

from steelyard.digests import digest_bytes
from steelyard.errors import IntegrityError
from steelyard.types import Trace

_ATTEMPT_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_DIGEST_CHARS = 32
_TRACE_DECODER = msgspec.msgpack.Decoder(Trace)


class SealedTraces:
    """The sealed traces below ``root``, read-only."""

    def __init__(self, root: Path) -> None:
        self._sealed = root / "sealed"

    def is_sealed(self, attempt_id: str) -> bool:
        """Whether the attempt has a sealed trace."""
        return trace_path(self._sealed, attempt_id).exists()

    def read_now(self, attempt_id: str) -> tuple[Trace, str]:
        """The sealed trace and its digest, which was checked; blocking.

        Raises:
            IntegrityError: there is none, or it is not what its digest and name say.
        """
        path = trace_path(self._sealed, attempt_id)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            raise IntegrityError(f"attempt {attempt_id} must have a sealed trace, but there is no {path}") from None
        stated = data[:_DIGEST_CHARS].decode("ascii", errors="replace")
        body = memoryview(data)[_DIGEST_CHARS + 1 :]
        if (found := digest_bytes(body)) != stated:
            raise IntegrityError(f"trace {attempt_id} must have digest {stated}, but its bytes have {found} ({path})")
        try:
            trace = _TRACE_DECODER.decode(body)
        except msgspec.DecodeError as error:
            raise IntegrityError(f"trace {attempt_id} is not a Trace record: {error} ({path})") from error
        foreign = {trace.attempt_id, *(turn.attempt_id for turn in trace.turns)} - {attempt_id}
        if foreign:
            raise IntegrityError(
                f"trace {attempt_id} must hold that attempt only, but holds {sorted(foreign)} ({path})"
            )
        return trace, stated


def trace_path(directory: Path, attempt_id: str) -> Path:
    """Where an attempt lies in ``directory``.

    Raises:
        IntegrityError: the id could lead elsewhere.
    """
    if not _ATTEMPT_ID.fullmatch(attempt_id):
        raise IntegrityError(f"an attempt id must be letters, digits, '_' and '-', not {attempt_id!r}")
    return directory / attempt_id
