"""Keys of workers, scorers, trainers and operators: a signed statement of a role, a name and an expiry.

A key is ``stc-<role>.<worker_id>.<expiry in whole seconds>.<signature>``; see :mod:`steelyard.signing`. Who has the
secret can issue keys; the coordinator only verifies them, so nothing is stored and a restart changes nothing.
"""

import enum
import re

from steelyard.errors import InputError, Refused
from steelyard.signing import Signer
from steelyard.types import Record

_PREFIX = "stc-"
# Only keys with a good signature are remembered, so strangers can neither fill nor flush the memory.
_MAX_KNOWN_KEYS = 10_000
_WORKER_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")


class Role(enum.StrEnum):
    """What the holder of a key is."""

    WORKER = "worker"
    SCORER = "scorer"
    TRAINER = "trainer"
    OPERATOR = "operator"


class Capability(Record, frozen=True, kw_only=True):
    """What a key states. ``worker_id`` is the name under which its holder leases."""

    role: Role
    worker_id: str
    expires_at_s: float


class CapabilityRing:
    """Issues and verifies keys.

    Args:
        secret: 32 to 64 random bytes, kept as long as keys are to stay valid.
    """

    def __init__(self, secret: bytes) -> None:
        self._signer = Signer(secret, prefix=_PREFIX, purpose=b"coordinator")
        self._known: dict[str, Capability] = {}

    def issue(self, role: Role, worker_id: str, expires_at_s: float) -> str:
        """The key of ``worker_id`` in ``role`` until ``expires_at_s``, rounded up to a whole second.

        Raises:
            InputError: the name is empty, too long or holds other than letters, digits, ``_`` and ``-``.
        """
        if not _WORKER_ID.fullmatch(worker_id):
            raise InputError(f"worker_id: must be 1 to 64 letters, digits, _ or -, got {worker_id!r}")
        return self._signer.sign(f"{role}.{worker_id}", expires_at_s)

    def verify(self, key: str, now_s: float) -> Capability:
        """What a key states that we signed and that has not expired.

        Raises:
            Refused: ``foreign`` (not our key) or ``expired``. The message never holds the key.
        """
        capability = self._known.get(key)
        if capability is None:
            capability = self._read(key)
            if len(self._known) >= _MAX_KNOWN_KEYS:
                self._known.clear()
            self._known[key] = capability
        if now_s >= capability.expires_at_s:
            raise Refused("expired", f"the key of {capability.role} {capability.worker_id} has expired")
        return capability

    def _read(self, key: str) -> Capability:
        signed = self._signer.read(key)
        if signed is None:
            raise Refused("foreign", "the key is not one that this coordinator's secret signed")
        subject, expires_at_s = signed
        role, _, worker_id = subject.partition(".")
        return Capability(role=Role(role), worker_id=worker_id, expires_at_s=float(expires_at_s))


def worker_of(key: str) -> str:
    """The name in a key, unverified: for its holder, who has no secret.

    Raises:
        InputError: it has not the form of a key. The message never holds the key.
    """
    parts = key.removeprefix(_PREFIX).split(".")
    if not key.startswith(_PREFIX) or len(parts) != 4 or not _WORKER_ID.fullmatch(parts[1]):
        raise InputError("key: must be stc-<role>.<worker_id>.<expiry>.<signature>")
    return parts[1]
