"""A1: a static split left one side idle once lengths grew.

`steelyard simulate` plays a trace whose trajectories grow longer half-way, in turns and in what each samples: `planner`
plans anew and ends sooner than the split that was right before; where the lengths stay it leaves the split alone.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from steelyard.cli.main import main

NUM_STEPS = 16
HALF = NUM_STEPS // 2
GROUPS = 8


def scenario(growth: float) -> dict[str, Any]:
    return {
        "name": "growing",
        "devices": {"kind": "H100", "total": 16},
        "model": "qwen2.5-7b",
        # Right for the first half, where prompts are long and answers short.
        "split": {"rollout": 6, "train": 10, "rollout_tp": 2},
        "limits": {"min_rollout": 2, "min_train": 4},
        "steps": NUM_STEPS,
        "groups_per_batch": GROUPS,
        "max_policy_lag": 2,
        "synthetic": {
            "num_groups": NUM_STEPS * GROUPS,
            "group_size": 8,
            "turns": {"median": 1},
            "generated_tokens": {"median": 60, "sigma": 0.3},
            "first_prompt_tokens": {"median": 8000, "sigma": 0.2},
            "tool_result_tokens": {"median": 200},
            "tool_s": {"median": 0.01},
            "phases": [
                {
                    "first_group": HALF * GROUPS,
                    "num_groups": HALF * GROUPS,
                    "turns_factor": growth,
                    "generated_factor": growth**3,
                    "prompt_factor": 1.0 / growth,
                }
            ],
        },
    }


def simulate(
    folder: Path, capsys: pytest.CaptureFixture[str], growth: float, policy: str, *more: str
) -> dict[str, Any]:
    path = folder / "s.yaml"
    path.write_text(yaml.safe_dump(scenario(growth)), encoding="utf-8")
    assert main(["simulate", str(path), "--policy", policy, "--json", *more]) == 0
    made: dict[str, Any] = json.loads(capsys.readouterr().out)
    return made


def changes(result: dict[str, Any]) -> list[int]:
    return [one["step"] for one in result["decisions"] if one["is_change"]]


def test_a1_lengths_that_grow_are_planned_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fixed, planned = (simulate(tmp_path, capsys, 2.0, policy) for policy in ("fixed", "planner"))
    assert any(step >= HALF for step in changes(planned))
    assert planned["makespan_s"] < fixed["makespan_s"]
    assert planned["idle_frac"]["train"] < fixed["idle_frac"]["train"]
    assert all(one["reason"] for one in planned["decisions"] if one["is_change"])


def test_a1_while_lengths_stay_the_split_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    planned = simulate(tmp_path, capsys, 1.0, "planner")
    assert changes(planned) == []


def test_a1_a_change_that_costs_more_than_it_brings_is_not_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert changes(simulate(tmp_path, capsys, 2.0, "planner", "rates.start_s=100000")) == []
