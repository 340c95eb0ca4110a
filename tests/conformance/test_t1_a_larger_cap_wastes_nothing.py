"""T1: raising the response cap made a third of all generated tokens stale, and they were thrown away.

Admission paces: the steps take longer, and every token is trained. The token book closes and shows it; where a device
dies it shows what was lost.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from steelyard.cli.main import main

DOUBLED_HALF_WAY = {
    "name": "cap",
    "devices": {"kind": "H100", "total": 8},
    "model": "qwen2.5-7b",
    "split": {"rollout": 4, "train": 4},
    "limits": {"min_rollout": 1, "min_train": 4},
    "steps": 8,
    "groups_per_batch": 2,
    "max_policy_lag": 1,
    "max_tokens": 8192,
    "synthetic": {
        "num_groups": 16,
        "group_size": 4,
        "turns": {"median": 1},
        "generated_tokens": {"median": 2000, "sigma": 1.2, "tail_frac": 0.2, "longest": 4096},
        "first_prompt_tokens": {"median": 200},
        "tool_result_tokens": {"median": 1},
        "tool_s": {"median": 0.001},
        "phases": [{"first_group": 8, "num_groups": 8, "generated_factor": 2.0}],
    },
}


def simulate(directory: Path, capsys: pytest.CaptureFixture[str], **changes: Any) -> dict[str, Any]:
    path = directory / "cap.yaml"
    path.write_text(yaml.safe_dump({**DOUBLED_HALF_WAY, **changes}), encoding="utf-8")
    assert main(["simulate", str(path), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_t1_doubling_the_cap_half_way_makes_steps_longer_and_no_token_stale(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = simulate(tmp_path, capsys)
    tokens, steps = result["tokens"], result["steps"]
    assert tokens["recorded"] == tokens["trained"] > 0
    assert (tokens["rejected"], tokens["lost"], tokens["in_flight"]) == ({}, {}, 0)
    assert max(step["max_lag"] for step in steps) <= 1
    first_half_s, second_half_s = steps[3]["ended_at_s"], steps[-1]["ended_at_s"] - steps[3]["ended_at_s"]
    assert second_half_s > 1.3 * first_half_s


def test_t1_what_a_dead_device_loses_is_in_the_book_and_the_rest_is_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = simulate(tmp_path, capsys)["tokens"]
    death = {"at_s": 10.0, "role": "rollout", "returns_after_s": 5.0}
    tokens = simulate(tmp_path, capsys, failures=[death])["tokens"]
    assert tokens["trained"] == whole["trained"]
    assert tokens["lost"]["replica_failed"] > 0
    assert tokens["recorded"] == tokens["trained"] + sum(tokens["lost"].values())
