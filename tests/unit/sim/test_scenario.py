"""Scenarios as files: read, refused by key, and made into what is simulated."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from steelyard.allocation.policies import QueuePolicy
from steelyard.cli.simulation_input import read_workload
from steelyard.errors import InputError
from steelyard.sim.scenario import PolicyPart, make_limits, make_policy, make_setup, read_scenario

SCENARIOS = Path(__file__).parents[3] / "examples" / "scenarios"


def tree(**changes: Any) -> dict[str, Any]:
    return {**yaml.safe_load((SCENARIOS / "swe48.yaml").read_text()), **changes}


@pytest.mark.parametrize("path", sorted(SCENARIOS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_scenario_can_be_simulated(path: Path) -> None:
    scenario = read_scenario(yaml.safe_load(path.read_text()), path.name)
    setup = make_setup(scenario, lambda part: read_workload(part, SCENARIOS))
    assert setup.name == path.stem
    assert make_limits(scenario).broken_by(scenario.split) is None
    make_policy(scenario.policy)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stepz": 3}, "s.yaml: stepz is not a scenario key; the nearest is steps"),
        ({"polcy": {"kind": "queue"}}, "s.yaml: polcy.kind is not a scenario key; the nearest is policy.kind"),
        ({"synthetic": {"phases": [{"shap": "ramp"}]}}, r"synthetic\.phases\.shap is .* nearest is .*phases\.shape"),
        ({"steps": "many"}, r"s.yaml: steps must be of type int, got str"),
        ({"split": 4}, "s.yaml: split must be a section of keys, got 4"),
        ({"synthetic": None}, "exactly one of synthetic and traces must be given"),
        ({"devices": {"kind": "A800"}}, r"devices\.total must be given, and is missing"),
        ({"corrections": {"memory": 0.5}}, "corrections.memory must be >= 1"),
    ],
)
def test_a_bad_file_is_refused_by_key(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_scenario(tree(**changes), "s.yaml")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"devices": {"kind": "A900", "total": 48}}, "device kind must be one of A100, A800, .* got 'A900'"),
        ({"model": "gpt"}, "model must be one of llama-3.1-8b, .* got 'gpt'"),
        ({"steps": 0}, "num_steps must be >= 1, got 0"),
    ],
)
def test_what_cannot_be_simulated_is_refused_with_what_would_fit(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        make_setup(read_scenario(tree(**changes), "s.yaml"), lambda _: pytest.fail("no traces are read"))


def test_policies_are_found_by_name_and_take_their_own_options() -> None:
    assert isinstance(make_policy(PolicyPart(kind="queue", options={"queue_weight": 1.0})), QueuePolicy)
    with pytest.raises(InputError, match=r"policy\.kind must be one of fixed, queue, ratio, got 'magic'"):
        make_policy(PolicyPart(kind="magic"))
    with pytest.raises(InputError, match=r"policy\.options must be what ratio takes: .* 'speed'"):
        make_policy(PolicyPart(kind="ratio", options={"speed": 1}))
