"""``steelyard calibrate`` on real processes, and what the simulator makes of its file."""

import json
from pathlib import Path

import pytest
import yaml

from steelyard.allocation.calibration import decode_calibration
from steelyard.cli.main import main
from steelyard.testing.tiny_model import write_tiny_model

SMALL = (
    "model.max_context_tokens=96",
    "inference.max_running=4",
    "inference.kv_tokens=512",
    "rollout.max_tokens=32",
    "train.micro_batch_tokens=192",
)

SCENARIO = {
    "name": "small",
    "devices": {"kind": "CPU", "total": 2},
    "split": {"rollout": 1, "train": 1},
    "steps": 2,
    "groups_per_batch": 2,
    "max_policy_lag": 1,
    "synthetic": {
        "num_groups": 4,
        "group_size": 2,
        "turns": {"median": 2},
        "generated_tokens": {"median": 16},
        "first_prompt_tokens": {"median": 16},
        "tool_result_tokens": {"median": 8},
        "tool_s": {"median": 0.1},
        "max_context_tokens": 96,
    },
}


@pytest.mark.timeout(400)
def test_a_policy_is_calibrated_on_this_machine_and_simulated_with_what_was_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, output = tmp_path / "policy", tmp_path / "found.json"
    write_tiny_model(model)
    config = tmp_path / "run.yaml"
    config.write_text(f"model: {{policy: {model}}}\n")

    assert main(["calibrate", str(config), "--output", str(output), "--rounds", "1", *SMALL]) == 0
    printed = capsys.readouterr().out
    for term in ("prefill", "decode", "mixed", "training", "publication", "load"):
        assert f"    {term} " in printed
    assert printed.endswith(f"written to {output}\n")

    found = decode_calibration(output.read_bytes(), "found.json")
    assert (found.engine, found.max_running, found.limits.kv_tokens) == ("local", 4, 512)
    assert {point.term for point in found.points} == {"prefill", "decode", "mixed", "training"}
    assert {error.term for error in found.errors} == {"prefill", "decode", "mixed", "training", "publication", "load"}

    scenario = tmp_path / "small.yaml"
    scenario.write_text(yaml.safe_dump(SCENARIO | {"model": "policy", "calibration": "found.json"}))
    assert main(["simulate", str(scenario), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["makespan_s"] > 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere.yaml", "--output", "OUT"], "nowhere.yaml"),
        (["CONFIG", "--output", "OUT", "--rounds", "0"], "--rounds must be >= 1, got 0"),
        (["CONFIG", "--output", "missing/found.json"], "--output must be in a folder that exists, got missing/found"),
        (["CONFIG", "--output", "OUT", "inference.engine=emulated"], "inference.engine must be local or vllm to be"),
        (
            [
                "CONFIG",
                "--output",
                "OUT",
                "inference.max_running=1",
                "model.max_context_tokens=96",
                "rollout.max_tokens=9",
            ],
            "must leave at least 5 bursts to fit to, got 96 and 1, which leave 3",
        ),
        (["CONFIG", "--output", "OUT", "inference.max_runing=4"], "inference.max_running"),
    ],
)
def test_what_cannot_be_calibrated_is_refused_in_one_line(
    tmp_path: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tiny_model(tmp_path / "policy")
    config = tmp_path / "run.yaml"
    config.write_text(f"model: {{policy: {tmp_path / 'policy'}}}\n")
    paths = {"CONFIG": str(config), "OUT": str(tmp_path / "found.json")}
    assert main(["calibrate", *(paths.get(word, word) for word in words)]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not (tmp_path / "found.json").exists()
