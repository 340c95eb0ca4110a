"""One shard: what the library reads back, and the digest of the file."""

from pathlib import Path

import pytest
import safetensors.torch
import torch

from steelyard.digests import digest_file
from steelyard.weights.shard_writer import write_shard

TENSORS = {
    "matrix": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "halves": torch.arange(5, dtype=torch.float32).to(torch.bfloat16),
    "turned": torch.arange(6, dtype=torch.float16).reshape(2, 3).T,
    "scalar": torch.tensor(7, dtype=torch.int64),
    "none": torch.zeros(0, 4),
    "mask": torch.tensor([True, False]),
}


def test_the_library_reads_every_tensor_back(tmp_path: Path) -> None:
    write_shard(tmp_path / "model.safetensors", TENSORS)
    found = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert sorted(found) == sorted(TENSORS)
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


def test_the_digest_is_that_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    written = write_shard(path, TENSORS)
    assert (written.digest, written.num_bytes) == digest_file(path)
    assert written.name == path.name


def test_a_file_that_is_there_is_not_written_over(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"of somebody")
    with pytest.raises(FileExistsError):
        write_shard(path, TENSORS)
    assert path.read_bytes() == b"of somebody"
