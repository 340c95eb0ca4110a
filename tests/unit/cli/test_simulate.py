"""The command: a scenario in, a few lines or JSON out."""

import json
import re
from pathlib import Path

import pytest
import yaml

from steelyard.cli.main import main


@pytest.fixture
def scenario(tmp_path: Path) -> str:
    small = {
        "name": "small",
        "devices": {"kind": "H100", "total": 4},
        "model": "qwen2.5-7b",
        "split": {"rollout": 2, "train": 2},
        "limits": {"min_train": 2},
        "steps": 6,
        "groups_per_batch": 2,
        "max_policy_lag": 1,
        "policy": {"kind": "queue", "options": {"adjust_interval_steps": 2, "queue_weight": 0.0}},
        "traces": {"path": "t.jsonl", "group_size": 2, "tool_s": 0.5},
    }
    turns = [
        {"prompt_tokens_new": 500, "generated_tokens": 300, "outcome": "ok"},
        {"prompt_tokens_new": 50, "generated_tokens": 200, "outcome": "none"},
    ]
    lines = [json.dumps({"task_id": f"t{i}", "group_id": f"g{i}", "turns": turns}) for i in range(4)]
    (tmp_path / "t.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(small))
    return str(tmp_path / "small.yaml")


def test_the_answer_is_a_few_lines_with_the_share_of_the_bound(
    scenario: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", scenario]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "small: 4 H100, qwen2.5-7b, policy queue, rollout=2 (tp 1) train=2 reward=0"
    for number, step in enumerate((2, 4, 6), start=1):
        assert re.fullmatch(
            rf"step={step} rollout_queue=\d+ train_backlog=\d+ => (adjust|keep) rollout=\d train=\d", lines[number]
        )
    assert lines[4].startswith("  6 steps in ")
    assert "of the proven bound" in lines[5]


def test_programs_get_json_and_may_change_policy_and_steps(scenario: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", scenario, "--json", "--steps", "2", "--policy", "fixed"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert len(result["steps"]) == 2
    assert result["bound"]["work_s"] > 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere.yaml"], "the scenario nowhere.yaml must be readable, got: No such file or directory"),
        (
            ["SCENARIO", "--policy", "magic"],
            "policy.kind must be one of fixed, queue, ratio, got 'magic'; the nearest is ratio",
        ),
        (["SCENARIO", "--steps", "0"], "num_steps must be >= 1, got 0"),
        (["TIGHT"], "small: limits.min_train must be >= 2, with which training fits, got 1"),
    ],
)
def test_bad_input_is_one_line(
    scenario: str, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    tight = Path(scenario).with_name("tight.yaml")
    tight.write_text(Path(scenario).read_text().replace("min_train: 2", "min_train: 1"))
    paths = {"SCENARIO": scenario, "TIGHT": str(tight)}
    assert main(["simulate", *(paths.get(word, word) for word in words)]) == 2
    assert capsys.readouterr().err == f"steelyard: {message}\n"


def test_missing_traces_are_named(scenario: str, capsys: pytest.CaptureFixture[str]) -> None:
    (Path(scenario).parent / "t.jsonl").unlink()
    assert main(["simulate", scenario]) == 2
    assert "traces.path must be readable" in capsys.readouterr().err
