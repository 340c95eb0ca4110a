"""The tensors of a decoder that make up a version, in the dtype that is published, and their digests in memory."""

import torch

from steelyard.digests import digest_bytes
from steelyard.types import ParameterDigest


def published_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by name, each storage once (tied ones under their first name). No copies."""
    tensors: dict[str, torch.Tensor] = {}
    seen: set[tuple[int, int, tuple[int, ...]]] = set()
    for name, tensor in module.state_dict().items():
        key = (tensor.data_ptr(), tensor.storage_offset(), tuple(tensor.shape))
        if tensor.numel() and key in seen:
            continue
        seen.add(key)
        tensors[name] = tensor.detach()
    return tensors


def cast_tensors(tensors: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Floating-point tensors in ``dtype``, rounded to nearest; the others, and those that have it, as they are."""
    return {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}


def parameter_digests(tensors: dict[str, torch.Tensor]) -> tuple[ParameterDigest, ...]:
    """Digest of each tensor over its contiguous bytes in its own dtype, in the given order."""
    return tuple(
        ParameterDigest(name=name, shape=tuple(tensor.shape), dtype=dtype_name(tensor.dtype), digest=_digest(tensor))
        for name, tensor in tensors.items()
    )


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    """``torch.float32`` for ``float32``."""
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _digest(tensor: torch.Tensor) -> str:
    # Viewed as bytes, since numpy has no bfloat16; a scalar has no last dimension to view.
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return digest_bytes(flat.numpy().data)
