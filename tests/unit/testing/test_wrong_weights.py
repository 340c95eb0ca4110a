"""Loads that go wrong behind the checks of files: the digest of memory sees all of them, the probe most."""

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from steelyard.errors import IntegrityError
from steelyard.ids import SeededIds
from steelyard.inference.engine_core import EngineCore, EngineSettings
from steelyard.inference.local_engine import LocalEngine
from steelyard.testing.manual_clock import ManualClock
from steelyard.testing.tiny_model import tiny_module, write_tiny_model
from steelyard.testing.wrong_weights import (
    MisledLoader,
    large_matrices,
    shard_of,
    shards_of,
    with_matrix_changed,
    with_stale_shard,
)
from steelyard.types import LoadProof, Manifest
from steelyard.weights.manifest import read_manifest
from steelyard.weights.publisher import VersionPublisher
from steelyard.weights.reader import VersionReader
from steelyard.weights.tolerance import measured_noise


@dataclass(frozen=True)
class Published:
    """Version 1 and its parent, version 0, in several shards."""

    directory: Path
    parent: Path
    manifest: Manifest


def published(root: Path, dtype: str) -> Published:
    tolerance = measured_noise("local", dtype).probe_tolerance
    model_dir = write_tiny_model(root / "model")
    publisher = VersionPublisher(root / "weights", model_dir, tolerance, dtype=dtype, max_shard_bytes=200_000)
    module = tiny_module()
    publisher.publish(module, version=0, step=0, parent_version=None)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=1e-3)
    manifest = publisher.publish(module, version=1, step=1, parent_version=0)
    return Published(root / "weights" / "v000001", root / "weights" / "v000000", manifest)


def load(version: Published, really: Path, *, shows_digests: bool) -> LoadProof:
    async def run() -> LoadProof:
        loader = MisledLoader(lambda _: really, shows_digests=shows_digests)
        tolerance = measured_noise("local", version.manifest.dtype).probe_tolerance
        settings = EngineSettings(max_running=2, row_tokens=128, kv_tokens=512, probe_tolerance=tolerance)
        clock = ManualClock()
        core = EngineCore(settings, loader, replica_id="rep_a", clock=clock, ids=SeededIds(0))
        engine = LocalEngine(core, loader, clock)
        try:
            return await engine.load(str(version.directory), 1)
        finally:
            await engine.close()

    return asyncio.run(run())


def stale(version: Published, copy: Path) -> Path:
    return version.parent


def one_stale_shard(version: Published, copy: Path) -> Path:
    with_stale_shard(version.directory, version.parent, copy, shards_of(version.directory)[1])
    return copy


def changed_matrix(version: Published, copy: Path) -> Path:
    with_matrix_changed(version.directory, copy, large_matrices(version.manifest)[0], random.Random(0))
    return copy


WRONG = [stale, one_stale_shard, changed_matrix]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("make", WRONG)
def test_the_loaded_digest_catches_it_in_every_dtype(
    tmp_path: Path, make: Callable[[Published, Path], Path], dtype: str
) -> None:
    version = published(tmp_path, dtype)
    with pytest.raises(IntegrityError, match="the digest of the loaded parameters must be"):
        load(version, make(version, tmp_path / "wrong"), shows_digests=True)


@pytest.mark.parametrize("make", WRONG)
def test_the_probe_alone_catches_it_in_float32(tmp_path: Path, make: Callable[[Published, Path], Path]) -> None:
    version = published(tmp_path, "float32")
    with pytest.raises(IntegrityError, match="probe log-probabilities must agree within"):
        load(version, make(version, tmp_path / "wrong"), shows_digests=False)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_an_honest_load_is_no_alarm(tmp_path: Path, dtype: str) -> None:
    version = published(tmp_path, dtype)
    proof = load(version, version.directory, shows_digests=True)
    assert proof.weights_digest == version.manifest.weights_digest
    assert load(version, version.directory, shows_digests=False).probe_max_error <= proof.probe_tolerance


def test_the_files_of_a_wrong_version_do_pass_their_own_check(tmp_path: Path) -> None:
    """Else these loads would show nothing: what is verified is the version, what is loaded is not."""
    version = published(tmp_path, "float32")
    assert VersionReader().read(str(version.directory)) == version.manifest
    wrong = one_stale_shard(version, tmp_path / "wrong")
    with pytest.raises(IntegrityError, match=shards_of(version.directory)[1]):
        VersionReader().read(str(wrong))


def test_a_changed_matrix_is_changed_by_one_percent_and_nothing_else_is(tmp_path: Path) -> None:
    version = published(tmp_path, "float32")
    (name, *_) = large_matrices(version.manifest)
    with_matrix_changed(version.directory, tmp_path / "wrong", name, random.Random(0))
    changed = shard_of(version.directory, name)
    assert read_manifest(tmp_path / "wrong") == version.manifest
    for shard in shards_of(version.directory):
        same = (tmp_path / "wrong" / shard).samefile(version.directory / shard)
        assert same == (shard != changed)
