"""The attempt's API key: a signed statement of which attempt may call the policy, and until when.

A key is ``sty-<attempt_id>.<expiry in whole seconds>.<keyed BLAKE2b-256 of both, base64url>`` (RFC 7693: the
keyed mode is a MAC; unlike ``hmac.digest`` of OpenSSL it does not give up the interpreter lock in the middle
of a request). It says nothing else and is stored nowhere: what the attempt may do is asked of the
:class:`AttemptDirectory` at each call, so a dead attempt's key stops working at once.
"""

import base64
import hashlib
import hmac
import math
from typing import Protocol

from steelyard.errors import Refused
from steelyard.types import AttemptBinding

_PREFIX = "sty-"
_MIN_SECRET_BYTES = 32


class AttemptDirectory(Protocol):
    """Knows the live attempts."""

    def binding(self, attempt_id: str) -> AttemptBinding | None:
        """What the attempt is bound to; None for one that has ended or never was."""
        ...


class KeyRing:
    """Issues and verifies attempt keys.

    Args:
        secret: 32 to 64 random bytes, fresh for each run of the control process.
    """

    def __init__(self, secret: bytes) -> None:
        if not _MIN_SECRET_BYTES <= len(secret) <= hashlib.blake2b.MAX_KEY_SIZE:
            raise ValueError(f"secret must be {_MIN_SECRET_BYTES} to 64 bytes, not {len(secret)}")
        self._secret = secret

    def issue(self, attempt_id: str, expires_at_s: float) -> str:
        """The key of ``attempt_id`` until ``expires_at_s``, rounded up to a whole second."""
        statement = f"{attempt_id}.{math.ceil(expires_at_s)}"
        return f"{_PREFIX}{statement}.{self._sign(statement)}"

    def verify(self, key: str, now_s: float) -> str:
        """The attempt id of a key that we signed and that has not expired.

        Raises:
            Refused: ``foreign`` (not our key) or ``expired``. The message never holds the key.
        """
        statement, _, signature = key.removeprefix(_PREFIX).rpartition(".")
        if not key.startswith(_PREFIX) or not hmac.compare_digest(
            signature.encode("utf-8"), self._sign(statement).encode("ascii")
        ):
            raise Refused("foreign", "the API key is not one that this gateway issued")
        attempt_id, _, expires_at_s = statement.rpartition(".")
        if now_s >= int(expires_at_s):
            raise Refused("expired", f"the API key of attempt {attempt_id} has expired")
        return attempt_id

    def _sign(self, statement: str) -> str:
        digest = hashlib.blake2b(statement.encode("utf-8"), key=self._secret, digest_size=32).digest()
        return base64.urlsafe_b64encode(digest).rstrip(b"=").decode("ascii")
