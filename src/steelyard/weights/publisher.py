"""Publication of a version: whole and durable, or not there.

::

    temporary directory -> weights -> config, tokenizer -> manifest (last) -> fsync -> rename -> fsync of the parent
"""

import json
import math
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from steelyard.digests import digest_bytes
from steelyard.durable import (
    FaultHook,
    link_or_copy,
    new_temporary,
    no_fault,
    publish_directory,
    storage_errors,
    write_durably,
)
from steelyard.errors import IntegrityError
from steelyard.types import FileDigest, Manifest, ParameterDigest, Probe
from steelyard.weights.manifest import (
    COMPANION_NAMES,
    CONFIG_NAME,
    MANIFEST_NAME,
    encode_manifest,
    file_digest,
    model_config_digest,
    read_manifest,
    read_model_config,
    template_digest,
    tokenizer_digest,
    version_dir_name,
    weights_digest,
)
from steelyard.weights.parameters import (
    cast_tensors,
    dtype_name,
    dtype_named,
    parameter_digests,
    published_tensors,
)
from steelyard.weights.probe import probe_logprobs, probe_sequences, separates
from steelyard.weights.shards import INDEX_NAME, encode_index, plan_shards

FAULT_POINTS = ("begun", "weights_written", "files_linked", "manifest_written", "before_rename", "renamed", "published")


class VersionPublisher:
    """Writes versions into ``root``, taking config and tokenizer files from ``model_dir``.

    Args:
        root: the ``weights/`` directory of the run.
        model_dir: Hugging Face directory that the run started from (or a checkpoint, which holds the same files).
        probe_tolerance: by how much a replica's log-probabilities may differ, in nats.
        dtype: what is published: the module's weights, cast to it.
        max_shard_bytes: largest file of weights, in bytes of tensor data; a larger tensor is a file by itself.
        fault: called with each of ``FAULT_POINTS``, in order; tests kill the process there.

    Raises:
        IntegrityError: ``model_dir`` has no config.json that can be read.
    """

    def __init__(
        self,
        root: Path,
        model_dir: Path,
        probe_tolerance: float,
        *,
        dtype: str = "float32",
        max_shard_bytes: int = 4 << 30,
        fault: FaultHook = no_fault,
    ) -> None:
        self._root = root
        self._probe_tolerance = probe_tolerance
        self._dtype = dtype_named(dtype)
        self._max_shard_bytes = max_shard_bytes
        self._fault = fault
        # Read now: a checkpoint that the run was resumed from is deleted while the run goes on.
        self._config = _published_config(model_dir)
        self._companions = {
            name: (model_dir / name).read_bytes() for name in COMPANION_NAMES if (model_dir / name).is_file()
        }

    def weights_digest(self, module: torch.nn.Module) -> str:
        """Digest of the weights in memory, cast; equals ``Manifest.weights_digest`` of a version published from them.

        Weights that differ by less than the cast keeps have one digest.
        """
        return weights_digest(parameter_digests(self._tensors(module)))

    def publish(self, module: torch.nn.Module, *, version: int, step: int, parent_version: int | None) -> Manifest:
        """Publish the module's weights as ``version``.

        A version that is already published with the same weights is left as it is and its manifest returned, so
        that publication can be repeated after a crash.

        Raises:
            IntegrityError: the version is already published with other weights (ids are never reused), or the cast
                weights give no finite log-probabilities.
            StorageFailed: the disk refused; no version appears.
        """
        tensors = self._tensors(module)
        parameters = parameter_digests(tensors)
        final = self._root / version_dir_name(version)
        if final.exists():
            return _published_before(final, parameters)
        probe = self._probe(module, tensors, version, parent_version)
        with storage_errors(f"version {version}"):
            temporary = new_temporary(final)
            self._fault("begun")
            files = self._write_weights(temporary, tensors)
            self._fault("weights_written")
            files += self._write_companions(temporary, parent_version)
            self._fault("files_linked")
            manifest = Manifest(
                version=version,
                step=step,
                parent_version=parent_version,
                files=tuple(files),
                parameters=parameters,
                weights_digest=weights_digest(parameters),
                model_config_digest=model_config_digest(temporary),
                tokenizer_digest=tokenizer_digest(temporary),
                template_digest=template_digest(temporary),
                dtype=dtype_name(self._dtype),
                probe=probe,
            )
            write_durably(temporary / MANIFEST_NAME, encode_manifest(manifest))
            self._fault("manifest_written")
            publish_directory(temporary, final, self._fault)
            self._fault("published")
        return manifest

    def _tensors(self, module: torch.nn.Module) -> dict[str, torch.Tensor]:
        return cast_tensors(published_tensors(module), self._dtype)

    def _write_weights(self, directory: Path, tensors: dict[str, torch.Tensor]) -> list[FileDigest]:
        sizes_bytes = {name: tensor.nbytes for name, tensor in tensors.items()}
        shards = plan_shards(sizes_bytes, self._max_shard_bytes)
        files = []
        for shard in shards:
            contiguous = {name: tensors[name].cpu().contiguous() for name in shard.tensor_names}
            data = safetensors.torch.save(contiguous, metadata={"format": "pt"})
            files.append(_write_file(directory / shard.name, data))
        if len(shards) > 1:
            files.append(_write_file(directory / INDEX_NAME, encode_index(shards, sizes_bytes)))
        return files

    def _write_companions(self, directory: Path, parent_version: int | None) -> list[FileDigest]:
        """config.json with the dtype of what is published, and links to the files that never change.

        The first version copies them, so that nobody's edit of the model directory reaches into the run; later ones
        link their parent's.
        """
        config = json.dumps({**self._config, "dtype": dtype_name(self._dtype)}, indent=2, sort_keys=True).encode()
        files = [_write_file(directory / CONFIG_NAME, config + b"\n")]
        parent = None if parent_version is None else self._root / version_dir_name(parent_version)
        for name, data in self._companions.items():
            if parent is not None and (parent / name).is_file():
                link_or_copy(parent / name, directory / name)
            else:
                write_durably(directory / name, data)
            files.append(file_digest(directory / name))
        return files

    def _probe(
        self, module: torch.nn.Module, tensors: dict[str, torch.Tensor], version: int, parent_version: int | None
    ) -> Probe:
        sequences = probe_sequences(self._config["vocab_size"])
        logprobs = probe_logprobs(module, sequences, tensors)
        if not all(math.isfinite(logprob) for row in logprobs for logprob in row):
            raise IntegrityError(
                f"version {version}: the log-probabilities of its probe must be finite, but the weights cast to "
                f"{dtype_name(self._dtype)} give others"
            )
        parent = None
        if parent_version is not None:
            parent = read_manifest(self._root / version_dir_name(parent_version)).probe
        return Probe(
            sequences=sequences,
            logprobs=logprobs,
            separates_parent=separates(parent, logprobs, self._probe_tolerance),
        )


def _published_config(model_dir: Path) -> dict[str, Any]:
    """config.json as it is, less the old name of ``dtype``."""
    read_model_config(model_dir)
    config: dict[str, Any] = json.loads((model_dir / CONFIG_NAME).read_bytes())
    config.pop("torch_dtype", None)
    return config


def _write_file(path: Path, data: bytes) -> FileDigest:
    write_durably(path, data)
    return FileDigest(name=path.name, num_bytes=len(data), digest=digest_bytes(data))


def _published_before(final: Path, parameters: tuple[ParameterDigest, ...]) -> Manifest:
    manifest = read_manifest(final)
    digest = weights_digest(parameters)
    if manifest.weights_digest != digest:
        raise IntegrityError(
            f"version {manifest.version} is published with weights {manifest.weights_digest}; it must not be published "
            f"again with weights {digest}: version ids are never reused"
        )
    return manifest
