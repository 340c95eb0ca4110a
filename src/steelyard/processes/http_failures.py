"""Failures of calls over HTTP: one msgpack record in the body, its status for machines in between."""

import msgspec
from aiohttp import web

from steelyard.errors import InputError, ProtocolMismatch, Refused, RunError, SteelyardError
from steelyard.processes import frames
from steelyard.processes.http_port import read_body
from steelyard.types import Record

CONTENT_TYPE = "application/msgpack"


class Failed(Record, frozen=True, kw_only=True, tag_field="result", tag="failed"):
    """``kind`` is the name of an error in ``steelyard.errors``; ``reason`` is set where it is ``Refused``."""

    kind: str
    reason: str
    message: str


class HttpError(Exception):
    """A failure with its status."""

    def __init__(self, status: int, error: SteelyardError) -> None:
        self.status = status
        self.error = error
        super().__init__(str(error))


def as_http(error: Exception) -> HttpError | None:
    """The status that goes with an error of ours; None for one that nobody raised on purpose."""
    match error:
        case HttpError():
            return error
        case ProtocolMismatch():
            return HttpError(426, error)
        case InputError():
            return HttpError(400, error)
        case Refused():
            return HttpError(409, error)
        case RunError():
            return HttpError(503, error)
        case SteelyardError():
            return HttpError(500, error)
        case _:
            return None


def failure_response(failure: HttpError) -> web.Response:
    """The answer that says so."""
    kind, body = frames.describe(failure.error)
    record = Failed(kind=kind, reason=body.reason, message=body.message)
    return web.Response(body=msgspec.msgpack.encode(record), status=failure.status, content_type=CONTENT_TYPE)


def failure_of(data: bytes, peer: str, what: str) -> SteelyardError | None:
    """The error that a body describes; None where it is no such body."""
    try:
        failed = msgspec.msgpack.decode(data, type=Failed)
    except msgspec.MsgspecError:
        return None
    return frames.error_of(failed.kind, frames.ErrorBody(reason=failed.reason, message=failed.message), peer, what)


async def body_of(request: web.BaseRequest, deadline_s: float) -> bytes:
    """The whole body of a request. Raises ``HttpError`` (408) where it does not arrive in time."""
    try:
        return await read_body(request, deadline_s)
    except TimeoutError:
        raise HttpError(408, InputError(f"the body must arrive within {deadline_s:.0f} s")) from None
