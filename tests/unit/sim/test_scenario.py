"""Scenarios as files: read, refused by key, and made into what is simulated."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from msgspec.structs import replace

from steelyard.allocation.calibration import Calibration
from steelyard.allocation.devices import device_kind
from steelyard.allocation.engine_limits import EngineLimits
from steelyard.allocation.moving_cost import MovingRates
from steelyard.allocation.policies import QueuePolicy
from steelyard.allocation.roofline import Corrections
from steelyard.cli.simulation_input import read_workload
from steelyard.errors import InputError
from steelyard.sim.scenario import PolicyPart, known_model, make_limits, make_policy, make_setup, read_scenario

SPECS = ("turns", "generated_tokens", "first_prompt_tokens", "tool_result_tokens", "tool_s")
SCENARIOS = Path(__file__).parents[3] / "examples" / "scenarios"


def tree(**changes: Any) -> dict[str, Any]:
    return {**yaml.safe_load((SCENARIOS / "swe48.yaml").read_text()), **changes}


@pytest.mark.parametrize("path", sorted(SCENARIOS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_scenario_can_be_simulated(path: Path) -> None:
    scenario = read_scenario(yaml.safe_load(path.read_text()), path.name)
    if scenario.synthetic is not None:
        # A few groups say whether they can be drawn; the largest scenario has ten thousand.
        few = min(scenario.synthetic.num_groups, 256)
        scenario = replace(scenario, synthetic=replace(scenario.synthetic, num_groups=few))
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
        ({"failures": [{"at_s": 1, "role": "judge"}]}, r"failures\[0\]\.role invalid enum value 'judge'"),
        ({"failures": [{"at_s": -1, "role": "train"}]}, r"failures.at_s must be finite and >= 0, got -1.0"),
        ({"outages": [{"begins_s": 1, "lasts_s": 0}]}, r"outages.lasts_s must be finite and > 0, got 0.0"),
        ({"failure_rate": {"mean_between_s": float("nan")}}, "failure_rate.mean_between_s must be finite and > 0"),
        ({"rates": {"start_s": float("inf")}}, "rates.start_s must be finite and >= 0, got inf"),
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
        ({"checkpoint_every": 0}, "checkpoint_every must be >= 1, got 0"),
        (
            {"outages": [{"begins_s": 1, "lasts_s": 5}, {"begins_s": 2, "lasts_s": 1}]},
            r"outages\[1\].begins_s must be >= 6.0, the end of the one before, got 2.0",
        ),
    ],
)
def test_what_cannot_be_simulated_is_refused_with_what_would_fit(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        make_setup(read_scenario(tree(**changes), "s.yaml"), lambda _: pytest.fail("no traces are read"))


def test_a_calibration_takes_the_place_of_guesses_on_its_own_kind_of_device() -> None:
    seen = msgspec.structs.replace(device_kind("A800"), peak_flops_per_s=4e14)
    found = Calibration(
        engine="vllm",
        model=msgspec.structs.replace(known_model("qwen2.5-7b"), name="mine"),
        device=seen,
        element_bytes=4,
        max_running=16,
        corrections=Corrections(memory=1.5),
        rates=MovingRates(start_s=9.0),
        limits=EngineLimits(chunk_tokens=512, call_s=0.01),
        busy_cores=0.0,
        errors=(),
        points=(),
    )
    few = {"num_groups": 2, "group_size": 2} | {name: {"median": 4} for name in SPECS}
    scenario = read_scenario(tree(model="mine", synthetic=few), "s.yaml")
    setup = make_setup(scenario, lambda _: pytest.fail("no traces are read"), calibration=found)
    assert (setup.device, setup.corrections, setup.rates, setup.engine) == (
        seen, found.corrections, found.rates, found.limits,
    )  # fmt: skip
    assert (setup.model.name, setup.max_running, setup.element_bytes) == ("mine", 16, 4)

    elsewhere = read_scenario(tree(devices={"kind": "H100", "total": 48}, synthetic=few), "s.yaml")
    with pytest.raises(
        InputError, match=r"devices\.kind must be A800, on which the calibration was measured, got H100"
    ):
        make_setup(elsewhere, lambda _: pytest.fail("no traces are read"), calibration=found)


def test_policies_are_found_by_name_and_take_their_own_options() -> None:
    assert isinstance(make_policy(PolicyPart(kind="queue", options={"queue_weight": 1.0})), QueuePolicy)
    with pytest.raises(
        InputError, match=r"policy\.kind must be one of fixed, queue, ratio, libra, planner, oracle, got 'magic'"
    ):
        make_policy(PolicyPart(kind="magic"))
    with pytest.raises(InputError, match=r"policy\.options must be what ratio takes: .* 'speed'"):
        make_policy(PolicyPart(kind="ratio", options={"speed": 1}))
