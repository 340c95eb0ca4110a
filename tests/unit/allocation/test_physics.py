"""What must hold of any cost model, over random models, devices and layouts."""

import math
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from steelyard.allocation.architecture import Architecture, Experts
from steelyard.allocation.devices import DEVICE_KINDS, bytes_per_s, device_kind
from steelyard.allocation.moving_cost import MovingCost, MovingRates
from steelyard.allocation.roofline import IDEAL, Corrections, Roofline
from steelyard.allocation.serving_cost import ServingCost, StepWork, prompt_work
from steelyard.allocation.training_cost import TrainBatch, TrainingCost, TrainLayout
from steelyard.errors import InputError

sizes = st.sampled_from([1, 2, 4, 8])


@st.composite
def architectures(draw: st.DrawFn) -> Architecture:
    kv_heads = draw(sizes)
    num_layers = draw(st.integers(2, 96))
    hidden = draw(st.integers(1, 64)) * 128
    experts = None
    if draw(st.booleans()):
        num_experts = draw(st.sampled_from([8, 16, 64, 128]))
        experts = Experts(
            num_layers=draw(st.integers(1, num_layers)),
            num_experts=num_experts,
            num_per_token=draw(st.integers(1, min(8, num_experts))),
            intermediate_size=draw(st.integers(1, 16)) * 128,
        )
    return Architecture(
        name="random",
        num_layers=num_layers,
        hidden_size=hidden,
        intermediate_size=draw(st.integers(1, 200)) * 128,
        num_heads=kv_heads * draw(st.sampled_from([1, 2, 4, 8])),
        num_kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([64, 128])),
        vocab_size=draw(st.integers(1000, 200_000)),
        is_tied=draw(st.booleans()),
        experts=experts,
    )


corrections = st.builds(
    Corrections,
    prefill_compute=st.floats(1, 5),
    decode_compute=st.floats(1, 5),
    train_compute=st.floats(1, 5),
    memory=st.floats(1, 5),
    communication=st.floats(1, 5),
    launch=st.floats(0, 5),
    overlap=st.floats(0, 1),
)
rooflines = st.builds(Roofline, st.sampled_from(list(DEVICE_KINDS.values())), corrections)
works = st.builds(
    StepWork,
    num_decoding=st.integers(0, 512),
    kv_tokens=st.floats(0, 1e6),
    prefill_tokens=st.integers(0, 8192),
    prefill_pairs=st.floats(0, 1e8),
    num_prompts=st.integers(0, 8),
)


T = TypeVar("T")


def possible(make: Callable[..., T], *parts: Any) -> T:
    """What ``make`` makes of the parts; other parts are drawn where it refuses these."""
    try:
        return make(*parts)
    except InputError:
        assume(False)
        raise


@given(architectures(), rooflines, sizes, works, works)
def test_more_work_never_takes_less_time(
    architecture: Architecture, roofline: Roofline, tp: int, work: StepWork, more: StepWork
) -> None:
    cost = possible(ServingCost, architecture, roofline, tp)
    both = StepWork(**{name: getattr(work, name) + getattr(more, name) for name in StepWork.__struct_fields__})
    assert cost.step_s(both) >= cost.step_s(work) * (1 - 1e-9)


@given(architectures(), rooflines, sizes, st.floats(0, 100_000))
def test_decode_per_device_never_rises_with_tp_when_batch_and_memory_are_unlimited(
    architecture: Architecture, roofline: Roofline, tp: int, context: float
) -> None:
    one, many = possible(ServingCost, architecture, roofline, 1), possible(ServingCost, architecture, roofline, tp)
    assert many.decode_rate_limit(context) <= one.decode_rate_limit(context) * (1 + 1e-9)


@given(architectures(), rooflines, sizes, st.integers(1, 4096), st.floats(0, 100_000))
def test_no_batch_exceeds_the_limit_of_its_decode_rate(
    architecture: Architecture, roofline: Roofline, tp: int, batch: int, context: float
) -> None:
    cost = possible(ServingCost, architecture, roofline, tp)
    rate = batch / cost.decode_step_s(batch, context) / tp
    assert rate <= cost.decode_rate_limit(context) * (1 + 1e-6)


@given(architectures(), st.sampled_from(list(DEVICE_KINDS.values())), sizes, works, corrections)
def test_nothing_is_faster_than_the_roofline(
    architecture: Architecture, device: Any, tp: int, work: StepWork, corrected: Corrections
) -> None:
    ideal = possible(ServingCost, architecture, Roofline(device, IDEAL), tp)
    real = ServingCost(architecture, Roofline(device, Corrections(**{**_fields(corrected), "launch": 1.0})), tp)
    assert real.step_s(work) >= ideal.step_s(work) * (1 - 1e-9)


@given(architectures(), rooflines, sizes, st.integers(1, 20_000), st.integers(0, 20_000))
def test_a_prompt_in_two_parts_is_as_much_attention_as_in_one(
    architecture: Architecture, roofline: Roofline, tp: int, first: int, second: int
) -> None:
    parts = prompt_work(first).prefill_pairs + (prompt_work(second, first).prefill_pairs if second else 0.0)
    assert parts == prompt_work(first + second).prefill_pairs
    cost = possible(ServingCost, architecture, roofline, tp)
    in_parts = cost.prefill_s(first) + cost.prefill_s(second, first)
    assert in_parts >= cost.prefill_s(first + second) * (1 - 1e-9)


@st.composite
def layouts(draw: st.DrawFn) -> TrainLayout:
    dp = draw(sizes)
    return TrainLayout(
        tp=draw(sizes),
        pp=draw(st.sampled_from([1, 2, 4])),
        dp=dp,
        cp=draw(st.sampled_from([1, 2])),
        ep=draw(st.sampled_from([ep for ep in (1, 2, 4, 8) if dp % ep == 0])),
        micro_batch_tokens=draw(st.integers(1, 64)) * 1024,
        recompute=draw(st.booleans()),
    )


@st.composite
def batches(draw: st.DrawFn) -> TrainBatch:
    length = draw(st.integers(1, 1024))
    number = draw(st.integers(1, 2000))
    return TrainBatch(num_tokens=length * number, pairs=number * length * (length + 1) / 2, longest_tokens=length)


@settings(max_examples=300)
@given(architectures(), rooflines, layouts(), batches())
def test_model_flops_utilisation_is_at_most_one(
    architecture: Architecture, roofline: Roofline, layout: TrainLayout, batch: TrainBatch
) -> None:
    assert 0.0 < possible(TrainingCost, architecture, roofline, layout).utilisation(batch) <= 1.0 + 1e-9


@settings(max_examples=300)
@given(architectures(), rooflines, layouts(), batches(), batches())
def test_a_larger_batch_never_takes_less_time(
    architecture: Architecture, roofline: Roofline, layout: TrainLayout, batch: TrainBatch, more: TrainBatch
) -> None:
    cost = possible(TrainingCost, architecture, roofline, layout)
    both = TrainBatch(
        num_tokens=batch.num_tokens + more.num_tokens,
        pairs=batch.pairs + more.pairs,
        longest_tokens=max(batch.longest_tokens, more.longest_tokens),
    )
    assert cost.step_s(both) >= cost.step_s(batch) * (1 - 1e-9)


@given(architectures(), rooflines, sizes, st.integers(1, 64))
def test_publication_takes_no_less_for_more_replicas(
    architecture: Architecture, roofline: Roofline, tp: int, num_replicas: int
) -> None:
    cost = possible(ServingCost, architecture, roofline, tp)
    moving = MovingCost(architecture, roofline, MovingRates())
    assert moving.publish_s(cost, num_replicas + 1) >= moving.publish_s(cost, num_replicas)
    assert moving.switch_s(cost) > moving.load_s(cost) + moving.swap_s(cost)


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
        (lambda m, r: ServingCost(m, r, 3), "tp must divide the 32 heads .* got 3; 1, 2, 4, 8 would fit"),
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


def _fields(record: Corrections) -> dict[str, float]:
    return {name: getattr(record, name) for name in record.__struct_fields__}
