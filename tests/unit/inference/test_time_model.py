"""Physics that the roofline must keep."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.inference.time_model import Roofline

MODEL = Roofline(
    num_params=8e9, bytes_per_param=2, kv_bytes_per_token=131_072, peak_flops=1e15, memory_bytes_per_s=3e12,
    efficiency_frac=0.5, step_overhead_s=0.001, load_bytes_per_s=1e10,
)  # fmt: skip


def test_one_sequence_decodes_at_the_speed_of_reading_the_weights() -> None:
    assert MODEL.decode_s(1, 0) == pytest.approx(0.001 + 16e9 / 1.5e12)


def test_prefill_takes_two_operations_per_parameter_and_token() -> None:
    assert MODEL.prefill_s(1000, 0) == pytest.approx(2 * 8e9 * 1000 / 0.5e15)


def test_loading_takes_the_bytes_over_the_bandwidth() -> None:
    assert MODEL.load_s() == pytest.approx(1.6)


@given(st.integers(1, 1000), st.integers(0, 10**6))
def test_more_sequences_and_more_kv_never_take_less_and_never_beat_the_peak(num_sequences: int, kv: int) -> None:
    step_s = MODEL.decode_s(num_sequences, kv)
    assert step_s <= MODEL.decode_s(num_sequences + 1, kv) and step_s <= MODEL.decode_s(num_sequences, kv + 1)
    assert 2 * MODEL.num_params * num_sequences / step_s <= MODEL.peak_flops
    assert MODEL.num_params * MODEL.bytes_per_param / step_s <= MODEL.memory_bytes_per_s
