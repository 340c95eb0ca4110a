"""A2: that the devices did not fit the layout was found out after launch.

`steelyard simulate` and `steelyard plan` say so before anything runs, name the field and what would fit; the exit code
says bad input.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from steelyard.cli.main import main

WORK = {
    "num_groups": 4,
    "group_size": 2,
    "turns": {"median": 1},
    "generated_tokens": {"median": 100},
    "first_prompt_tokens": {"median": 500},
    "tool_result_tokens": {"median": 1},
    "tool_s": {"median": 0.001},
}
TEN_DEVICES = {
    "name": "ten",
    "devices": {"kind": "H100", "total": 10},
    "model": "qwen2.5-7b",
    "split": {"rollout": 6, "train": 4, "rollout_tp": 4},
    "limits": {"min_rollout": 1, "min_train": 4},
    "steps": 1,
    "groups_per_batch": 4,
    "max_policy_lag": 1,
    "synthetic": WORK,
}
LARGE = {"model": "llama-3.1-70b", "devices": {"kind": "A100", "total": 40}}


def simulate(directory: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any]) -> tuple[int, str]:
    path = directory / "s.yaml"
    path.write_text(yaml.safe_dump({**TEN_DEVICES, **changes}), encoding="utf-8")
    code = main(["simulate", str(path)])
    shown = capsys.readouterr()
    assert shown.out == ""
    return code, shown.err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "rollout must be a multiple of rollout_tp = 4, got 6; 4 or 8 would fit"),
        ({"split": {"rollout": 6, "train": 5}}, "a plan must use at most 10 devices, got 11"),
        ({"split": {"rollout": 6, "train": 3}}, "train must have at least 4 devices, got 3"),
        ({"split": {"rollout": 6, "train": 4, "rollout_tp": 3}}, "3; 1, 2, 4 would fit; 1 or 2 or 4 would fit"),
        ({"split": {"rollout": 6, "train": 4, "rollout_tp": 0}}, "rollout_tp must be >= 1, got 0"),
        ({"split": {"rollout": 9, "train": 1}, "limits": {"min_train": 1}}, "limits.min_train must be >= "),
        ({"limits": {"min_rollout": 8, "min_train": 4}}, "min_rollout + min_train + min_reward must be at most the 10"),
        ({"limits": {"min_rollout": -1}}, "min_rollout must be >= 0, got -1"),
        (
            {**LARGE, "split": {"rollout": 2, "train": 36}, "limits": {"min_train": 32}},
            "rollout_tp cannot be 1: tp must be large enough that llama-3.1-70b fits",
        ),
        (
            {"synthetic": {**WORK, "first_prompt_tokens": {"median": 2_000_000}, "max_context_tokens": 3_000_000},
             "split": {"rollout": 4, "train": 4}},
            "rollout_tp must be one with KV memory for the longest context, 2000100 tokens, got 1 with room for ",
        ),
        ({"reward": {"model": "qwen2.5-7b"}, "split": {"rollout": 4, "train": 4}}, "split.reward must be >= 1, for"),
        ({"steps": 0, "split": {"rollout": 4, "train": 4}}, "num_steps must be >= 1, got 0"),
    ],
)  # fmt: skip
def test_a2_what_cannot_be_is_refused_with_what_would_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], message: str
) -> None:
    code, error = simulate(tmp_path, capsys, changes)
    assert (code, message in error, error.count("\n")) == (2, True, 1), error


def test_a2_what_was_said_to_fit_fits(tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(yaml.safe_dump({**TEN_DEVICES, "split": {"rollout": 4, "train": 4, "rollout_tp": 4}}))
    assert main(["simulate", str(path)]) == 0


def plan(directory: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any]) -> tuple[int, str]:
    path = directory / "c.yaml"
    path.write_text(yaml.safe_dump({**TEN_DEVICES, **changes}), encoding="utf-8")
    code = main(["plan", str(path)])
    error = capsys.readouterr().err
    assert len(error.splitlines()) <= 1, error
    return code, error


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "split: rollout must be a multiple of rollout_tp = 4, got 6; 4 or 8 would fit"),
        (
            {**LARGE, "devices": {"kind": "A100", "total": 10}, "split": {"rollout": 0, "train": 0}},
            "train must be a number of devices into which a tp x pp x dp x cp of llama-3.1-70b fits, got at most 10; ",
        ),
        (
            {"split": {"rollout": 6, "train": 4, "rollout_tp": 3}},
            "split: rollout_tp must be one that holds the longest",
        ),
        ({"split": {"rollout": 9, "train": 1}, "limits": {}}, "split: train must be >= "),
    ],
)
def test_a2_a_plan_is_refused_with_what_would_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], message: str
) -> None:
    code, error = plan(tmp_path, capsys, changes)
    assert code == 2
    assert message in error


def test_a2_what_is_planned_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "c.yaml"
    tree = {**TEN_DEVICES, "split": {"rollout": 0, "train": 0}}
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    assert main(["plan", str(path), "--json"]) == 0
    split = json.loads(capsys.readouterr().out)["planned"]["split"]
    path.write_text(yaml.safe_dump({**tree, "split": split}), encoding="utf-8")
    assert main(["simulate", str(path)]) == 0
