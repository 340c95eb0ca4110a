"""Reading a published version, and proof of what stands in memory afterwards."""

import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from transformers.utils import logging as transformers_logging

from steelyard.errors import IntegrityError
from steelyard.types import Manifest
from steelyard.weights.compatibility import Compatibility
from steelyard.weights.manifest import check_same_parameters, weights_digest
from steelyard.weights.parameters import parameter_digests, published_tensors
from steelyard.weights.reader import VersionReader

transformers_logging.disable_progress_bar()

_BUILDING = threading.Lock()
"""``from_pretrained`` patches the process while it works; of two at once one may end with parameters without data."""


@dataclass(frozen=True)
class LoadedVersion:
    """A decoder in memory, in eval mode, and the manifest that it was compared with."""

    module: torch.nn.Module
    manifest: Manifest


class VersionLoader:
    """Loads versions that fit ``expected``; None takes the first version that is loaded as the measure."""

    def __init__(self, expected: Compatibility | None = None) -> None:
        self._reader = VersionReader(expected)

    def load(self, version_dir: str | Path) -> LoadedVersion:
        """Verify the files, build the module and compare every parameter in memory with the manifest.

        Raises:
            IntegrityError: names the file, config, tokenizer, template or parameter that is not what was published,
                or not what the run started with.
        """
        manifest = self._reader.read(str(version_dir))
        module = build_module(Path(version_dir), manifest)
        check_same_parameters(manifest, parameter_digests(published_tensors(module)), "memory")
        return LoadedVersion(module=module, manifest=manifest)

    def loaded_digest(self, module: Any) -> str:
        """Digest of the parameters as they stand in memory now; comparable to ``Manifest.weights_digest``."""
        return weights_digest(parameter_digests(published_tensors(module)))


def build_module(directory: Path, manifest: Manifest) -> torch.nn.Module:
    """The decoder in ``directory``, in eval mode and in the manifest's dtype; nothing is compared with the manifest.

    Raises:
        IntegrityError: the directory does not load as a decoder.
    """
    try:
        with _BUILDING:
            module: torch.nn.Module = transformers.AutoModelForCausalLM.from_pretrained(
                directory,
                dtype=getattr(torch, manifest.dtype),
                attn_implementation="sdpa",
                local_files_only=True,
                use_safetensors=True,
            )
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        raise IntegrityError(f"version {manifest.version}: {directory} must load as a decoder: {error}") from error
    with torch.no_grad():
        for parameter in module.parameters():
            # Loaded parameters are views into the file at any offset; aligned copies make the arithmetic
            # of two loads alike to the last bit, and the file may then be deleted.
            parameter.data = parameter.data.clone()
    return module.eval().requires_grad_(False)
