"""``steelyard worker`` and ``steelyard scorer`` on the command line: bad input is one line and exit code 2."""

from pathlib import Path

import pytest

from steelyard import config_file
from steelyard.cli.main import EXIT_BAD_INPUT, main
from steelyard.config import Config

URL = "http://127.0.0.1:1"


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "run.yaml"
    path.write_text(config_file.to_yaml(Config()), encoding="utf-8")
    return str(path)


def complaint(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What is said of a command that must be refused."""
    assert main(arguments) == EXIT_BAD_INPUT
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("steelyard: ")
    assert len(said.err.splitlines()) == 1
    return said.err


def test_urls_numbers_and_keys_are_checked_before_anything_is_done(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scorer = ("scorer", config, "--key-file", str(tmp_path / "none"))
    worker = ("worker", config, "--key-file", str(tmp_path / "none"), "--coordinator", URL)
    for arguments, message in (
        ((*scorer, "--coordinator", "there:7001"), "--coordinator must be http://HOST:PORT or https://HOST, got there"),
        ((*worker, "--gateway", "there:7002"), "--gateway must be http://HOST:PORT or https://HOST, got there:7002"),
        ((*scorer, "--coordinator", URL, "--lost-after", "0"), "--lost-after must be a number of seconds > 0, got 0"),
        ((*scorer, "--coordinator", URL, "--lost-after", "nan"), "--lost-after must be a number of seconds > 0"),
        ((*scorer, "--coordinator", URL, "--drain", "-1"), "--drain must be a number of seconds >= 0, got -1"),
        ((*scorer, "--coordinator", URL, "--processes", "0"), "--processes must be >= 1, got 0"),
        ((*scorer, "--coordinator", URL), "--key-file must be a readable file with a key"),
        ((*worker, "--gateway", URL), "--key-file must be a readable file with a key"),
    ):
        assert message in complaint(capsys, *arguments)


def test_config_may_be_a_run_directory_and_takes_overrides(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").write_text(Path(config).read_text(encoding="utf-8"), encoding="utf-8")
    options = ("--coordinator", URL, "--key-file", "none")
    assert "--key-file" in complaint(capsys, "scorer", str(tmp_path), *options)
    assert "sandbox.num_warm" in complaint(capsys, "scorer", str(tmp_path), "sandbox.num_warm=-1", *options)
    assert "RUN must be a run directory" in complaint(capsys, "scorer", str(tmp_path.parent), *options)


def test_a_run_without_workers_of_its_own_must_serve_others(capsys: pytest.CaptureFixture[str], config: str) -> None:
    for name in ("rollout.num_workers", "scoring.num_workers"):
        message = complaint(capsys, "train", config, f"{name}=0", "--dry-run")
        assert f"coordinator.port must be set where {name} is 0" in message
        assert main(["train", config, f"{name}=0", "coordinator.port=0", "--dry-run"]) == 0
        capsys.readouterr()
    assert "rollout.num_workers must be 0 or 1" in complaint(capsys, "train", config, "rollout.num_workers=2")
