"""The table of training layouts is the cost model, for all layouts at once."""

import numpy as np
import pytest

from steelyard.allocation.devices import device_kind
from steelyard.allocation.roofline import Corrections, Roofline
from steelyard.allocation.train_table import TrainTable
from steelyard.allocation.training_cost import TrainBatch, TrainingCost
from steelyard.errors import InputError
from steelyard.sim.scenario import KNOWN_MODELS
from steelyard.testing.exhaustive_plan import fastest_step_s

BATCH = TrainBatch(num_tokens=1_234_567, pairs=5e9, longest_tokens=9000)


@pytest.mark.parametrize("name", ["qwen2.5-7b", "qwen3-30b-a3b"])
def test_every_entry_is_the_fastest_layout_of_the_cost_model(name: str) -> None:
    roofline = Roofline(device_kind("H200"), Corrections(overlap=0.7))
    model = KNOWN_MODELS[name]
    table = TrainTable(model, roofline, BATCH, 33)
    least_s = float("inf")
    for number in range(1, 34):
        least_s = min(least_s, fastest_step_s(model, roofline, BATCH, number))
        assert table.step_s[number] == pytest.approx(least_s, rel=1e-12)
        if np.isfinite(least_s):
            cost = TrainingCost(model, roofline, table.layout(number))
            assert cost.layout.num_devices <= number
            assert cost.step_s(BATCH) == pytest.approx(least_s, rel=1e-12)


def test_with_more_devices_no_step_takes_longer() -> None:
    table = TrainTable(KNOWN_MODELS["qwen2.5-14b"], Roofline(device_kind("A800"), Corrections()), BATCH, 500)
    assert (np.diff(table.step_s[table.least_devices :]) <= 0.0).all()


def test_too_few_devices_are_told_how_many_would_do() -> None:
    roofline = Roofline(device_kind("A100"), Corrections())
    with pytest.raises(InputError, match=r"tp x pp x dp x cp of llama-3\.1-70b fits, got at most 8; \d+ would fit"):
        TrainTable(KNOWN_MODELS["llama-3.1-70b"], roofline, BATCH, 8)
    table = TrainTable(KNOWN_MODELS["llama-3.1-70b"], roofline, BATCH, 64)
    with pytest.raises(InputError, match=f"train must be >= {table.least_devices}"):
        table.layout(table.least_devices - 1)
