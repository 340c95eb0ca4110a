"""The command: a scenario in, a few lines or JSON out."""

import gzip
import json
import os
import re
import signal
import subprocess
import sys
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
            "policy.kind must be one of fixed, queue, ratio, libra, planner, oracle, got 'magic'; the nearest is ratio",
        ),
        (["SCENARIO", "--steps", "0"], "num_steps must be >= 1, got 0"),
        (
            ["SCENARIO", "--calibration", "no.json"],
            "the calibration no.json must be readable, got: No such file or dir",
        ),
        (["SCENARIO", "--calibration", "RUBBISH"], "RUBBISH must be a calibration that `steelyard calibrate` wrote"),
        (["TIGHT"], "small: limits.min_train must be >= 2, with which training fits, got 1"),
    ],
)
def test_bad_input_is_one_line(
    scenario: str, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    tight = Path(scenario).with_name("tight.yaml")
    tight.write_text(Path(scenario).read_text().replace("min_train: 2", "min_train: 1"))
    rubbish = Path(scenario).with_name("rubbish.json")
    rubbish.write_bytes(b"\xff{")
    paths = {"SCENARIO": scenario, "TIGHT": str(tight), "RUBBISH": str(rubbish)}
    assert main(["simulate", *(paths.get(word, word) for word in words)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"steelyard: {message.replace('RUBBISH', str(rubbish))}") and error.count("\n") == 1


def test_missing_traces_are_named(scenario: str, capsys: pytest.CaptureFixture[str]) -> None:
    (Path(scenario).parent / "t.jsonl").unlink()
    assert main(["simulate", scenario]) == 2
    assert "traces.path must be readable" in capsys.readouterr().err


EXAMPLES = Path(__file__).parents[3] / "examples" / "simulate"
LINE = re.compile(r"step=\d+ rollout_queue=\d+ train_backlog=\d+ => (?:adjust|keep) rollout=\d+ train=\d+")


def test_the_template_with_a_fixed_split_runs_as_written(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", str(EXAMPLES / "fixed.yaml"), "--steps", "6"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "fixed: 10 H100, qwen2.5-7b, policy fixed, rollout=4 (tp 1) train=4 reward=2"
    assert (
        "  note: model.policy /path/to/policy_model does not exist: the sizes of qwen2.5-7b are simulated" in lines[1]
    )
    assert "  note: model.reward /path/to/reward_model does not exist" in lines[2]
    (line,) = [line for line in lines if LINE.fullmatch(line)]
    assert line.endswith("=> keep rollout=4 train=4")


def test_the_template_with_a_scheduler_runs_as_written(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", str(EXAMPLES / "scheduled.yaml"), "--steps", "15"]) == 0
    decisions = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step=")]
    assert [line.partition(" ")[0] for line in decisions] == ["step=5", "step=10", "step=15"]
    assert all(LINE.fullmatch(line) for line in decisions)


def test_a_model_that_is_there_is_read_and_a_broken_one_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {
        "hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 8, "num_hidden_layers": 4,
        "vocab_size": 1000,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    words = ["simulate", str(EXAMPLES / "fixed.yaml"), "--steps", "2", f"model.policy={tmp_path}"]
    assert main(words) == 0
    assert str(tmp_path) in capsys.readouterr().out.splitlines()[0]
    (tmp_path / "config.json").write_text("{")
    assert main(words) == 2
    assert "must be JSON, got" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["resources.train_gpus=3"], "train.batch_size must be divisible by resources.train_gpus x train.grad_accum_"),
        (
            ["scheduler.queue_wait=1"],
            "scheduler.queue_wait is not a configuration key; the nearest is scheduler.queue_",
        ),
        (["scheduler.min_rollout_gpus=5"], "resources.rollout_gpus must be >= scheduler.min_rollout_gpus (5), got 4"),
        (["resources.reward_gpus=0"], "resources.reward_gpus must be >= 1 for model.reward, got 0"),
        (["resources.total_gpus=9"], "resources.total_gpus must be >= 10, the sum of the roles, got 9"),
        (["train.max_steps=0"], "num_steps must be >= 1, got 0"),
        (["other.yaml"], "one SCENARIO must be given, with KEY=VALUE overrides behind it, got 'other.yaml' too"),
        (["--traces", "no.jsonl"], "traces.path must be readable"),
        (["--compare", ","], "--compare must name policies"),
        (["--device", "TPU"], "device kind must be one of A100"),
    ],
)
def test_a_configuration_that_cannot_be_is_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", str(EXAMPLES / "scheduled.yaml"), *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"steelyard: {message}")


@pytest.mark.parametrize("rubbish", [b"\x00\xff\xfe", b"- 1\n- 2\n", b"a: [", b"{}", b"1: 2\n", b"devices: 3\n"])
def test_rubbish_is_one_line(rubbish: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "s.yaml").write_bytes(rubbish)
    assert main(["simulate", str(tmp_path / "s.yaml")]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_damaged_traces_are_one_line(scenario: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(scenario).with_name("cut.jsonl.gz")
    path.write_bytes(gzip.compress(b"{}" * 1000)[:-20])
    assert main(["simulate", scenario, "--traces", str(path)]) == 2
    assert "traces.path must be readable" in capsys.readouterr().err


COLUMNS = "policy steps in trajectories/s of the bound idle rollout idle train lag moves"


def test_policies_are_compared_in_a_table(scenario: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", scenario, "--compare", "fixed,ratio"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert " ".join(lines[1].split()) == COLUMNS
    assert [line.split()[0] for line in lines[2:]] == ["fixed", "ratio"]
    assert all("%" in line for line in lines[2:])


def test_the_page_needs_nothing_else_and_shows_every_plot(scenario: str, capsys: pytest.CaptureFixture[str]) -> None:
    page = Path(scenario).with_name("page.html")
    assert main(["simulate", scenario, "--report", str(page)]) == 0
    text = page.read_text()
    assert "of the proven bound" in text
    assert not re.search(r"(?:src|href)=.(?!#|data:,)", text)
    titles = re.findall(r"<strong>([^<]*)</strong>", text)
    assert titles == [
        "Devices by role",
        "Queues",
        "Sampled tokens per second",
        "Trained trajectories per second",
        "Lag at consumption",
        "Seconds of a step",
    ]
    assert main(["simulate", scenario, "--report", "/nowhere/page.html"]) == 3
    assert capsys.readouterr().err == "steelyard: /nowhere/page.html must be writable, got: No such file or directory\n"


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "steelyard.cli", "simulate", *words]


def test_a_reader_that_has_seen_enough_is_no_error(scenario: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as closed:
        done = subprocess.run(command(scenario), stdout=closed, stderr=subprocess.PIPE, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


def test_an_interrupt_ends_without_a_traceback() -> None:
    words = command(str(EXAMPLES / "scheduled.yaml"), "train.max_steps=100000")
    with subprocess.Popen(
        [sys.executable, "-c", _INTERRUPTED, *words[3:]], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        _, said = process.communicate(timeout=120)
    assert (process.returncode, said) == (130, b"")


_INTERRUPTED = f"""
import os, signal, sys
from steelyard.cli.main import main
signal.signal(signal.SIGVTALRM, lambda *_: os.kill(os.getpid(), {int(signal.SIGINT)}))
signal.setitimer(signal.ITIMER_VIRTUAL, 1.0)
sys.exit(main(sys.argv[1:]))
"""
