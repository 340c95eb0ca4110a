"""``steelyard plan``: the plan with all that stands beside it, as lines and as JSON."""

import json
from pathlib import Path

import pytest

from steelyard.cli.main import main

EXAMPLES = Path(__file__).parents[3] / "examples"
REWARD = str(EXAMPLES / "scenarios" / "reward_model.yaml")
CONFIG = str(EXAMPLES / "simulate" / "scheduled.yaml")


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["plan", *arguments]) == 0
    return capsys.readouterr().out


def test_it_prints_plan_stages_bound_runner_ups_and_one_more_device(capsys: pytest.CaptureFixture[str]) -> None:
    lines = plan(capsys, REWARD).splitlines()
    assert lines[0].startswith("reward_model: 24 H100, qwen2.5-7b")
    assert lines[1].startswith("plan: rollout ")
    assert "takes longest" in lines[2]
    for wanted in (
        "  trainer: ",
        "  rollout  ",
        "  path  ",
        "  train  ",
        "  reward  ",
        "  publish  ",
        "one more device:",
    ):
        assert any(line.startswith(wanted) for line in lines), wanted
    assert sum("of the proven bound" in line for line in lines) == 1
    assert any(line.startswith("the split in the file: rollout 12 x tp 1, train 8, reward 4") for line in lines)
    at = lines.index("runner-ups:")
    assert "trajectories/s (+" in lines[at + 1]


def test_json_says_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    made = json.loads(plan(capsys, REWARD, "--json"))
    period_s = made["planned"]["periods"]["period_s"]
    assert made["trajectories_per_s"] == pytest.approx(made["batch_trajectories"] / period_s)
    assert made["bound_s"] < period_s < made["given"]["periods"]["period_s"]
    assert [one["role"] for one in made["more"]] == ["rollout", "train", "reward"]
    assert all(one["periods"]["period_s"] >= period_s for one in made["runner_ups"])
    split = made["planned"]["split"]
    assert split["rollout"] + split["train"] + split["reward"] <= 24


def test_a_file_without_a_split_is_planned_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (EXAMPLES / "scenarios" / "reward_model.yaml").read_text()
    path = tmp_path / "cluster.yaml"
    path.write_text("\n".join(line for line in text.splitlines() if not line.startswith(("split:", "steps:"))))
    assert json.loads(plan(capsys, str(path), "--json"))["given"] is None


def test_more_devices_by_an_override_are_never_slower(capsys: pytest.CaptureFixture[str]) -> None:
    few, many = (json.loads(plan(capsys, REWARD, f"devices.total={total}", "--json")) for total in (24, 32))
    assert many["trajectories_per_s"] >= few["trajectories_per_s"]


def test_a_configuration_is_planned_with_what_was_assumed(capsys: pytest.CaptureFixture[str]) -> None:
    lines = plan(capsys, CONFIG, "train.max_steps=5").splitlines()
    assert any(line.startswith("note: devices are taken to be H100s") for line in lines)


def test_bad_input_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("devices: {kind: H100, total: 8}\n")
    assert main(["plan", str(path)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
