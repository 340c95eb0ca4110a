"""Keys that carry a signed statement: who may do what, until when. Stored nowhere, verified by whoever has the secret.

A key is ``<prefix><statement>.<keyed BLAKE2b-256 of the statement, base64url>`` (RFC 7693: the keyed mode is a MAC;
unlike ``hmac.digest`` of OpenSSL it does not give up the interpreter lock in the middle of a request). The purpose goes
into the hash as its personalisation, so that a key of one kind is never a key of another under the same secret.
"""

import base64
import hashlib
import hmac
import math

_MIN_SECRET_BYTES = 32


class Signer:
    """Signs and verifies the statements of one purpose.

    Args:
        secret: 32 to 64 random bytes.
        prefix: what every key starts with, for people and for secret scanners.
        purpose: at most 16 bytes; keys of unlike purposes never verify as one another.

    Raises:
        ValueError: the secret or the purpose has the wrong size.
    """

    def __init__(self, secret: bytes, *, prefix: str, purpose: bytes) -> None:
        if not _MIN_SECRET_BYTES <= len(secret) <= hashlib.blake2b.MAX_KEY_SIZE:
            raise ValueError(f"secret must be {_MIN_SECRET_BYTES} to 64 bytes, not {len(secret)}")
        if len(purpose) > hashlib.blake2b.PERSON_SIZE:
            raise ValueError(f"purpose must be at most {hashlib.blake2b.PERSON_SIZE} bytes, not {len(purpose)}")
        self._secret = secret
        self._prefix = prefix
        self._purpose = purpose

    def sign(self, subject: str, expires_at_s: float) -> str:
        """The key that states ``subject`` until ``expires_at_s``, rounded up to a whole second."""
        statement = f"{subject}.{math.ceil(expires_at_s)}"
        return f"{self._prefix}{statement}.{self._signature(statement)}"

    def read(self, key: str) -> tuple[str, int] | None:
        """Subject and expiry (seconds since the Unix epoch) of a key that we signed; None for anything else."""
        statement, _, signature = key.removeprefix(self._prefix).rpartition(".")
        if not key.startswith(self._prefix) or not hmac.compare_digest(
            signature.encode("utf-8", "replace"), self._signature(statement).encode("ascii")
        ):
            return None
        subject, _, expires_at_s = statement.rpartition(".")
        return subject, int(expires_at_s)

    def _signature(self, statement: str) -> str:
        data = statement.encode("utf-8", "replace")
        digest = hashlib.blake2b(data, key=self._secret, person=self._purpose, digest_size=32).digest()
        return base64.urlsafe_b64encode(digest).rstrip(b"=").decode("ascii")
