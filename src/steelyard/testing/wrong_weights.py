"""Loads that go wrong on purpose, behind the checks that look at files: what only a look into memory can see.

A :class:`MisledLoader` verifies the directory that it is told, as the real loader does, and then builds the decoder
from another one. Where it also hides the digests of memory, only the probe is left to see it.
"""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from steelyard.types import Manifest
from steelyard.weights.loader import LoadedVersion, VersionLoader, build_module
from steelyard.weights.reader import VersionReader
from steelyard.weights.shards import INDEX_NAME, WEIGHTS_NAME, WEIGHTS_PATTERN

Misleading = Callable[[str], Path]
"""From the directory that is to be loaded to the one that is loaded instead."""

MIN_MATRIX_FRAC = 0.005
"""A matrix with less of the parameters than this may be changed a little without the probe seeing it."""


class MisledLoader:
    """Implements :class:`steelyard.inference.engine.VersionLoader`.

    Args:
        really: which directory is loaded instead.
        shows_digests: whether :meth:`loaded_digest` tells the truth; if not, it says what was published.
    """

    def __init__(self, really: Misleading, *, shows_digests: bool) -> None:
        self._reader = VersionReader()
        self._loader = VersionLoader()
        self._really = really
        self._shows_digests = shows_digests
        self._manifest: Manifest | None = None

    def load(self, version_dir: str) -> LoadedVersion:
        """The decoder of another directory with the manifest of this one, whose files are as published."""
        manifest = self._reader.read(version_dir)
        self._manifest = manifest
        return LoadedVersion(module=build_module(self._really(version_dir), manifest), manifest=manifest)

    def loaded_digest(self, module: Any) -> str:
        """Digest of the parameters in memory, or the lie."""
        if self._shows_digests or self._manifest is None:
            return self._loader.loaded_digest(module)
        return self._manifest.weights_digest


def large_matrices(manifest: Manifest) -> tuple[str, ...]:
    """Names of the matrices that hold at least ``MIN_MATRIX_FRAC`` of all parameters each."""
    counts = {one.name: torch.Size(one.shape).numel() for one in manifest.parameters}
    least = MIN_MATRIX_FRAC * sum(counts.values())
    return tuple(one.name for one in manifest.parameters if len(one.shape) == 2 and counts[one.name] >= least)


def with_matrix_changed(version_dir: Path, copy: Path, name: str, rng: random.Random) -> None:
    """Write to ``copy`` the version with one matrix changed by 1%: scaled, or by noise of 1% of its norm."""
    shard = shard_of(version_dir, name)
    tensors = safetensors.torch.load_file(version_dir / shard)
    matrix = tensors[name].float()
    if rng.random() < 0.5:
        changed = matrix * rng.choice((0.99, 1.01))
    else:
        noise = torch.randn(matrix.shape, generator=torch.Generator().manual_seed(rng.getrandbits(32)))
        changed = matrix + noise * (0.01 * matrix.norm() / noise.norm())
    tensors[name] = changed.to(tensors[name].dtype)
    _link_all_but(version_dir, copy, shard)
    safetensors.torch.save_file(tensors, copy / shard, metadata={"format": "pt"})


def with_stale_shard(version_dir: Path, parent_dir: Path, copy: Path, shard: str) -> None:
    """Write to ``copy`` the version with one shard of its parent, which must be cut in the same way."""
    _link_all_but(version_dir, copy, shard)
    (copy / shard).hardlink_to(parent_dir / shard)


def shards_of(version_dir: Path) -> tuple[str, ...]:
    """Names of the files of weights."""
    return tuple(sorted(path.name for path in version_dir.glob(WEIGHTS_PATTERN)))


def shard_of(version_dir: Path, name: str) -> str:
    """Name of the file that holds a tensor."""
    index = version_dir / INDEX_NAME
    if not index.exists():
        return WEIGHTS_NAME
    return str(json.loads(index.read_bytes())["weight_map"][name])


def _link_all_but(version_dir: Path, copy: Path, name: str) -> None:
    if copy.exists():
        shutil.rmtree(copy)
    copy.mkdir(parents=True)
    for path in version_dir.iterdir():
        if path.name != name:
            (copy / path.name).hardlink_to(path)
