"""Bytes of named tensors, slice by slice, and their digest."""

from collections.abc import Iterable, Mapping, Sequence

import torch

from steelyard.digests import digest_bytes
from steelyard.errors import IntegrityError
from steelyard.trainer.slice_plan import Slice


def read_slices(tensors: Mapping[str, torch.Tensor], slices: Iterable[Slice]) -> bytes:
    """The bytes of slices, one after the other.

    Raises:
        IntegrityError: a slice is of no tensor that is here.
    """
    return b"".join(bytes(_bytes_of(_part(tensors, one))) for one in slices)


def write_slices(tensors: Mapping[str, torch.Tensor], slices: Sequence[Slice], data: bytes) -> None:
    """Put bytes that :func:`read_slices` gave into contiguous tensors.

    Raises:
        IntegrityError: a slice is of no tensor that is here, or the bytes are not as many as the slices have.
    """
    parts = [_part(tensors, one) for one in slices]
    expected = sum(part.nbytes for part in parts)
    if len(data) != expected:
        raise IntegrityError(f"slices of {expected} bytes must come with as many, got {len(data)}")
    offset = 0
    with torch.no_grad():
        for part in parts:
            if part.numel():
                part.copy_(torch.frombuffer(bytearray(data[offset : offset + part.nbytes]), dtype=part.dtype))
            offset += part.nbytes


def tensors_digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """One digest over names, dtypes, shapes and bytes of tensors as they stand in memory, whatever their order."""
    lines = sorted(
        f"{name} {tensor.dtype} {tuple(tensor.shape)} {digest_bytes(_bytes_of(tensor.detach().contiguous()))}"
        for name, tensor in tensors.items()
    )
    return digest_bytes("\n".join(lines).encode())


def _part(tensors: Mapping[str, torch.Tensor], one: Slice) -> torch.Tensor:
    tensor = tensors.get(one.name)
    if tensor is None or not 0 <= one.start <= one.stop <= tensor.numel():
        size = "no such tensor" if tensor is None else f"{tensor.numel()} elements"
        raise IntegrityError(f"slice [{one.start}, {one.stop}) of {one.name} must lie in a tensor, got {size}")
    return tensor.detach().view(-1)[one.start : one.stop]


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    # Viewed as bytes, since numpy has no bfloat16; a scalar has no last dimension to view.
    return tensor.reshape(-1).view(torch.uint8).numpy().data
