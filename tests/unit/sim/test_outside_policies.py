"""Policies of other packages, found by entry points. Nothing is installed: a folder with metadata is on the path."""

import json
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from steelyard.allocation.snapshot import Limits, Snapshot, Split, StageTimes
from steelyard.cli.main import main
from steelyard.errors import InputError
from steelyard.sim.scenario import PolicyPart, make_policy, policy_names

EXAMPLE = Path(__file__).parents[3] / "examples" / "policy_package"


def install(folder: Path, name: str, points: dict[str, str], modules: dict[str, str]) -> None:
    """What an installer leaves behind: modules, and metadata beside them."""
    information = folder / f"{name}-1.0.0.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0.0\n")
    lines = "".join(f"{point} = {value}\n" for point, value in points.items())
    (information / "entry_points.txt").write_text(f"[steelyard.policies]\n{lines}")
    for module, text in modules.items():
        (folder / f"{module}.py").write_text(text)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    return folder


def install_example(path: Path) -> None:
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    (module,) = EXAMPLE.glob("*.py")
    sys.modules.pop(module.stem, None)
    install(path, "steelyard_patient", project["entry-points"]["steelyard.policies"], {module.stem: module.read_text()})


def snapshot(rollout_s: float, train_s: float) -> Snapshot:
    return Snapshot(
        at_s=1.0,
        step=3,
        split=Split(rollout=4, train=4),
        limits=Limits(total=8),
        times=StageTimes(rollout_s=rollout_s, train_s=train_s),
    )


def test_the_example_package_can_be_chosen_by_name_with_its_options(path: Path) -> None:
    install_example(path)
    assert policy_names()[-1] == "patient"
    policy = make_policy(PolicyPart(kind="patient", options={"patience_steps": 2}))
    assert policy.decide(snapshot(9.0, 3.0)).split == Split(rollout=4, train=4)
    assert policy.decide(snapshot(9.0, 3.0)).split == Split(rollout=5, train=3)
    with pytest.raises(InputError, match="patience_steps must be >= 1, got 0"):
        make_policy(PolicyPart(kind="patient", options={"patience_steps": 0}))


def test_the_command_runs_it_in_a_whole_simulation(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    install_example(path)
    scenario = write_scenario(path)
    assert main(["simulate", scenario, "--policy", "patient", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["policy"] == "patient"
    assert 0.0 < result["bound_share"] <= 1.0


@pytest.mark.parametrize(
    ("modules", "points", "message"),
    [
        ({}, {"theirs": "no_such_module:P"}, "policy theirs must be importable from no_such_module:P, got ModuleNotF"),
        ({"broken_a": "1 / 0"}, {"theirs": "broken_a:P"}, "got ZeroDivisionError: division by zero"),
        ({"broken_b": "P = 3"}, {"theirs": "broken_b:P"}, "policy theirs must be a class or function at broken_b:P"),
        ({"broken_c": "class P: ..."}, {"theirs": "broken_c:P"}, r"must have a method decide\(snapshot\), got"),
        ({}, {"other": "x:P"}, "policy.kind must be one of fixed, .*other, got 'theirs'; the nearest is other"),
    ],
)
def test_a_package_that_is_broken_is_named(
    path: Path, modules: dict[str, str], points: dict[str, str], message: str
) -> None:
    install(path, "theirs", points, modules)
    with pytest.raises(InputError, match=message):
        make_policy(PolicyPart(kind="theirs"))


def test_two_packages_with_one_name_are_refused_and_ours_is_never_replaced(path: Path) -> None:
    install(path, "first", {"twice": "a:P", "queue": "a:P"}, {})
    install(path, "second", {"twice": "b:P"}, {})
    with pytest.raises(InputError, match=r"policy\.kind twice must be of one package, but a:P and b:P both have it"):
        make_policy(PolicyPart(kind="twice"))
    assert type(make_policy(PolicyPart(kind="queue"))).__module__ == "steelyard.allocation.policies"


@pytest.mark.parametrize(
    ("body", "code", "message"),
    [
        ("return None", 2, "policy theirs at step 1 must return a steelyard Plan, got None"),
        ("return {}['x']", 3, "policy theirs at step 1 must return a plan, but raised KeyError: 'x' ("),
    ],
)
def test_a_policy_that_fails_ends_the_command_in_one_line(
    path: Path, body: str, code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    module = f"failing_{code}"
    install(
        path, "theirs", {"theirs": f"{module}:P"}, {module: f"class P:\n    def decide(self, s):\n        {body}\n"}
    )
    assert main(["simulate", write_scenario(path), "--policy", "theirs"]) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"steelyard: {message}")


def write_scenario(folder: Path) -> str:
    length = {"median": 50}
    scenario = {
        "name": "small",
        "devices": {"kind": "H100", "total": 6},
        "model": "qwen2.5-7b",
        "split": {"rollout": 2, "train": 4},
        "limits": {"min_train": 2},
        "steps": 4,
        "groups_per_batch": 2,
        "max_policy_lag": 1,
        "synthetic": {
            "num_groups": 8, "group_size": 2, "turns": {"median": 2}, "generated_tokens": length,
            "first_prompt_tokens": length, "tool_result_tokens": length, "tool_s": {"median": 0.1},
        },
    }  # fmt: skip
    (folder / "small.yaml").write_text(yaml.safe_dump(scenario))
    return str(folder / "small.yaml")
