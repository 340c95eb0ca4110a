"""Rows of metrics on a disk that refuses them."""

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from steelyard.errors import StorageFailed
from steelyard.metrics import MetricsFile


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """The system takes a part of a write that crosses the limit, and refuses the next one."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_row_that_the_disk_takes_only_in_part_is_taken_back(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    file.write(1.0, "step", loss=0.5)
    whole = path.read_bytes()
    with files_of_at_most(len(whole) + 10), pytest.raises(StorageFailed, match=r"metrics\.jsonl must be writable"):
        file.write(2.0, "step", loss=0.25)
    assert path.read_bytes() == whole
    file.write(3.0, "step", loss=0.125)
    file.close()
    assert path.read_bytes().count(b"\n") == 2


def test_a_row_that_the_disk_refuses_is_a_failure_of_storage(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    file.write(1.0, "step", loss=0.5)
    limit = path.stat().st_size
    with files_of_at_most(limit), pytest.raises(StorageFailed, match="File too large"):
        file.write(2.0, "step", loss=0.25)
    file.close()
    assert path.stat().st_size == limit


def test_a_metrics_file_that_cannot_be_opened_is_a_failure_of_storage(tmp_path: Path) -> None:
    with pytest.raises(StorageFailed, match=os.strerror(2)):
        MetricsFile(tmp_path / "absent" / "metrics.jsonl")
