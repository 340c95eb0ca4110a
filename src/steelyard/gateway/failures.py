"""What can go wrong with a request, in no dialect: each dialect says it in its own form (``dialects``).

::

    exception of ours --as_failure--> Failure(kind) --dialect--> status, error object, Retry-After
"""

import enum
import logging

from aiohttp import web

from steelyard.errors import DeadlineExceeded, EngineError, InputError, Refused, RunError
from steelyard.gateway.service import Overloaded, TurnsUsedUp

_LOG = logging.getLogger(__name__)
_RETRY_AFTER_S = 1.0


class FailureKind(enum.StrEnum):
    """Whose fault a failure is, and whether to try again. ``gateway.refused.<kind>`` counts each."""

    BAD_REQUEST = "bad_request"
    BAD_KEY = "bad_key"
    FORBIDDEN = "forbidden"
    NOT_FOUND = "not_found"
    SLOW_BODY = "slow_body"
    TOO_LARGE = "too_large"
    RATE_LIMITED = "rate_limited"
    OVERLOADED = "overloaded"
    UNAVAILABLE = "unavailable"
    TIMED_OUT = "timed_out"
    ENGINE_FAILED = "engine_failed"
    BUG = "bug"


class Failure(Exception):
    """A request that is not served.

    Args:
        param: the field that is wrong, as the caller named it.
        code: OpenAI's word for it, where there is one that says more than ``kind``.
        retry_after_s: when to try again; None where that would not help.
    """

    def __init__(
        self,
        kind: FailureKind,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        self.kind = kind
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s
        super().__init__(message)

    @property
    def headers(self) -> dict[str, str]:
        """``Retry-After`` in whole seconds, where trying again may help."""
        if self.retry_after_s is None:
            return {}
        return {"Retry-After": f"{max(1, round(self.retry_after_s))}"}


def bad_request(message: str, param: str | None = None, code: str | None = None) -> Failure:
    """A request that asks for what cannot be."""
    return Failure(FailureKind.BAD_REQUEST, message, param=param, code=code)


def as_failure(error: Exception, max_body_bytes: int) -> Failure:
    """The failure that an exception means; those of the system are logged."""
    kind = FailureKind
    match error:
        case Failure():
            return error
        case web.HTTPRequestEntityTooLarge():
            return Failure(kind.TOO_LARGE, f"The request body must be at most {max_body_bytes} bytes.")
        case InputError():
            return bad_request(str(error))
        case TurnsUsedUp():
            return Failure(kind.FORBIDDEN, str(error), code="max_turns")
        case Refused():
            return Failure(kind.BAD_KEY, str(error))
        case Overloaded(is_attempts_fault=is_attempts_fault):
            crowd = kind.RATE_LIMITED if is_attempts_fault else kind.OVERLOADED
            return Failure(crowd, str(error), retry_after_s=error.retry_after_s)
        case DeadlineExceeded():
            return _logged(Failure(kind.TIMED_OUT, str(error), retry_after_s=_RETRY_AFTER_S))
        case RunError():
            return _logged(Failure(kind.UNAVAILABLE, str(error), retry_after_s=_RETRY_AFTER_S))
        case EngineError():
            return _logged(Failure(kind.ENGINE_FAILED, str(error)))
        case _:
            _LOG.error("request failed", exc_info=error)
            return Failure(kind.BUG, "The gateway failed.")


def _logged(failure: Failure) -> Failure:
    _LOG.warning("request failed: %s", failure)
    return failure
