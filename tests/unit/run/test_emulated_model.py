"""Emulated engines take what the cost model says: the one that the simulator uses."""

import json
from pathlib import Path
from typing import Any

import pytest

from steelyard.allocation.devices import device_kind
from steelyard.allocation.moving_cost import MovingRates
from steelyard.allocation.roofline import Corrections, Roofline
from steelyard.allocation.serving_cost import ServingCost, StepWork
from steelyard.config import Config, EmulatedConfig, InferenceConfig
from steelyard.errors import ConfigError
from steelyard.run.emulated_model import emulated_times
from steelyard.run.engines import check_engine
from steelyard.sim.scenario import known_model

DEFAULT = emulated_times(EmulatedConfig())
COST = ServingCost(known_model("qwen2.5-7b"), Roofline(device_kind("H100"), Corrections()), 1, 2)


def test_a_step_is_the_cost_models_step() -> None:
    assert DEFAULT.step_s(8, 8000, 0, 0) == COST.decode_step_s(8, 1000)
    assert DEFAULT.step_s(0, 0, 500, 0) == COST.prefill_s(500)
    together = StepWork(
        num_decoding=8, kv_tokens=8000, prefill_tokens=100, prefill_pairs=100 * 50 + 100 * 101 / 2, num_prompts=1
    )
    assert DEFAULT.step_s(8, 8000, 100, 50) == COST.step_s(together)


def test_a_load_takes_at_least_its_bytes() -> None:
    num_bytes = 2 * COST.architecture.num_parameters
    assert DEFAULT.load_s() > num_bytes / MovingRates().digest_bytes_per_s


def test_a_folder_with_a_configuration_is_a_model(tmp_path: Path) -> None:
    sizes = {
        "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 128,
        "vocab_size": 512,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    small = emulated_times(EmulatedConfig(model=str(tmp_path), device="CPU"))
    assert small.serving.architecture.num_layers == 2
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"inference\.emulated: .*config\.json must be a model's configuration"):
        emulated_times(EmulatedConfig(model=str(tmp_path)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device": "H900"}, "inference.emulated: device kind must be one of A100, "),
        ({"model": "gpt"}, "inference.emulated: model must be one of llama-3.1-8b, "),
        ({"model": "llama-3.1-70b"}, "inference.emulated: tp must be large enough that llama-3.1-70b fits"),
        ({"calibration": "no.json"}, "inference.emulated: calibration must be a readable file, got no.json"),
    ],
)
def test_what_cannot_be_emulated_is_refused_before_a_run(changes: dict[str, Any], message: str) -> None:
    config = Config(inference=InferenceConfig(engine="emulated", emulated=EmulatedConfig(**changes)))
    with pytest.raises(ConfigError, match=message):
        check_engine(config)
