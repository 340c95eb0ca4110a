"""What must hold of any cost model, over random models, devices and layouts."""

import math
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from steelyard.allocation.architecture import Architecture
from steelyard.allocation.devices import bytes_per_s, device_kind
from steelyard.allocation.roofline import IDEAL, Corrections, Roofline
from steelyard.allocation.serving_cost import ServingCost
from steelyard.allocation.training_cost import TrainingCost, TrainLayout
from steelyard.errors import InputError
from steelyard.testing.physics import PROPERTIES, Case, draw_case, holds


@pytest.mark.parametrize("check", PROPERTIES.values(), ids=PROPERTIES.keys())
@settings(deadline=None)
@given(st.integers(0, 1 << 32))
def test_physics(check: Callable[[Case], bool], seed: int) -> None:
    held = holds(check, draw_case(Random(seed)))
    assume(held is not None)
    assert held


def test_bytes_are_not_bits() -> None:
    assert bytes_per_s(400e9) == 50e9
    h100 = device_kind("h100")
    assert h100.network_bytes_per_s == 50e9
    assert h100.link_bytes_per_s == 450e9
    seven_billion = 14e9
    assert Roofline(h100, IDEAL).transfer_s(seven_billion) == pytest.approx(0.28)


def test_a_lone_sequence_decodes_at_the_speed_of_reading_the_weights() -> None:
    model = Architecture(
        name="8B", num_layers=32, hidden_size=4096, intermediate_size=14336, num_heads=32, num_kv_heads=8,
        head_dim=128, vocab_size=128256,
    )  # fmt: skip
    cost = ServingCost(model, Roofline(device_kind("H100"), Corrections(memory=1.0, launch=0.0)), 1)
    read = (model.num_parameters - model.head_parameters) * 2 / 3.35e12
    assert cost.decode_step_s(1, 0) == pytest.approx(read, rel=0.01)
    assert math.isclose(cost.kv_bytes_per_token, 131_072)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda m, r: ServingCost(m, r, 3), "tp must divide the 32 heads, .* got 3; 1, 2, 4, 8 would fit"),
        (lambda m, r: TrainingCost(m, r, TrainLayout(tp=16)), "at most 8, the devices of a node, got 16"),
        (lambda m, r: TrainingCost(m, r, TrainLayout(pp=100)), "pp must be at most the 80 layers, got 100"),
        (lambda m, r: TrainingCost(m, r, TrainLayout(dp=2, ep=2)), "ep must divide dp = 2 and the 1 experts"),
        (lambda m, r: ServingCost(m, r, 1), "tp must be large enough that 70B fits: at tp = 1"),
        (lambda m, r: TrainingCost(m, r, TrainLayout()), "the training layout must fit into 72.0 GB a device"),
        (lambda m, r: Corrections(memory=0.5), "corrections.memory must be >= 1"),
    ],
)
def test_an_impossible_layout_is_refused_with_what_would_fit(make: Any, message: str) -> None:
    model = Architecture(
        name="70B", num_layers=80, hidden_size=8192, intermediate_size=28672, num_heads=32, num_kv_heads=8,
        head_dim=128, vocab_size=128256,
    )  # fmt: skip
    with pytest.raises(InputError, match=message):
        make(model, Roofline(device_kind("A100"), IDEAL))
