"""U1: that the batch could not be divided was found out after an hour of start-up.

``--dry-run`` says so at once, and what would fit: it loads no torch, starts no process and makes no run directory.
"""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from steelyard.cli.main import main
from steelyard.testing.small_runs import environment, steelyard

BATCH_30_OVER_8_RANKS = {"train": {"batch_size": 30}, "rollout": {"group_size": 2}, "resources": {"train_gpus": 8}}
MESSAGE = (
    "steelyard: train.batch_size must be divisible by resources.train_gpus x train.grad_accum_steps (8 x 1 = 8), "
    "got 30; 24 or 32 would fit\n"
)
RUN_AND_LIST_MODULES = """
import sys
from steelyard.cli.main import main
code = main(sys.argv[1:])
print(sorted({"torch", "transformers", "safetensors"} & set(sys.modules)))
sys.exit(code)
"""


def write(directory: Path, tree: object) -> Path:
    path = directory / "run.yaml"
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    return path


@pytest.mark.parametrize("dry", [["--dry-run"], []])
def test_u1_batch_30_over_8_ranks_is_refused_before_anything_starts(tmp_path: Path, dry: list[str]) -> None:
    done = steelyard("train", write(tmp_path, BATCH_30_OVER_8_RANKS), *dry, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", MESSAGE)
    assert [path.name for path in tmp_path.iterdir()] == ["run.yaml"]


def test_u1_the_dry_run_loads_nothing_that_takes_long(tmp_path: Path) -> None:
    arguments = ["train", str(write(tmp_path, BATCH_30_OVER_8_RANKS)), "--dry-run"]
    done = subprocess.run(
        [sys.executable, "-c", RUN_AND_LIST_MODULES, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment(),
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (2, "[]\n", MESSAGE)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.batch_size=31", "train.batch_size must be divisible by rollout.group_size (2), got 31; 30 or 32"),
        ("train.grad_accum_steps=4", "train.batch_size must be divisible by resources.train_gpus x train.grad_accum"),
        ("algorithm.min_scored=3", "algorithm.min_scored must be <= rollout.group_size (2), got 3"),
        ("rollout.max_tokens=2048", "rollout.max_tokens must be < model.max_context_tokens (1024), got 2048"),
        ("inference.kv_tokens=512", "inference.kv_tokens must be >= model.max_context_tokens (1024), got 512"),
        ("model.policy=nowhere/model", "model.policy"),
    ],
)
def test_u1_whatever_cannot_work_is_named_with_what_came_instead(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], override: str, message: str
) -> None:
    config = write(tmp_path, {"train": {"batch_size": 30}, "rollout": {"group_size": 2}})
    assert main(["train", str(config), override, "--dry-run"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(f"steelyard: {message}")


def test_u1_what_would_fit_does_fit_and_the_resolved_configuration_is_printed(tmp_path: Path) -> None:
    config = write(tmp_path, {"train": {"batch_size": 32}, "rollout": {"group_size": 2}})
    done = steelyard("train", config, "train.grad_accum_steps=8", "--dry-run", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    resolved = yaml.safe_load(done.stdout)
    assert (resolved["train"]["batch_size"], resolved["train"]["grad_accum_steps"]) == (32, 8)
    assert resolved["admission"]["max_policy_lag"] == 1, "defaults are shown too"
    assert [path.name for path in tmp_path.iterdir()] == ["run.yaml"]
