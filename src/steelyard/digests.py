"""Digests of stored data: xxh3-128, in hex. They find faults, not attackers."""

from pathlib import Path

import xxhash

_CHUNK_BYTES = 1 << 20


def digest_bytes(data: bytes | memoryview) -> str:
    """xxh3-128 of ``data`` in hex."""
    return xxhash.xxh3_128_hexdigest(data)


def digest_file(path: Path) -> tuple[str, int]:
    """xxh3-128 in hex of a file, and its size in bytes.

    Raises:
        OSError: the file cannot be read.
    """
    hasher = xxhash.xxh3_128()
    num_bytes = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            hasher.update(chunk)
            num_bytes += len(chunk)
    return hasher.hexdigest(), num_bytes
