"""Deletion of versions: exactly what was said, safe to repeat, safe for slow readers."""

from pathlib import Path

from steelyard.weights.manifest import MANIFEST_NAME
from steelyard.weights.retention import VersionStore


def make_version(root: Path, version: int, *, whole: bool = True) -> Path:
    path = VersionStore(root).path(version)
    path.mkdir()
    (path / "model.safetensors").write_bytes(b"weights")
    if whole:
        (path / MANIFEST_NAME).write_bytes(b"{}")
    return path


def test_only_the_named_versions_are_deleted(tmp_path: Path) -> None:
    for version in range(4):
        make_version(tmp_path, version)
    store = VersionStore(tmp_path)
    assert store.delete([2, 0]) == (0, 2)
    assert store.versions() == (1, 3)


def test_deleting_again_is_no_error(tmp_path: Path) -> None:
    make_version(tmp_path, 0)
    store = VersionStore(tmp_path)
    assert store.delete([0]) == (0,)
    assert store.delete([0]) == ()


def test_a_reader_that_has_opened_a_file_reads_it_to_the_end(tmp_path: Path) -> None:
    path = make_version(tmp_path, 0)
    with (path / "model.safetensors").open("rb") as file:
        first = file.read(3)
        VersionStore(tmp_path).delete([0])
        assert first + file.read() == b"weights"


def test_a_directory_without_a_manifest_is_no_version(tmp_path: Path) -> None:
    make_version(tmp_path, 5, whole=False)
    make_version(tmp_path, 12)
    assert VersionStore(tmp_path).versions() == (12,)


def test_a_sweep_removes_a_half_written_version(tmp_path: Path) -> None:
    (tmp_path / ".tmp-v000003").mkdir()
    make_version(tmp_path, 2)
    store = VersionStore(tmp_path)
    assert store.sweep() == (".tmp-v000003",)
    assert store.versions() == (2,)
