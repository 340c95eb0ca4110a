"""Sealed traces: their bytes, and reading those in a directory, by whoever must not write.

A sealed trace is its digest in hex, a newline, and the msgpack bytes of the Trace that the digest is over.
"""

import os
import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from steelyard.digests import digest_bytes
from steelyard.errors import IntegrityError
from steelyard.types import EndReason, ToolRecord, Trace

_ATTEMPT_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_DIGEST_CHARS = 32
_TRACE_DECODER = msgspec.msgpack.Decoder(Trace)


class _SplicedTrace(msgspec.Struct, frozen=True, kw_only=True):
    """A Trace whose turns are encoded already; its bytes are those of the Trace."""

    attempt_id: str
    turns: tuple[msgspec.Raw, ...]
    end_reason: EndReason
    tools: tuple[ToolRecord, ...]


class SealedTraces:
    """The sealed traces below ``root``, read-only."""

    def __init__(self, root: Path) -> None:
        self._sealed = root / "sealed"

    def is_sealed(self, attempt_id: str) -> bool:
        """Whether the attempt has a sealed trace."""
        return os.access(f"{self._sealed}/{check_attempt_id(attempt_id)}", os.F_OK)

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
        return decode_sealed(attempt_id, data, str(path))


def splice_sealed(
    attempt_id: str, turns: Sequence[memoryview], end_reason: EndReason, tools: tuple[ToolRecord, ...]
) -> tuple[bytes, str]:
    """The bytes of a sealed trace, and the digest in them.

    Args:
        turns: the msgpack bytes of each Turn, which go in as they are.
    """
    trace = _SplicedTrace(
        attempt_id=attempt_id,
        turns=tuple(msgspec.Raw(turn) for turn in turns),
        end_reason=end_reason,
        tools=tools,
    )
    body = msgspec.msgpack.encode(trace)
    digest = digest_bytes(body)
    return digest.encode("ascii") + b"\n" + body, digest


def decode_sealed(attempt_id: str, data: bytes, where: str) -> tuple[Trace, str]:
    """The trace in the bytes of a sealed one, and its digest, which was checked.

    Args:
        where: the place of the bytes, for the message.

    Raises:
        IntegrityError: they are not what their digest and name say.
    """
    stated = data[:_DIGEST_CHARS].decode("ascii", errors="replace")
    body = memoryview(data)[_DIGEST_CHARS + 1 :]
    if (found := digest_bytes(body)) != stated:
        raise IntegrityError(f"trace {attempt_id} must have digest {stated}, but its bytes have {found} ({where})")
    try:
        trace = _TRACE_DECODER.decode(body)
    except msgspec.DecodeError as error:
        raise IntegrityError(f"trace {attempt_id} is not a Trace record: {error} ({where})") from error
    foreign = {trace.attempt_id, *(turn.attempt_id for turn in trace.turns)} - {attempt_id}
    if foreign:
        raise IntegrityError(f"trace {attempt_id} must hold that attempt only, but holds {sorted(foreign)} ({where})")
    return trace, stated


def trace_path(directory: Path, attempt_id: str) -> Path:
    """Where an attempt lies in ``directory``.

    Raises:
        IntegrityError: the id could lead elsewhere.
    """
    return directory / check_attempt_id(attempt_id)


def check_attempt_id(attempt_id: str) -> str:
    """The id as it came.

    Raises:
        IntegrityError: it is none, and could lead elsewhere as the name of a file or object.
    """
    if not _ATTEMPT_ID.fullmatch(attempt_id):
        raise IntegrityError(f"an attempt id must be letters, digits, '_' and '-', not {attempt_id!r}")
    return attempt_id
