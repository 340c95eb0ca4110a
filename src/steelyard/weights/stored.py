"""The parameters of a stored version, read from its bytes. Imports no torch, so that an audit can look for itself.

The format of safetensors: 8 bytes little-endian length, a JSON header of that length, then the tensors' bytes; the
header has ``{name: {"dtype", "shape", "data_offsets": [begin, end]}}`` with offsets behind the header.
https://github.com/huggingface/safetensors#format
"""

import json
import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from steelyard.digests import digest_bytes
from steelyard.errors import IntegrityError
from steelyard.types import ParameterDigest
from steelyard.weights.shards import WEIGHTS_PATTERN

_LENGTH_BYTES = 8
_DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip


def stored_parameters(directory: Path) -> tuple[ParameterDigest, ...]:
    """Name, shape, dtype and digest of every parameter in a version directory, as its shards hold them now.

    Raises:
        IntegrityError: there are no shards, or one is no safetensors file.
    """
    shards = sorted(directory.glob(WEIGHTS_PATTERN))
    if not shards:
        raise IntegrityError(f"{directory} must hold weights as {WEIGHTS_PATTERN}, found none")
    return tuple(parameter for shard in shards for parameter in _in_shard(shard))


def _in_shard(path: Path) -> tuple[ParameterDigest, ...]:
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return tuple(_parameters(memoryview(data)))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise IntegrityError(f"{path} must be a safetensors file: {error!r}") from error


def _parameters(data: memoryview) -> Iterator[ParameterDigest]:
    with data:
        body = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little")
        with data[_LENGTH_BYTES:body] as header:
            tensors: dict[str, Any] = json.loads(bytes(header))
        for name, tensor in tensors.items():
            if name == "__metadata__":
                continue
            begin, end = tensor["data_offsets"]
            with data[body + begin : body + end] as view:
                if len(view) != end - begin:
                    raise ValueError(f"{name} ends at byte {body + end}, the file at {len(data)}")
                yield ParameterDigest(
                    name=name, shape=tuple(tensor["shape"]), dtype=_DTYPES[tensor["dtype"]], digest=digest_bytes(view)
                )
