"""The content-addressed blob store: bytes under their own digest, in whatever store of objects.

put    consumes bytes; waits for the store; produces a digest
get    consumes a digest; waits for the store; produces bytes that have it
"""

from steelyard.digests import digest_bytes
from steelyard.errors import IntegrityError
from steelyard.traces.objects import ObjectStore
from steelyard.types import Record

_DIGEST_CHARS = frozenset("0123456789abcdef")


class BlobInfo(Record, frozen=True, kw_only=True):
    """One stored blob; ``modified_at_s`` is when it was last put, by the store's clock."""

    digest: str
    num_bytes: int
    modified_at_s: float


class BlobStore:
    """Blobs named by their digest: ``<prefix><2 hex>/<32 hex>``. Putting equal bytes twice keeps one blob.

    All calls raise StorageFailed where the store refuses or does not answer in time.

    Args:
        objects: where the blobs lie; closed with this store.
        prefix: of all keys, empty or ending with ``/``.
    """

    def __init__(self, objects: ObjectStore, prefix: str = "") -> None:
        self._objects = objects
        self._prefix = prefix

    async def put(self, data: bytes) -> str:
        """Store ``data`` durably and return its digest.

        It is written again where it is stored already: that makes it young, so that no sweep takes it.
        """
        digest = digest_bytes(data)
        await self._objects.put(self._key(digest), data)
        return digest

    async def get(self, digest: str) -> bytes:
        """The blob's bytes.

        Raises:
            IntegrityError: there is no such blob, or its bytes do not have this digest.
        """
        key = self._key(digest)
        data = await self._objects.get(key)
        if (found := digest_bytes(data)) != digest:
            where = f"{self._objects.url}/{key}"
            raise IntegrityError(f"blob {digest} must have its name as digest, but its bytes have {found} ({where})")
        return data

    async def exists(self, digest: str) -> bool:
        """Whether the blob is stored."""
        return await self._objects.exists(self._key(digest))

    async def delete(self, digest: str) -> None:
        """Remove the blob; nothing happens where there is none."""
        await self._objects.delete(self._key(digest))

    async def list(self) -> tuple[BlobInfo, ...]:
        """All blobs, ordered by digest. What is no blob's name is left out."""
        listed = await self._objects.list(self._prefix)
        return tuple(
            BlobInfo(digest=digest, num_bytes=info.num_bytes, modified_at_s=info.modified_at_s)
            for info in listed
            if _is_digest(digest := info.key.rpartition("/")[2]) and info.key == self._key(digest)
        )

    async def close(self) -> None:
        """Close the store of objects."""
        await self._objects.close()

    def _key(self, digest: str) -> str:
        return self._prefix + blob_key(digest)


def blob_key(digest: str) -> str:
    """Where a blob lies in its store.

    Raises:
        IntegrityError: it is no digest.
    """
    if not _is_digest(digest):
        raise IntegrityError(f"a blob digest must be 32 hex digits, not {digest!r}")
    return f"{digest[:2]}/{digest}"


def _is_digest(text: str) -> bool:
    return len(text) == 32 and _DIGEST_CHARS.issuperset(text)
