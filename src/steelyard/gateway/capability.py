"""The attempt's API key: a signed statement of which attempt may call the policy, and until when.

A key is ``sty-<attempt_id>.<expiry in whole seconds>.<signature>``; see :mod:`steelyard.signing`. It says nothing
else and need not be stored: what the attempt may do is asked of the :class:`AttemptDirectory` at each call, so a dead
attempt's key stops working at once.
"""

from typing import Protocol

from steelyard.errors import Refused
from steelyard.signing import Signer
from steelyard.types import AttemptBinding

_MAX_VERIFIED = 4096
"""Keys whose signature need not be computed again; only those that are ours are kept."""


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
        self._signer = Signer(secret, prefix="sty-", purpose=b"gateway")
        self._verified: dict[str, tuple[str, int]] = {}

    def issue(self, attempt_id: str, expires_at_s: float) -> str:
        """The key of ``attempt_id`` until ``expires_at_s``, rounded up to a whole second."""
        return self._signer.sign(attempt_id, expires_at_s)

    def verify(self, key: str, now_s: float) -> str:
        """The attempt id of a key that we signed and that has not expired.

        Raises:
            Refused: ``foreign`` (not our key) or ``expired``. The message never holds the key.
        """
        signed = self._verified.get(key)
        if signed is None:
            signed = self._signer.read(key)
            if signed is None:
                raise Refused("foreign", "the API key is not one that this gateway issued")
            if len(self._verified) >= _MAX_VERIFIED:
                self._verified.clear()
            self._verified[key] = signed
        attempt_id, expires_at_s = signed
        if now_s >= expires_at_s:
            raise Refused("expired", f"the API key of attempt {attempt_id} has expired")
        return attempt_id
