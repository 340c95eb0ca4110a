"""What the user sees of bad input, Ctrl-C, a port in use, a full disk: a line that helps, an exit code, no debris."""

import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from steelyard.cli.main import EXIT_BAD_INPUT, EXIT_DONE, EXIT_INTERRUPTED, EXIT_RUN_FAILED, main
from steelyard.coordinator.events import StepBegun
from steelyard.run.auditing import audit_run
from steelyard.run.directory import existing_directory
from steelyard.testing.rehearsal import Foreground, adopting, left_running
from steelyard.testing.small_runs import command, journal_events, steelyard, write_small_config
from steelyard.testing.tiny_model import write_tiny_model

STOP_DEADLINE_S = 40.0
RUN_DEADLINE_S = 110.0
TINY_DISK_BYTES = 2_500_000
ENDLESS = 1_000_000


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("policy"))


@pytest.fixture(autouse=True)
def nothing_is_left_running() -> Iterator[None]:
    with adopting():
        yield
        assert left_running(STOP_DEADLINE_S) == []


# --- bad input ----------------------------------------------------------------------------------------


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that ``steelyard train`` says to bad input."""
    assert main(["train", *arguments]) == EXIT_BAD_INPUT
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1, captured.err
    return captured.err


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.policy=/nowhere", "model.policy must be a Hugging Face model directory, got /nowhere which does not"),
        ("train.batch_size=5", "train.batch_size must be divisible by rollout.group_size (2), got 5; 4 or 6 would fit"),
        ("rollout.max_tokens=4000", "rollout.max_tokens must be < model.max_context_tokens"),
        ("train.max_step=3", "max_steps"),
        ("train.max_steps=many", "max_steps"),
        ("environment.kind=chess", "chess"),
        ("environment.options={\"levl\": 3}", "levl"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_and_leaves_nothing(
    tmp_path: Path, policy: Path, capsys: pytest.CaptureFixture[str], override: str, message: str
) -> None:
    config = write_small_config(tmp_path, policy, run={"dir": str(tmp_path / "run")})
    assert message in refused([str(config), override], capsys)
    assert not (tmp_path / "run").exists()


def test_a_tokenizer_that_does_not_fit_the_model_is_named_before_the_start(
    tmp_path: Path, policy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(policy, broken)
    shape = json.loads((broken / "config.json").read_bytes())
    (broken / "config.json").write_text(json.dumps({**shape, "vocab_size": 100}))
    config = write_small_config(tmp_path, broken, run={"dir": str(tmp_path / "run")})
    assert "tokenizer and model must fit" in refused([str(config)], capsys)
    assert not (tmp_path / "run").exists()


def test_a_policy_without_weights_is_named_before_the_start(
    tmp_path: Path, policy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(policy, broken)
    (broken / "model.safetensors").unlink()
    config = write_small_config(tmp_path, broken, run={"dir": str(tmp_path / "run")})
    assert "must hold weights" in refused([str(config)], capsys)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("text", ["", "train: [", "- 1", "\0"])
def test_a_file_that_is_no_configuration_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    overrides = [f"run.dir={tmp_path / 'run'}", "model.policy=/nowhere"]
    refused([str(path), *overrides], capsys)
    assert not (tmp_path / "run").exists()


def test_there_is_nothing_to_resume_where_there_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "does not exist" in refused(["--resume", str(tmp_path / "absent")], capsys)
    assert not (tmp_path / "absent").exists()


# --- Ctrl-C -------------------------------------------------------------------------------------------


def interrupted(running: Foreground, run: Path, *, is_whole_group: bool) -> None:
    """Press Ctrl-C and look at what the user sees."""
    running.interrupt(is_whole_group=is_whole_group)
    assert running.wait(STOP_DEADLINE_S) == EXIT_INTERRUPTED, running.stderr
    assert running.stderr == f"interrupted; to go on, type: steelyard train --resume {run}\n"
    assert left_running(STOP_DEADLINE_S) == []


def end_after_two_more_steps(run: Path) -> None:
    """Let a run that would never end do so soon, wherever it was interrupted."""
    next_step = sum(isinstance(event, StepBegun) for event in journal_events(run))
    config = run / "config.yaml"
    text = config.read_text()
    assert text.count(f"max_steps: {ENDLESS}\n") == 1
    config.write_text(text.replace(f"max_steps: {ENDLESS}\n", f"max_steps: {next_step + 2}\n"))


@pytest.mark.timeout(300)
def test_ctrl_c_in_the_middle_of_training_ends_all_and_the_run_goes_on(tmp_path: Path, policy: Path) -> None:
    run = tmp_path / "run"
    config = write_small_config(tmp_path, policy, run={"dir": str(run)}, train={"max_steps": ENDLESS})
    with Foreground(command("train", config), tmp_path / "stderr") as running:
        running.wait_for(f"step 1/{ENDLESS}")
        for arguments, words in (
            (("--resume", str(run)), f"{run} is in use by another run (process {running.pid})"),
            ((str(config),), f"to go on with it, type: steelyard train --resume {run}"),
        ):
            second = steelyard("train", *arguments)
            assert second.returncode == EXIT_BAD_INPUT, second.stdout
            assert words in second.stderr
            assert second.stderr.count("\n") == 1
        interrupted(running, run, is_whole_group=True)
    end_after_two_more_steps(run)
    again = steelyard("train", "--resume", run)
    assert again.returncode == EXIT_DONE, again.stderr
    assert audit_run(existing_directory(str(run))).is_passed


@pytest.mark.timeout(120)
@pytest.mark.parametrize("is_whole_group", [False, True])
def test_ctrl_c_while_the_processes_start_ends_them(tmp_path: Path, policy: Path, is_whole_group: bool) -> None:
    run = tmp_path / "run"
    config = write_small_config(tmp_path, policy, run={"dir": str(run)})
    with Foreground(command("train", config), tmp_path / "stderr") as running:
        running.wait_for("] start")
        interrupted(running, run, is_whole_group=is_whole_group)


@pytest.mark.timeout(120)
def test_a_polite_kill_ends_the_run_as_ctrl_c_does(tmp_path: Path, policy: Path) -> None:
    run = tmp_path / "run"
    config = write_small_config(tmp_path, policy, run={"dir": str(run)}, train={"max_steps": ENDLESS})
    with Foreground(command("train", config), tmp_path / "stderr") as running:
        running.wait_for(f"step 1/{ENDLESS}")
        running.send(signal.SIGTERM)
        assert running.wait(STOP_DEADLINE_S) == EXIT_INTERRUPTED, running.stderr
        assert running.stderr == f"interrupted; to go on, type: steelyard train --resume {run}\n"


@pytest.mark.timeout(120)
def test_ctrl_c_again_and_again_still_ends_all_and_says_how_to_go_on(tmp_path: Path, policy: Path) -> None:
    run = tmp_path / "run"
    config = write_small_config(tmp_path, policy, run={"dir": str(run)}, train={"max_steps": ENDLESS})
    with Foreground(command("train", config), tmp_path / "stderr") as running:
        running.wait_for(f"step 1/{ENDLESS}")
        for _ in range(3):
            running.interrupt(is_whole_group=True)
        assert running.wait(STOP_DEADLINE_S) == EXIT_INTERRUPTED, running.stderr
        assert "Traceback" not in running.stderr
        assert f"interrupted; to go on, type: steelyard train --resume {run}\n" in running.stderr


@pytest.mark.timeout(300)
def test_what_a_killed_run_left_on_the_disk_is_cleared_when_it_goes_on(tmp_path: Path, policy: Path) -> None:
    run = tmp_path / "run"
    config = write_small_config(
        tmp_path, policy, run={"dir": str(run)}, train={"max_steps": ENDLESS}, sandbox={"kind": "process"}
    )
    # Short, for the sake of the sockets' paths.
    with tempfile.TemporaryDirectory(prefix="t") as name:
        temporary = Path(name)
        variables = {"TMPDIR": name}
        with Foreground(command("train", config), tmp_path / "stderr", variables=variables) as running:
            running.wait_for(f"step 1/{ENDLESS}")
            running.send(signal.SIGKILL)
            running.wait(STOP_DEADLINE_S)
        assert left_running(STOP_DEADLINE_S) == []
        assert list(temporary.glob("steelyard-*"))
        end_after_two_more_steps(run)
        with Foreground(command("train", "--resume", run), tmp_path / "again", variables=variables) as running:
            assert running.wait(RUN_DEADLINE_S) == EXIT_DONE, running.stderr
        assert list(temporary.glob("steelyard-*")) == []
        assert list((run / "sandboxes").rglob("*.json")) == []


@pytest.mark.timeout(120)
def test_ctrl_c_while_the_quick_policy_is_built_leaves_no_half_of_it(tmp_path: Path, policy: Path) -> None:
    run, cache = tmp_path / "run", tmp_path / "cache"
    config = write_small_config(tmp_path, policy, run={"dir": str(run)}, model={"policy": "builtin:quick"})
    with Foreground(command("train", config, "--cache-dir", cache), tmp_path / "stderr") as running:
        running.wait_for("prepare policy")
        interrupted(running, run, is_whole_group=True)
    assert not list(cache.glob("policies/*/model.safetensors"))


# --- the machine refuses ------------------------------------------------------------------------------


@pytest.mark.timeout(300)
def test_a_port_in_use_is_named_and_the_run_goes_on_once_it_is_free(tmp_path: Path, policy: Path) -> None:
    run = tmp_path / "run"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = write_small_config(
            tmp_path, policy, run={"dir": str(run)}, train={"max_steps": 1}, gateway={"port": port}
        )
        ended = steelyard("train", config)
        assert ended.returncode == EXIT_BAD_INPUT
        assert f"gateway.port: 127.0.0.1:{port} must be free" in ended.stderr
        assert f"steelyard train --resume {run}" in ended.stderr
        assert "Traceback" not in ended.stderr
    again = steelyard("train", "--resume", run)
    assert again.returncode == EXIT_DONE, again.stderr


def failed_by_the_disk(running: Foreground, run: Path) -> None:
    """The exit code and the words of a run that the disk refused."""
    assert running.wait(RUN_DEADLINE_S) == EXIT_RUN_FAILED, running.stderr
    assert f"to go on once that is mended, type: steelyard train --resume {run}\n" in running.stderr
    assert (
        "could not be written" in running.stderr
        or "must be writable" in running.stderr
        or "cannot write" in (running.stderr)
    )
    assert "Traceback" not in running.stderr


@pytest.mark.timeout(300)
def test_a_checkpoint_that_the_disk_refuses_ends_the_run_which_goes_on_later(tmp_path: Path, policy: Path) -> None:
    run = tmp_path / "run"
    config = write_small_config(tmp_path, policy, run={"dir": str(run)}, train={"max_steps": 2})
    weights = (policy / "model.safetensors").stat().st_size
    # Weights fit, the optimizer's two moments of each do not.
    with Foreground(command("train", config), tmp_path / "stderr", max_file_bytes=weights * 3 // 2) as running:
        failed_by_the_disk(running, run)
    assert "checkpoint step-000001" in running.stderr and "File too large" in running.stderr
    again = steelyard("train", "--resume", run)
    assert again.returncode == EXIT_DONE, again.stderr
    assert audit_run(existing_directory(str(run))).is_passed


def mount_tiny_disk(path: Path) -> bool:
    """Mount a small file system in memory; False where this user or machine may not."""
    path.mkdir(exist_ok=True)
    if os.geteuid() != 0:
        return False
    mounting = ["mount", "-t", "tmpfs", "-o", f"size={TINY_DISK_BYTES}", "tmpfs", str(path)]
    return subprocess.run(mounting, capture_output=True, check=False).returncode == 0


@pytest.mark.timeout(300)
def test_a_full_disk_ends_the_run_which_goes_on_once_there_is_room(tmp_path: Path, policy: Path) -> None:
    disk = tmp_path / "disk"
    is_mounted = mount_tiny_disk(disk)
    run = disk / "run"
    config = write_small_config(tmp_path, policy, run={"dir": str(run)}, train={"max_steps": 4})
    try:
        # Who may not mount gets a limit on each file that even the first version exceeds.
        limit = None if is_mounted else 100_000
        with Foreground(command("train", config), tmp_path / "stderr", max_file_bytes=limit) as running:
            failed_by_the_disk(running, run)
        if is_mounted:
            assert "No space left on device" in running.stderr or "full" in running.stderr
            subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
        again = steelyard("train", "--resume", run)
        assert again.returncode == EXIT_DONE, again.stderr
        assert audit_run(existing_directory(str(run))).is_passed
    finally:
        if is_mounted:
            subprocess.run(["umount", "-l", str(disk)], check=True)
