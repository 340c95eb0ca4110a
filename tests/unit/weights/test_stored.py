"""The parameters of a stored version, read without torch."""

from pathlib import Path

import pytest
import safetensors.torch
import torch

from steelyard.errors import IntegrityError
from steelyard.testing.tiny_model import tiny_module, write_tiny_model
from steelyard.weights.manifest import weights_digest
from steelyard.weights.parameters import parameter_digests
from steelyard.weights.publisher import VersionPublisher
from steelyard.weights.shards import WEIGHTS_NAME
from steelyard.weights.stored import stored_parameters


def test_a_published_version_holds_the_digest_of_its_manifest(tmp_path: Path) -> None:
    model_dir = write_tiny_model(tmp_path / "model")
    publisher = VersionPublisher(tmp_path, model_dir, 1e-4)
    manifest = publisher.publish(tiny_module(), version=0, step=0, parent_version=None)
    assert weights_digest(stored_parameters(tmp_path / "v000000")) == manifest.weights_digest


def test_every_dtype_has_the_digest_that_it_has_in_memory(tmp_path: Path) -> None:
    dtypes = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16)
    tensors = {str(dtype): torch.arange(6).reshape(2, 3).to(dtype) for dtype in (*dtypes, torch.int8, torch.uint8)}
    tensors["scalar"] = torch.tensor(1.5)
    tensors["bool"] = torch.tensor([True, False])
    safetensors.torch.save_file(tensors, tmp_path / WEIGHTS_NAME, metadata={"format": "pt"})
    expected = parameter_digests(tensors)
    assert sorted(stored_parameters(tmp_path), key=lambda p: p.name) == sorted(expected, key=lambda p: p.name)


@pytest.mark.parametrize("data", [b"", b"\xff" * 8, b"\x05\0\0\0\0\0\0\0{bad}", b"\x02\0\0\0\0\0\0\0[]"])
def test_what_is_no_safetensors_file_is_named(tmp_path: Path, data: bytes) -> None:
    (tmp_path / WEIGHTS_NAME).write_bytes(data)
    with pytest.raises(IntegrityError, match="must be a safetensors file"):
        stored_parameters(tmp_path)


def test_a_file_that_is_cut_short_is_named(tmp_path: Path) -> None:
    path = tmp_path / WEIGHTS_NAME
    safetensors.torch.save_file({"weight": torch.ones(100)}, path)
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(IntegrityError, match="weight ends at byte"):
        stored_parameters(tmp_path)
