"""Checkpoints of a sharded core: each rank writes what it holds, and any number of ranks can read them.

::

    step-000010/ rank-00000-of-00002  rank-00001-of-00002  checkpoint.json (last, by rank 0)

A file is in the safetensors format: the shards of parameters and of the optimizer's moments, by name. Shards are cut
along the first dimension in rank order, so putting them together is concatenation. No pickle.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import safetensors
import safetensors.torch
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from steelyard.digests import digest_file
from steelyard.durable import new_temporary, publish_directory, storage_errors, temporary_of, write_durably
from steelyard.errors import IntegrityError
from steelyard.trainer.checkpoint import MANIFEST_NAME, WEIGHTS_NAME
from steelyard.trainer.parallel import ShardedCore
from steelyard.types import FileDigest, Record

_MOMENTS = ("exp_avg", "exp_avg_sq")
_STEP = "step"


class ShardedManifest(Record, frozen=True, kw_only=True):
    """``step`` is the next step; ``files`` are those of all ranks, in rank order."""

    step: int
    files: tuple[FileDigest, ...]


def write_shards(final: Path, core: ShardedCore, step: int) -> None:
    """Write a checkpoint, all ranks together; it appears by rename, whole or not at all.

    Args:
        final: on a file system that all ranks share.

    Raises:
        StorageFailed: the disk refused on this rank; no checkpoint appears.
    """
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    temporary = temporary_of(final)
    with storage_errors(f"checkpoint {final.name}"):
        if rank == 0:
            new_temporary(final)
        dist.barrier()
        write_durably(temporary / shard_name(rank, num_ranks), safetensors.torch.save(_shards(core)))
        dist.barrier()
        if rank == 0:
            manifest = ShardedManifest(
                step=step,
                files=tuple(_file_digest(temporary / shard_name(one, num_ranks)) for one in range(num_ranks)),
            )
            write_durably(temporary / MANIFEST_NAME, msgspec.json.encode(manifest))
            publish_directory(temporary, final)
        dist.barrier()


def shard_name(rank: int, num_ranks: int) -> str:
    """File of one rank."""
    return f"rank-{rank:05d}-of-{num_ranks:05d}"


def read_shards(directory: Path, core: ShardedCore) -> int:
    """Put a checkpoint, of whatever number of ranks, into this rank's shards; returns the next step.

    Tensors are put together one at a time, so no rank needs memory for the whole model.

    Raises:
        IntegrityError: names the file or the tensor that is missing or differs.
    """
    manifest = _read_manifest(directory)
    for expected in manifest.files:
        actual, _ = digest_file(directory / expected.name)
        if actual != expected.digest:
            raise IntegrityError(
                f"checkpoint {directory.name}: {expected.name} must have digest {expected.digest}, got {actual}"
            )
    with _opened([directory / file.name for file in manifest.files]) as whole:
        for name, parameter in core.module.named_parameters():
            with torch.no_grad():
                _local(parameter).copy_(_mine(whole, name, parameter))
            if f"{name}/{_STEP}" not in whole.names:
                continue
            moments = {key: _sharded(_mine(whole, f"{name}/{key}", parameter), parameter) for key in _MOMENTS}
            core.optimizer.state[parameter] = {_STEP: whole.first(f"{name}/{_STEP}"), **moments}
    return manifest.step


def export_model(directory: Path, core: ShardedCore, companions: dict[str, bytes]) -> None:
    """Write a Hugging Face directory that any reader takes; all ranks call it, rank 0 writes.

    Args:
        companions: config, tokenizer and template; see :func:`steelyard.trainer.checkpoint.read_companions`.

    Raises:
        StorageFailed: the disk refused.
    """
    tensors = core.full_tensors()
    if dist.get_rank() == 0:
        with storage_errors(f"export {directory.name}"):
            temporary = new_temporary(directory)
            contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
            write_durably(temporary / WEIGHTS_NAME, safetensors.torch.save(contiguous, metadata={"format": "pt"}))
            for name, content in companions.items():
                write_durably(temporary / name, content)
            publish_directory(temporary, directory)
    dist.barrier()


class _Whole:
    """Tensors over the files of all ranks."""

    def __init__(self, files: list[Any]) -> None:
        self._files = files
        self.names = frozenset(files[0].keys())

    def first(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._files[0].get_tensor(name)
        return tensor.clone()

    def together(self, name: str) -> torch.Tensor:
        return torch.cat([file.get_tensor(name) for file in self._files])


@contextmanager
def _opened(paths: list[Path]) -> Iterator[_Whole]:
    with ExitStack() as stack:
        yield _Whole([stack.enter_context(safetensors.safe_open(path, framework="pt")) for path in paths])


def _shards(core: ShardedCore) -> dict[str, torch.Tensor]:
    tensors = {}
    for name, parameter in core.module.named_parameters():
        tensors[name] = _local(parameter).contiguous()
        for key, value in core.optimizer.state.get(parameter, {}).items():
            tensors[f"{name}/{key}"] = _local(value).contiguous()
    return tensors


def _mine(whole: _Whole, name: str, parameter: torch.nn.Parameter) -> torch.Tensor:
    if name not in whole.names:
        raise IntegrityError(f"a checkpoint must hold {name}, got none")
    tensor = whole.together(name)
    if tensor.shape != parameter.shape:
        raise IntegrityError(f"{name} must have shape {tuple(parameter.shape)}, got {tuple(tensor.shape)}")
    parts, rank = tensor.chunk(dist.get_world_size()), dist.get_rank()
    return parts[rank].clone() if rank < len(parts) else tensor[:0]


def _sharded(local: torch.Tensor, like: torch.nn.Parameter) -> torch.Tensor:
    assert isinstance(like, DTensor)
    return DTensor.from_local(
        local, like.device_mesh, [Shard(0)], run_check=False, shape=like.shape, stride=like.stride()
    )


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def _file_digest(path: Path) -> FileDigest:
    digest, num_bytes = digest_file(path)
    return FileDigest(name=path.name, num_bytes=num_bytes, digest=digest)


def _read_manifest(directory: Path) -> ShardedManifest:
    try:
        return msgspec.json.decode((directory / MANIFEST_NAME).read_bytes(), type=ShardedManifest)
    except (OSError, msgspec.MsgspecError) as error:
        raise IntegrityError(f"{directory / MANIFEST_NAME} must be the manifest of a checkpoint: {error}") from error
