"""Directories that are wholly there or not at all."""

import errno
from pathlib import Path

import pytest

from steelyard import durable
from steelyard.errors import StorageFailed


def test_a_published_directory_appears_with_all_its_files(tmp_path: Path) -> None:
    temporary = durable.new_temporary(tmp_path / "final")
    durable.write_durably(temporary / "one", b"1")
    points: list[str] = []
    durable.publish_directory(temporary, tmp_path / "final", points.append)
    assert (tmp_path / "final" / "one").read_bytes() == b"1"
    assert not temporary.exists()
    assert points == ["before_rename", "renamed"]


def test_what_an_earlier_attempt_left_is_removed_first(tmp_path: Path) -> None:
    durable.write_durably(durable.new_temporary(tmp_path / "final") / "old", b"1")
    assert list(durable.new_temporary(tmp_path / "final").iterdir()) == []


def test_a_sweep_removes_temporary_names_and_nothing_else(tmp_path: Path) -> None:
    durable.new_temporary(tmp_path / "final")
    (tmp_path / ".tmp-file").write_bytes(b"")
    (tmp_path / "kept").mkdir()
    assert durable.sweep_temporary(tmp_path) == (".tmp-file", ".tmp-final")
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    assert durable.sweep_temporary(tmp_path / "absent") == ()


def test_a_directory_is_removed_also_where_an_earlier_removal_was_cut_short(tmp_path: Path) -> None:
    (tmp_path / ".tmp-removed-v").mkdir()
    (tmp_path / "v").mkdir()
    (tmp_path / "v" / "file").write_bytes(b"")
    durable.remove_directory(tmp_path / "v")
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_never_written_over(tmp_path: Path) -> None:
    durable.write_durably(tmp_path / "file", b"1")
    with pytest.raises(FileExistsError):
        durable.write_durably(tmp_path / "file", b"2")


def test_a_link_shares_the_bytes_of_its_source(tmp_path: Path) -> None:
    durable.write_durably(tmp_path / "file", b"1")
    durable.link_or_copy(tmp_path / "file", tmp_path / "link")
    assert (tmp_path / "link").samefile(tmp_path / "file")


def test_a_full_disk_becomes_one_error_that_says_what_could_not_be_written() -> None:
    with pytest.raises(StorageFailed, match=r"version 3 could not be written.*No space left"):  # noqa: SIM117
        with durable.storage_errors("version 3"):
            raise OSError(errno.ENOSPC, "No space left on device")
