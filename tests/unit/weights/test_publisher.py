"""Publication and loading of versions: whole, proven, never the wrong one."""

import errno
import json
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
import torch

from steelyard.errors import IntegrityError, StorageFailed
from steelyard.testing.tiny_model import tiny_module, write_tiny_model
from steelyard.weights.compatibility import Compatibility
from steelyard.weights.loader import VersionLoader
from steelyard.weights.manifest import MANIFEST_NAME, encode_manifest, read_manifest, weights_digest
from steelyard.weights.probe import max_error, probe_logprobs
from steelyard.weights.publisher import FAULT_POINTS, VersionPublisher
from steelyard.weights.retention import VersionStore
from steelyard.weights.stored import stored_parameters

TOLERANCE = 1e-4


class Killed(BaseException):
    """Stands for SIGKILL: nothing in the code under test catches it."""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def module() -> torch.nn.Module:
    return tiny_module(seed=0)


def nudge(module: torch.nn.Module, amount: float) -> None:
    """Change all weights a little, as an optimizer step does."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=amount)


def publisher(root: Path, model_dir: Path) -> VersionPublisher:
    return VersionPublisher(root, model_dir, TOLERANCE)


def test_a_loaded_version_has_the_digest_and_the_log_probabilities_of_the_published_one(
    tmp_path: Path, model_dir: Path, module: torch.nn.Module
) -> None:
    manifest = publisher(tmp_path, model_dir).publish(module, version=3, step=3, parent_version=None)
    loader = VersionLoader(Compatibility.of_directory(model_dir))
    loaded = loader.load(tmp_path / "v000003")
    assert loaded.manifest == manifest
    assert loader.loaded_digest(loaded.module) == manifest.weights_digest
    assert max_error(probe_logprobs(loaded.module, manifest.probe.sequences), manifest.probe.logprobs) < 1e-6
    assert not any(parameter.requires_grad for parameter in loaded.module.parameters())


def test_a_version_is_a_hugging_face_directory_with_the_run_s_tokenizer(
    tmp_path: Path, model_dir: Path, module: torch.nn.Module
) -> None:
    manifest = publisher(tmp_path, model_dir).publish(module, version=0, step=0, parent_version=None)
    names = {path.name for path in (tmp_path / "v000000").iterdir()}
    assert {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    } < names
    assert {file.name for file in manifest.files} == names - {MANIFEST_NAME}
    assert json.loads((tmp_path / "v000000" / "config.json").read_bytes())["dtype"] == "float32"


def test_tied_parameters_are_published_once(tmp_path: Path, model_dir: Path, module: torch.nn.Module) -> None:
    manifest = publisher(tmp_path, model_dir).publish(module, version=0, step=0, parent_version=None)
    names = [parameter.name for parameter in manifest.parameters]
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names


def test_later_versions_link_the_tokenizer_of_their_parent(
    tmp_path: Path, model_dir: Path, module: torch.nn.Module
) -> None:
    writer = publisher(tmp_path, model_dir)
    writer.publish(module, version=0, step=0, parent_version=None)
    writer.publish(module, version=1, step=1, parent_version=0)
    assert (tmp_path / "v000001" / "tokenizer.json").samefile(tmp_path / "v000000" / "tokenizer.json")
    assert not (tmp_path / "v000000" / "tokenizer.json").samefile(model_dir / "tokenizer.json")


@pytest.mark.parametrize(("amount", "separates"), [(1e-2, True), (1e-9, False)])
def test_the_probe_says_whether_it_can_tell_a_version_from_its_parent(
    tmp_path: Path, model_dir: Path, module: torch.nn.Module, amount: float, separates: bool
) -> None:
    writer = publisher(tmp_path, model_dir)
    assert not writer.publish(module, version=0, step=0, parent_version=None).probe.separates_parent
    nudge(module, amount)
    assert writer.publish(module, version=1, step=1, parent_version=0).probe.separates_parent is separates


def test_publishing_the_same_weights_again_changes_nothing(
    tmp_path: Path, model_dir: Path, module: torch.nn.Module
) -> None:
    first = publisher(tmp_path, model_dir).publish(module, version=1, step=1, parent_version=None)
    inode = (tmp_path / "v000001" / "model.safetensors").stat().st_ino
    again = publisher(tmp_path, model_dir).publish(module, version=1, step=1, parent_version=None)
    assert again == first
    assert (tmp_path / "v000001" / "model.safetensors").stat().st_ino == inode


def test_a_version_number_is_never_reused_for_other_weights(
    tmp_path: Path, model_dir: Path, module: torch.nn.Module
) -> None:
    publisher(tmp_path, model_dir).publish(module, version=1, step=1, parent_version=None)
    nudge(module, 1e-3)
    with pytest.raises(IntegrityError, match=r"version 1 is published with weights .* never reused"):
        publisher(tmp_path, model_dir).publish(module, version=1, step=1, parent_version=None)


@pytest.mark.parametrize("point", FAULT_POINTS)
def test_a_publisher_killed_at_any_point_leaves_a_whole_version_or_none(
    tmp_path: Path, model_dir: Path, module: torch.nn.Module, point: str
) -> None:
    def die(reached: str) -> None:
        if reached == point:
            raise Killed

    with pytest.raises(Killed):
        VersionPublisher(tmp_path, model_dir, TOLERANCE, fault=die).publish(
            module, version=2, step=2, parent_version=None
        )
    store = VersionStore(tmp_path)
    assert store.versions() == ((2,) if point in ("renamed", "published") else ())
    store.sweep()
    manifest = publisher(tmp_path, model_dir).publish(module, version=2, step=2, parent_version=None)
    assert VersionLoader().load(tmp_path / "v000002").manifest == manifest
    assert [path.name for path in tmp_path.iterdir()] == ["v000002"]


def test_a_full_disk_is_an_error_that_names_the_version_and_no_version_appears(
    tmp_path: Path, model_dir: Path, module: torch.nn.Module
) -> None:
    def fill(point: str) -> None:
        if point == "weights_written":
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(StorageFailed, match=r"version 2 could not be written: .*No space left"):
        VersionPublisher(tmp_path, model_dir, TOLERANCE, fault=fill).publish(
            module, version=2, step=2, parent_version=None
        )
    assert VersionStore(tmp_path).versions() == ()


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json", "chat_template.jinja"])
def test_one_changed_byte_in_any_file_is_found_and_named(
    tmp_path: Path, model_dir: Path, module: torch.nn.Module, name: str
) -> None:
    publisher(tmp_path, model_dir).publish(module, version=1, step=1, parent_version=None)
    path = tmp_path / "v000001" / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(IntegrityError, match=rf"version 1: .*{name} must have digest"):
        VersionLoader().load(tmp_path / "v000001")


def test_a_missing_file_is_named(tmp_path: Path, model_dir: Path, module: torch.nn.Module) -> None:
    publisher(tmp_path, model_dir).publish(module, version=1, step=1, parent_version=None)
    (tmp_path / "v000001" / "model.safetensors").unlink()
    with pytest.raises(IntegrityError, match=r"model\.safetensors must be readable"):
        VersionLoader().load(tmp_path / "v000001")


def test_a_directory_without_a_manifest_is_no_version(tmp_path: Path, model_dir: Path) -> None:
    with pytest.raises(IntegrityError, match="it is no published version"):
        VersionLoader().load(model_dir)


def test_weights_of_another_version_under_an_honest_file_list_are_found_in_memory(
    tmp_path: Path, model_dir: Path, module: torch.nn.Module
) -> None:
    """Version 1's file, with version 1's file digests, but version 2's promise of parameters."""
    writer = publisher(tmp_path, model_dir)
    one = writer.publish(module, version=1, step=1, parent_version=None)
    nudge(module, 1e-3)
    two = writer.publish(module, version=2, step=2, parent_version=1)
    shutil.copy(tmp_path / "v000001" / "model.safetensors", tmp_path / "v000002" / "model.safetensors")
    forged = msgspec.structs.replace(two, files=one.files)
    (tmp_path / "v000002" / MANIFEST_NAME).write_bytes(encode_manifest(forged))
    with pytest.raises(IntegrityError, match=r"version 2: digest of parameter .* in memory must be"):
        VersionLoader().load(tmp_path / "v000002")


@pytest.mark.parametrize("changed", ["model config", "tokenizer", "chat template"])
def test_a_version_that_does_not_fit_the_run_is_refused_and_the_part_is_named(
    tmp_path: Path, model_dir: Path, module: torch.nn.Module, changed: str
) -> None:
    publisher(tmp_path, model_dir).publish(module, version=1, step=1, parent_version=None)
    fitting = Compatibility.of_directory(model_dir)
    expected = {
        "model config": Compatibility("other", fitting.tokenizer_digest, fitting.template_digest),
        "tokenizer": Compatibility(fitting.model_config_digest, "other", fitting.template_digest),
        "chat template": Compatibility(fitting.model_config_digest, fitting.tokenizer_digest, "other"),
    }[changed]
    with pytest.raises(IntegrityError, match=rf"version 1: its {changed} must be that of the run \(other\)"):
        VersionLoader(expected).load(tmp_path / "v000001")


def test_the_config_digest_ignores_keys_that_only_describe_the_file(tmp_path: Path, model_dir: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(model_dir, other)
    config = json.loads((other / "config.json").read_bytes())
    (other / "config.json").write_text(json.dumps({**config, "transformers_version": "x", "torch_dtype": "bfloat16"}))
    assert Compatibility.of_directory(other) == Compatibility.of_directory(model_dir)
    (other / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1.0}))
    assert Compatibility.of_directory(other) != Compatibility.of_directory(model_dir)


def test_changing_one_weight_in_memory_changes_the_loaded_digest(
    tmp_path: Path, model_dir: Path, module: torch.nn.Module
) -> None:
    manifest = publisher(tmp_path, model_dir).publish(module, version=1, step=1, parent_version=None)
    loader = VersionLoader()
    loaded = loader.load(tmp_path / "v000001")
    with torch.no_grad():
        next(iter(loaded.module.parameters()))[0, 0] += 1e-6
    assert loader.loaded_digest(loaded.module) != manifest.weights_digest


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_float32_weights_are_published_in_another_dtype_with_the_log_probabilities_of_the_cast_ones(
    tmp_path: Path, model_dir: Path, module: torch.nn.Module, dtype: str
) -> None:
    writer = VersionPublisher(tmp_path, model_dir, TOLERANCE, dtype=dtype)
    manifest = writer.publish(module, version=1, step=1, parent_version=None)
    loaded = VersionLoader().load(tmp_path / "v000001")
    assert manifest.dtype == dtype
    assert writer.weights_digest(module) == manifest.weights_digest
    assert {parameter.dtype for parameter in loaded.module.parameters()} == {getattr(torch, dtype)}
    assert {parameter.dtype for parameter in module.parameters()} == {torch.float32}
    assert json.loads((tmp_path / "v000001" / "config.json").read_bytes())["dtype"] == dtype
    in_memory = probe_logprobs(loaded.module, manifest.probe.sequences)
    assert max_error(in_memory, manifest.probe.logprobs) < 1e-6
    assert max_error(probe_logprobs(module, manifest.probe.sequences), manifest.probe.logprobs) > 1e-4


def test_weights_that_overflow_in_the_published_dtype_are_not_published(
    tmp_path: Path, model_dir: Path, module: torch.nn.Module
) -> None:
    with torch.no_grad():
        next(iter(module.parameters())).mul_(1e6)
    writer = VersionPublisher(tmp_path, model_dir, TOLERANCE, dtype="float16")
    with pytest.raises(IntegrityError, match=r"version 1: .* must be finite, but the weights cast to float16"):
        writer.publish(module, version=1, step=1, parent_version=None)
    assert not list(tmp_path.glob("v*"))


def test_a_version_of_several_shards_is_one_that_hugging_face_reads(
    tmp_path: Path, model_dir: Path, module: torch.nn.Module
) -> None:
    whole = publisher(tmp_path / "whole", model_dir).publish(module, version=1, step=1, parent_version=None)
    writer = VersionPublisher(tmp_path, model_dir, TOLERANCE, max_shard_bytes=100_000)
    manifest = writer.publish(module, version=1, step=1, parent_version=None)
    directory = tmp_path / "v000001"
    names = sorted(path.name for path in directory.glob("model*"))
    assert len(names) > 3
    assert names[0] == f"model-00001-of-{len(names) - 1:05d}.safetensors"
    assert names[-1] == "model.safetensors.index.json"
    assert set(names) < {file.name for file in manifest.files}
    assert manifest.weights_digest == whole.weights_digest
    assert weights_digest(stored_parameters(directory)) == whole.weights_digest
    loader = VersionLoader()
    assert loader.loaded_digest(loader.load(directory).module) == whole.weights_digest


def test_a_damaged_shard_is_named(tmp_path: Path, model_dir: Path, module: torch.nn.Module) -> None:
    writer = VersionPublisher(tmp_path, model_dir, TOLERANCE, max_shard_bytes=100_000)
    writer.publish(module, version=1, step=1, parent_version=None)
    shard = sorted((tmp_path / "v000001").glob("model-00002-*"))[0]
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(IntegrityError, match=shard.name):
        VersionLoader().load(tmp_path / "v000001")


def test_a_manifest_round_trips_through_its_file(tmp_path: Path, model_dir: Path, module: torch.nn.Module) -> None:
    manifest = publisher(tmp_path, model_dir).publish(module, version=1, step=1, parent_version=None)
    assert read_manifest(tmp_path / "v000001") == manifest


def test_a_malformed_manifest_is_refused(tmp_path: Path) -> None:
    (tmp_path / MANIFEST_NAME).write_bytes(b"{}")
    with pytest.raises(IntegrityError, match=r"manifest\.json must be a manifest"):
        read_manifest(tmp_path)


def test_versions_that_are_loaded_at_the_same_moment_are_all_whole(
    tmp_path: Path, model_dir: Path, module: torch.nn.Module
) -> None:
    manifest = publisher(tmp_path, model_dir).publish(module, version=0, step=0, parent_version=None)
    loader = VersionLoader()
    num_threads = 4
    start = threading.Barrier(num_threads)

    def load(_: int) -> set[str]:
        start.wait(timeout=30)
        return {loader.loaded_digest(loader.load(tmp_path / "v000000").module) for _ in range(3)}

    with ThreadPoolExecutor(num_threads) as threads:
        assert set().union(*threads.map(load, range(num_threads))) == {manifest.weights_digest}
