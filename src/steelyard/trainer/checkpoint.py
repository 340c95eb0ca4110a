"""Checkpoints: all that a trainer needs to go on to the same bits.

A checkpoint is a Hugging Face directory (config, tokenizer, weights) with the optimizer's state, the random state and
a manifest of digests, written last. It appears by rename, whole or not at all. No pickle.
"""

from dataclasses import dataclass
from pathlib import Path

import msgspec
import safetensors
import safetensors.torch
import torch

from steelyard.digests import digest_bytes, digest_file
from steelyard.durable import (
    FaultHook,
    new_temporary,
    no_fault,
    publish_directory,
    remove_directory,
    storage_errors,
    write_durably,
)
from steelyard.errors import IntegrityError
from steelyard.trainer.model import load_model
from steelyard.trainer.model_files import COMPANION_NAMES
from steelyard.trainer.optim import optimizer_tensors, restore_optimizer
from steelyard.types import FileDigest, Record

MANIFEST_NAME = "checkpoint.json"
WEIGHTS_NAME = "model.safetensors"
OPTIMIZER_NAME = "optimizer.safetensors_state"
"""Not ``*.safetensors``, lest a reader of Hugging Face directories take it for weights."""

FAULT_POINTS = ("begun", "weights_written", "optimizer_written", "manifest_written", "before_rename", "renamed", "done")


class CheckpointManifest(Record, frozen=True, kw_only=True):
    """``step`` is the next step; ``version`` the weights that it will be computed at; ``extra`` is not ours."""

    step: int
    version: int
    weights_digest: str
    random_state: bytes
    extra: bytes
    files: tuple[FileDigest, ...]


@dataclass(frozen=True)
class Restored:
    """A checkpoint in memory."""

    module: torch.nn.Module
    optimizer_state: dict[str, torch.Tensor]
    manifest: CheckpointManifest


def checkpoint_dir_name(step: int) -> str:
    """Directory name of the checkpoint before ``step``: ``step-000010``."""
    return f"step-{step:06d}"


def write_checkpoint(
    final: Path,
    module: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    companions: dict[str, bytes],
    state: CheckpointManifest,
    fault: FaultHook = no_fault,
) -> str:
    """Write a checkpoint; ``state.files`` is filled in here. Returns its digest, that of its manifest.

    ``companions`` are the files of the model's directory that training does not change; see :func:`read_companions`.

    A checkpoint of the same state that is already there is left as it is.

    Raises:
        IntegrityError: a checkpoint of another state has this name.
        StorageFailed: the disk refused; no checkpoint appears.
    """
    if final.exists():
        return _written_before(final, state)
    with storage_errors(f"checkpoint {final.name}"):
        temporary = new_temporary(final)
        fault("begun")
        write_durably(temporary / WEIGHTS_NAME, _serialised(module_tensors(module), {"format": "pt"}))
        fault("weights_written")
        write_durably(temporary / OPTIMIZER_NAME, _serialised(optimizer_tensors(module, optimizer), None))
        fault("optimizer_written")
        for name, content in companions.items():
            write_durably(temporary / name, content)
        data = msgspec.json.encode(msgspec.structs.replace(state, files=_file_digests(temporary)))
        write_durably(temporary / MANIFEST_NAME, data)
        fault("manifest_written")
        publish_directory(temporary, final, fault)
        fault("done")
    return digest_bytes(data)


def read_companions(model_dir: Path) -> dict[str, bytes]:
    """Config, tokenizer and template of a Hugging Face directory, by file name.

    Held in memory, since the checkpoint that a run was resumed from is deleted while the run goes on.
    """
    return {name: (model_dir / name).read_bytes() for name in COMPANION_NAMES if (model_dir / name).is_file()}


def read_checkpoint(directory: Path, digest: str | None = None) -> Restored:
    """Read a checkpoint after comparing every file with its digest.

    Args:
        digest: what :func:`write_checkpoint` returned; None trusts the directory's own manifest.

    Raises:
        IntegrityError: names the file that is missing or differs.
        InputError: the weights do not load as a decoder.
    """
    manifest = read_checkpoint_manifest(directory, digest)
    for expected in manifest.files:
        try:
            actual, num_bytes = digest_file(directory / expected.name)
        except OSError as error:
            raise IntegrityError(f"checkpoint {directory.name}: {expected.name} must be readable: {error}") from error
        if actual != expected.digest:
            raise IntegrityError(
                f"checkpoint {directory.name}: {expected.name} must have digest {expected.digest} over "
                f"{expected.num_bytes} bytes, got {actual} over {num_bytes}"
            )
    return Restored(
        module=load_model(directory),
        optimizer_state=safetensors.torch.load_file(directory / OPTIMIZER_NAME),
        manifest=manifest,
    )


def read_checkpoint_manifest(directory: Path, digest: str | None = None) -> CheckpointManifest:
    """The manifest of a checkpoint.

    Raises:
        IntegrityError: there is none, it is malformed, or it has another digest.
    """
    path = directory / MANIFEST_NAME
    try:
        data = path.read_bytes()
        manifest = msgspec.json.decode(data, type=CheckpointManifest)
    except (OSError, msgspec.MsgspecError) as error:
        raise IntegrityError(f"{path} must be the manifest of a checkpoint: {error}") from error
    if digest is not None and digest_bytes(data) != digest:
        raise IntegrityError(f"checkpoint {directory.name} must have digest {digest}, got {digest_bytes(data)}")
    return manifest


def restore(restored: Restored, optimizer: torch.optim.Optimizer) -> None:
    """Put optimizer and random state back as they were.

    Raises:
        IntegrityError: the optimizer state does not fit the module.
    """
    restore_optimizer(restored.module, optimizer, restored.optimizer_state)
    torch.set_rng_state(torch.frombuffer(bytearray(restored.manifest.random_state), dtype=torch.uint8))


def random_state() -> bytes:
    """The state of torch's generator."""
    return torch.get_rng_state().numpy().tobytes()


def prune_checkpoints(root: Path, keep: int) -> tuple[str, ...]:
    """Delete all but the newest ``keep`` checkpoints, and never the one before the newest; returns the names.

    The newest was just written and may not be in the journal yet: until it is, a resume starts from the one before.

    Raises:
        StorageFailed: the disk refused.
    """
    present = sorted(path for path in root.glob("step-*") if (path / MANIFEST_NAME).is_file())
    doomed = present[: -max(keep, 2)]
    with storage_errors("the removal of old checkpoints"):
        for path in doomed:
            remove_directory(path)
    return tuple(path.name for path in doomed)


def module_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers, tied ones once; a load ties them again."""
    untied = dict(module.named_parameters()).keys()
    tied = {name for name, _ in module.named_parameters(remove_duplicate=False)} - untied
    return {name: tensor for name, tensor in module.state_dict().items() if name not in tied}


def _serialised(tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None) -> bytes:
    contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    data: bytes = safetensors.torch.save(contiguous, metadata=metadata)
    return data


def _file_digests(directory: Path) -> tuple[FileDigest, ...]:
    digests = []
    for path in sorted(directory.iterdir()):
        digest, num_bytes = digest_file(path)
        digests.append(FileDigest(name=path.name, num_bytes=num_bytes, digest=digest))
    return tuple(digests)


def _written_before(final: Path, state: CheckpointManifest) -> str:
    manifest = read_checkpoint_manifest(final)
    if manifest.weights_digest != state.weights_digest or manifest.version != state.version:
        raise IntegrityError(
            f"checkpoint {final.name} is already there with weights {manifest.weights_digest} of version "
            f"{manifest.version}; it must not be overwritten by {state.weights_digest} of version {state.version}"
        )
    return digest_bytes((final / MANIFEST_NAME).read_bytes())
