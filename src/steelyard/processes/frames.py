"""Frames on a Unix socket: a 4-byte big-endian length, then one msgpack array.

A request is ``[id, "call", method, body]``; answers are ``[id, "reply", "", body]``, any number of
``[id, "event", "", body]`` before it, or ``[id, "error", kind, body]`` with ``body = [reason, message]``.
``[id, "cancel", "", nil]`` withdraws a request. msgpack only: no pickle ever crosses a process boundary.
"""

import asyncio
import struct
from typing import Literal

import msgspec

from steelyard import errors
from steelyard.packed_floats import encode_packed

MAX_FRAME_BYTES = 512 << 20
_LENGTH = struct.Struct(">I")

FrameKind = Literal["call", "reply", "event", "error", "cancel"]


class Frame(msgspec.Struct, array_like=True, frozen=True):
    """One message in either direction; ``name`` is the method of a call or the kind of an error."""

    id: int
    kind: FrameKind
    name: str
    body: msgspec.Raw


class ErrorBody(msgspec.Struct, array_like=True, frozen=True):
    """Body of an error frame."""

    reason: str
    message: str


_DECODER = msgspec.msgpack.Decoder(Frame)
_ENCODER = msgspec.msgpack.Encoder(enc_hook=encode_packed)
NOTHING = msgspec.Raw(msgspec.msgpack.encode(None))


def encode(frame: Frame) -> bytearray:
    """The frame's bytes, length first.

    Raises:
        ValueError: the frame is larger than ``MAX_FRAME_BYTES``.
    """
    return encode_with(frame.id, frame.kind, frame.name, frame.body)


def encode_with(call_id: int, kind: FrameKind, name: str, record: object) -> bytearray:
    """As :func:`encode`, of a frame whose body is the record's bytes, which are not made apart."""
    data = bytearray()
    _ENCODER.encode_into((call_id, kind, name, record), data, _LENGTH.size)
    num_bytes = len(data) - _LENGTH.size
    if num_bytes > MAX_FRAME_BYTES:
        raise ValueError(f"a frame must be <= {MAX_FRAME_BYTES} bytes, got {num_bytes} ({kind} {name})")
    _LENGTH.pack_into(data, 0, num_bytes)
    return data


async def read(reader: asyncio.StreamReader) -> Frame | None:
    """The next frame, or None where the other side has closed.

    Raises:
        errors.RemoteFailed: the length or the payload is not one of ours.
    """
    try:
        num_bytes = _payload_bytes(await reader.readexactly(_LENGTH.size), 0)
        return _decode(await reader.readexactly(num_bytes))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


class FrameBuffer:
    """Frames out of bytes as they arrive."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[Frame]:
        """The frames that ``data`` completes.

        Raises:
            errors.RemoteFailed: a length or a payload is not one of ours.
        """
        if self._rest:
            self._rest += data
        found, offset = [], 0
        with memoryview(self._rest or data) as view:
            while len(view) >= offset + _LENGTH.size:
                start = offset + _LENGTH.size
                end = start + _payload_bytes(view, offset)
                if len(view) < end:
                    break
                found.append(_decode(view[start:end].tobytes()))
                offset = end
            if not self._rest:
                self._rest += view[offset:]
                return found
        del self._rest[:offset]
        return found


def _payload_bytes(data: bytes | memoryview, offset: int) -> int:
    (num_bytes,) = _LENGTH.unpack_from(data, offset)
    if num_bytes > MAX_FRAME_BYTES:
        raise errors.RemoteFailed(f"a frame must be <= {MAX_FRAME_BYTES} bytes, got {num_bytes}")
    return int(num_bytes)


def _decode(payload: bytes) -> Frame:
    try:
        return _DECODER.decode(payload)
    except msgspec.DecodeError as error:
        raise errors.RemoteFailed(f"a frame must be a msgpack array of four, got {error}") from error


_BY_MESSAGE: dict[str, type[errors.SteelyardError]] = {
    cls.__name__: cls
    for cls in (
        errors.InputError,
        errors.ConfigError,
        errors.ProtocolMismatch,
        errors.RunDirectoryError,
        errors.RunError,
        errors.StorageFailed,
        errors.JournalFenced,
        errors.IllegalTransition,
        errors.IntegrityError,
        errors.EngineError,
    )
}


def describe(error: BaseException) -> tuple[str, ErrorBody]:
    """The kind of ``error`` and what is said of it, for any wire; :func:`error_of` turns it back."""
    reason, message = (error.reason, error.detail) if isinstance(error, errors.Refused) else ("", str(error))
    return type(error).__name__, ErrorBody(reason=reason, message=message)


def error_of(kind: str, body: ErrorBody, peer: str, method: str) -> errors.SteelyardError:
    """The error that was described; an unknown kind becomes :class:`errors.RemoteFailed`."""
    if kind == errors.Refused.__name__:
        return errors.Refused(body.reason, body.message)
    known = _BY_MESSAGE.get(kind)
    if known is not None:
        return known(body.message)
    return errors.RemoteFailed(f"{method} at {peer} failed with {kind}: {body.message}")


def error_frame(call_id: int, error: BaseException) -> Frame:
    """The frame that carries ``error`` to the caller."""
    kind, body = describe(error)
    return Frame(call_id, "error", kind, msgspec.Raw(_ENCODER.encode(body)))


def error_from(frame: Frame, peer: str, method: str) -> errors.SteelyardError:
    """The error that an error frame carries; an unknown kind becomes :class:`errors.RemoteFailed`."""
    return error_of(frame.name, msgspec.msgpack.decode(frame.body, type=ErrorBody), peer, method)
