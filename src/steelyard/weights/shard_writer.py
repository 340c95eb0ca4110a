"""Writing one shard: straight from the tensors' memory to the disk, its digest computed beside.

The format is that of safetensors (https://github.com/huggingface/safetensors#format): the length of the header as eight
little-endian bytes, the header in JSON padded with spaces, then the tensors without gaps. The library would first copy
all of them into one string, as large as the file.
"""

import json
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import xxhash

from steelyard.types import FileDigest

_ALIGNMENT_BYTES = 8
_WRITE_BYTES = 16 << 20
_DTYPE_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
    torch.bool: "BOOL",
}  # fmt: skip


def write_shard(path: Path, tensors: Mapping[str, torch.Tensor]) -> FileDigest:
    """Write a new file and fsync it. The tensors must not change meanwhile.

    Raises:
        OSError: the disk refused.
        KeyError: a dtype that weights do not have.
    """
    pieces = [memoryview(_header(tensors)), *map(_bytes_of, tensors.values())]
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="digest") as executor:
        digest = executor.submit(_digest, pieces)
        with path.open("xb", buffering=0) as file:
            for piece in pieces:
                for first in range(0, len(piece), _WRITE_BYTES):
                    _write_all(file.fileno(), piece[first : first + _WRITE_BYTES])
            os.fsync(file.fileno())
        return FileDigest(name=path.name, num_bytes=sum(map(len, pieces)), digest=digest.result())


def _header(tensors: Mapping[str, torch.Tensor]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name, tensor in tensors.items():
        end = begin + tensor.nbytes
        entries[name] = {
            "dtype": _DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % _ALIGNMENT_BYTES)
    return len(header).to_bytes(8, "little") + header


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    # Viewed as bytes, since numpy has no bfloat16; a scalar has no last dimension to view.
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _digest(pieces: Iterable[memoryview]) -> str:
    hasher = xxhash.xxh3_128()
    for piece in pieces:
        hasher.update(piece)
    return hasher.hexdigest()


def _write_all(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
