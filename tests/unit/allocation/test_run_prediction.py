"""A run beside its calibration: what is predicted, and what is learnt from what was observed."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.allocation.calibration import Calibration
from steelyard.allocation.devices import device_kind
from steelyard.allocation.engine_limits import EngineLimits
from steelyard.allocation.moving_cost import MovingRates
from steelyard.allocation.roofline import Corrections
from steelyard.allocation.run_prediction import LOAD, PUBLICATION, SAMPLING, TRAINING, RunPrediction, Sampled
from steelyard.testing.toy_devices import TOY_MODEL

CALIBRATION = Calibration(
    engine="local",
    model=TOY_MODEL,
    device=device_kind("CPU"),
    element_bytes=4,
    max_running=64,
    corrections=Corrections(),
    rates=MovingRates(),
    limits=EngineLimits(),
    busy_cores=1.0,
    errors=(),
    points=(),
)
DONE = Sampled(decode_tokens=640, prefill_tokens=320, num_running=16.0, kv_tokens=1600.0, busy_s=1.0)


def prediction() -> RunPrediction:
    return RunPrediction(CALIBRATION, TOY_MODEL, num_train=1, micro_batch_tokens=1024)


def test_what_takes_as_long_as_predicted_leaves_everything_as_it_was() -> None:
    one, said = prediction(), prediction().sampled(DONE)
    assert said is not None
    for _ in range(5):
        one.sampled(msgspec.structs.replace(DONE, busy_s=said.predicted_s))
    assert one.corrections == CALIBRATION.corrections
    (error,) = one.errors
    assert (error.term, error.num_observed) == (SAMPLING, 5)
    assert error.factor == pytest.approx(1.0)


def test_a_slower_machine_is_followed_term_by_term_and_the_error_is_its_own() -> None:
    one, base = prediction(), prediction()
    told = base.trained(1000, 10, 200, 1.0)
    assert told is not None
    for _ in range(60):
        found = one.trained(1000, 10, 200, 2.0 * told.predicted_s)
    assert found is not None
    assert found.known.factor == pytest.approx(2.0, rel=0.02)
    assert found.known.error_frac < 0.1
    assert one.corrections.train_compute == pytest.approx(2.0 * CALIBRATION.corrections.train_compute, rel=0.02)
    assert one.corrections.decode_compute == CALIBRATION.corrections.decode_compute


def test_every_part_of_a_run_has_its_term() -> None:
    one = prediction()
    one.sampled(DONE)
    one.trained(1000, 10, 200, 1.0)
    one.published(0.1)
    one.loaded(0.1)
    assert {error.term for error in one.errors} == {SAMPLING, TRAINING, PUBLICATION, LOAD}


@given(st.floats(allow_nan=True, allow_infinity=True), st.integers(0, 10), st.floats(0.0, 64.0))
def test_nothing_that_is_observed_makes_a_correction_that_is_none(
    seconds: float, decode_tokens: int, num_running: float
) -> None:
    one = prediction()
    one.sampled(
        Sampled(decode_tokens=decode_tokens, prefill_tokens=0, num_running=num_running, kv_tokens=0.0, busy_s=seconds)
    )
    one.trained(100, 1, 100, seconds)
    one.published(seconds)
    one.loaded(seconds)
    assert one.corrections.prefill_compute >= 1.0


def test_a_longer_step_of_training_is_predicted_to_take_longer() -> None:
    one = prediction()
    short, long = one.trained(1000, 10, 200, 1.0), one.trained(4000, 10, 800, 1.0)
    assert short is not None and long is not None
    assert long.predicted_s > short.predicted_s
