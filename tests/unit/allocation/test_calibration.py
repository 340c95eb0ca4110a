"""The fit: corrections are found again from what they predict, through noise and a disturbed run; the file."""

import random

import msgspec
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from steelyard.allocation.calibration import (
    SERVING_FACTORS,
    TRAINING_FACTORS,
    Burst,
    Calibration,
    Fit,
    Point,
    TrainStep,
    Work,
    decode_calibration,
    encode_calibration,
    errors_of,
    fit,
    fit_all,
    fit_serving,
    predicted_s,
)
from steelyard.allocation.devices import DeviceKind, device_kind
from steelyard.allocation.engine_limits import EngineLimits
from steelyard.allocation.moving_cost import MovingRates
from steelyard.allocation.roofline import IDEAL, Corrections, Roofline
from steelyard.allocation.serving_cost import ServingCost
from steelyard.allocation.training_cost import TrainBatch, TrainingCost, TrainLayout
from steelyard.errors import InputError
from steelyard.testing.toy_devices import TOY_MODEL

CPU = device_kind("CPU")
START = Fit(corrections=Corrections(), device=CPU, call_s=2e-3)


def predict(corrections: Corrections, device: DeviceKind, work: Work) -> float:
    """A burst's prompts one after the other, then its batch."""
    roofline = Roofline(device, corrections)
    if isinstance(work, TrainStep):
        cost = TrainingCost(TOY_MODEL, roofline, TrainLayout(micro_batch_tokens=2048, recompute=False), 4)
        num_tokens = work.num_rows * work.row_tokens
        batch = TrainBatch(
            num_tokens=num_tokens, pairs=num_tokens * work.row_tokens / 2, longest_tokens=work.row_tokens
        )
        return cost.step_s(batch)
    serving = ServingCost(TOY_MODEL, roofline, 1, 4)
    steps = (serving.decode_step_s(work.num_calls, work.prompt_tokens + at) for at in range(1, work.new_tokens))
    return work.num_calls * serving.prefill_s(work.prompt_tokens) + sum(steps)


WORKS: tuple[Work, ...] = (
    *(Burst(num_calls=1, prompt_tokens=length, new_tokens=1) for length in (16, 32, 64, 128, 256, 512)),
    *(
        Burst(num_calls=batch, prompt_tokens=context, new_tokens=5)
        for context in (16, 900)
        for batch in (1, 2, 4, 8, 16, 32)
    ),
    *(TrainStep(num_rows=rows, row_tokens=64) for rows in (1, 2, 4, 8, 32, 64)),
)

FOUND = st.builds(
    Corrections,
    prefill_compute=st.floats(min_value=1.0, max_value=8.0),
    decode_compute=st.floats(min_value=1.0, max_value=8.0),
    train_compute=st.floats(min_value=1.0, max_value=8.0),
    memory=st.floats(min_value=1.0, max_value=8.0),
    launch=st.floats(min_value=1.0, max_value=20.0),
    train_launch=st.floats(min_value=1.0, max_value=20.0),
    overlap=st.sampled_from((0.0, 1.0)),
)


def points_of(truth: Fit, noise: float = 0.0, outlier: int | None = None) -> tuple[Point, ...]:
    rng = random.Random(0)
    points = []
    for place, work in enumerate(WORKS):
        measured_s = predicted_s(work, truth, predict) * (1.0 + rng.uniform(-noise, noise))
        if place == outlier:
            measured_s *= 3.0
        term = "serving" if isinstance(work, Burst) else "training"
        points.append(Point(term=term, work=work, measured_s=measured_s, is_held_out=place % 3 == 1))
    return tuple(points)


def fitted(points: tuple[Point, ...]) -> Fit:
    serving = tuple(point for point in points if isinstance(point.work, Burst))
    training = tuple(point for point in points if isinstance(point.work, TrainStep))
    return fit_all(serving, training, START, predict)


@settings(max_examples=4, deadline=None, phases=(Phase.explicit, Phase.generate))
@given(FOUND)
def test_what_made_the_points_is_predicted_where_nothing_was_fitted(truth: Corrections) -> None:
    points = points_of(Fit(corrections=truth, device=CPU, call_s=5e-3))
    found = fitted(points)
    errors = errors_of(points, found, predict)
    assert {error.term for error in errors} == {"serving", "training"}
    assert max(error.worst_frac for error in errors) < 0.05


@settings(max_examples=3, deadline=None, phases=(Phase.explicit, Phase.generate))
@given(FOUND, st.integers(min_value=0, max_value=len(WORKS) - 1))
def test_noise_and_one_disturbed_run_do_not_spoil_a_fit(truth: Corrections, outlier: int) -> None:
    source = Fit(corrections=truth, device=CPU, call_s=5e-3)
    found = fitted(points_of(source, noise=0.03, outlier=outlier))
    clean = [point for point in points_of(source) if point.is_held_out and isinstance(point.work, Burst)]
    (error,) = errors_of(clean, found, predict)
    assert error.median_frac < 0.06


def test_a_machine_better_than_its_data_sheet_raises_the_peaks_and_never_beats_the_roofline() -> None:
    better = msgspec.structs.replace(CPU, peak_flops_per_s=1e12, memory_bytes_per_s=3e11, launch_s=CPU.launch_s / 50)
    truth = Fit(corrections=Corrections(), device=better, call_s=1e-3)
    found = fitted(points_of(truth))
    assert found.device.peak_flops_per_s > CPU.peak_flops_per_s
    assert found.device.launch_s < CPU.launch_s
    for work in WORKS:
        assert predict(IDEAL, found.device, work) <= predict(found.corrections, found.device, work) * (1 + 1e-9)
        assert predicted_s(work, found, predict) == pytest.approx(predicted_s(work, truth, predict), rel=0.05)


def test_what_no_point_speaks_of_stays_near_where_it_was() -> None:
    truth = Fit(corrections=Corrections(), device=CPU)
    points = tuple(point for point in points_of(truth) if point.term == "training")
    found = fit(points, TRAINING_FACTORS, truth, predict)
    for name in SERVING_FACTORS:
        assert getattr(found.corrections, name) == pytest.approx(getattr(truth.corrections, name))


def test_fewer_points_than_factors_are_refused() -> None:
    points = points_of(Fit(corrections=Corrections(), device=CPU))[:3]
    with pytest.raises(InputError, match="must have at least 5 points, got 2"):
        fit_serving(points, START, predict)


def test_a_point_without_a_duration_is_refused() -> None:
    with pytest.raises(InputError, match="points of decode: measured_s must be > 0, got 0"):
        Point(term="decode", work=WORKS[0], measured_s=0.0, is_held_out=False)


def calibration() -> Calibration:
    points = points_of(Fit(corrections=Corrections(), device=CPU))
    return Calibration(
        engine="local",
        model=TOY_MODEL,
        device=CPU,
        element_bytes=4,
        max_running=64,
        corrections=Corrections(),
        rates=MovingRates(),
        limits=EngineLimits(chunk_tokens=512, kv_tokens=1000, call_s=1e-3),
        busy_cores=1.0,
        errors=errors_of(points, START, predict),
        points=points,
    )


def test_a_calibration_comes_back_from_its_file_as_it_was() -> None:
    assert decode_calibration(encode_calibration(calibration()), "c.json") == calibration()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "c.json must be a calibration that `steelyard calibrate` wrote"),
        (b"\xff\x00", "c.json must be a calibration"),
        (b'{"engine": "local"}', "missing required field"),
        (encode_calibration(calibration()).replace(b'"format": 1', b'"format": 2'), "c.json: format must be 1, got 2"),
        (
            encode_calibration(calibration()).replace(b'"memory": 1.25', b'"memory": 0.5'),
            "corrections.memory must be >= 1",
        ),
    ],
)
def test_rubbish_is_no_calibration(data: bytes, message: str) -> None:
    with pytest.raises(InputError, match=message):
        decode_calibration(data, "c.json")
