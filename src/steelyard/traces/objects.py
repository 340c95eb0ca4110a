"""The object store: whole pieces of bytes under keys, in a directory or in S3.

A key is a path of names, such as ``artifacts/1f/1f0c...``. An object is there whole or not at all, and once ``put`` has
returned it stays. Stores are opened by :mod:`steelyard.traces.opening`.
"""

import re
from typing import Protocol

from steelyard.errors import IntegrityError
from steelyard.types import Record

_KEY = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*(/[A-Za-z0-9_-][A-Za-z0-9_.-]*)*")


class ObjectInfo(Record, frozen=True, kw_only=True):
    """One stored object; ``modified_at_s`` is when it was last put, by the store's clock, since the Unix epoch."""

    key: str
    num_bytes: int
    modified_at_s: float


class ObjectStore(Protocol):
    """Where objects lie. Every call has a deadline.

    All calls raise StorageFailed where the store refuses or does not answer in time; it names place and key, and never
    holds credentials.
    """

    @property
    def url(self) -> str:
        """Where the store is, for messages and for other processes."""
        ...

    async def put(self, key: str, data: bytes) -> None:
        """Store an object durably, in place of an older one under this key.

        Where that fails, what is under the key is what was there before, or ``data`` without the promise; never a
        part of it.
        """
        ...

    async def get(self, key: str) -> bytes:
        """The object's bytes.

        Raises:
            IntegrityError: there is no such object.
        """
        ...

    async def exists(self, key: str) -> bool:
        """Whether there is such an object."""
        ...

    async def list(self, prefix: str = "") -> tuple[ObjectInfo, ...]:
        """All objects whose key starts with ``prefix``, ordered by key."""
        ...

    async def delete(self, key: str) -> None:
        """Remove an object; nothing happens where there is none."""
        ...

    async def close(self) -> None:
        """Finish what was begun and give threads and connections back."""
        ...


def check_key(key: str) -> str:
    """The key as it came.

    Raises:
        IntegrityError: it could lead out of the store.
    """
    if not _KEY.fullmatch(key):
        raise IntegrityError(f"the key of an object must be names of letters, digits, '_', '.', '-', not {key!r}")
    return key
