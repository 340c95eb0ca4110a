"""A run as it would have been: first how well it is predicted, then the change."""

import asyncio
import json

import pytest

from steelyard.cli.main import main
from steelyard.testing.observed_runs import write_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("whatif") / "run"
    asyncio.run(write_run(path, num_steps=6))
    return str(path)


def test_it_says_first_how_well_the_run_is_predicted(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["whatif", run]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "run as it was: rollout=1 train=1, 6 steps, 48 model calls"
    assert "the simulation predicts" in lines[1]
    assert "the last 3 steps, whose speeds it has not seen" in lines[2]
    assert lines[4].startswith("  observed over predicted since then: model calls took ")


def test_the_prediction_of_a_steady_run_is_close(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["whatif", run, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["what_if"] is None
    terms = {one["term"]: one for one in told["agreement"]["terms"]}
    # These steps were published in no time, which says nothing.
    assert sorted(terms) == ["model calls", "training"]
    for one in terms.values():
        assert one["num_observed"] == 3
        assert one["factor"] == pytest.approx(1.0, abs=0.35)
    assert told["agreement"]["predicted_s"] == pytest.approx(told["agreement"]["observed_s"], rel=0.1)
    assert 0.0 < told["as_it_was"]["bound_share"] <= 1.0


def test_another_allocation_is_compared_with_the_run_as_it_was(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["whatif", run, "--set", "resources.train_gpus=2", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["what_if"]["makespan_s"] < told["as_it_was"]["makespan_s"]
    assert main(["whatif", run, "--set", "resources.train_gpus=2"]) == 0
    assert "times the trajectories per second" in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "RUN must be a run directory, got nowhere which does not exist"),
        (["RUN", "--set", "rollout.temperature=2"], "--set must leave the recorded work as it is"),
        (["RUN", "--set", "resources.trains=2"], "resources.trains is not a configuration key; the nearest is"),
        (["RUN", "--set", "resources.train_gpus"], "an override must look like train.max_steps=10"),
        (["RUN", "--policy", "magic"], "policy.kind must be one of"),
        (["RUN", "--device", "A900"], "device kind must be one of"),
    ],
)
def test_bad_input_is_one_line(run: str, words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["whatif", *(run if word == "RUN" else word for word in words)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"steelyard: {message}")
