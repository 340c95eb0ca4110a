"""What the simulator predicts for a burst and a training step is what its parts say."""

import msgspec
import pytest

from steelyard.allocation.calibration import Burst, TrainStep
from steelyard.allocation.engine_limits import EngineLimits
from steelyard.allocation.roofline import Corrections, Roofline
from steelyard.allocation.serving_cost import ServingCost, StepWork
from steelyard.errors import InputError
from steelyard.sim.predicted import Prediction
from steelyard.testing.toy_devices import TOY_MODEL, toy_device

PREDICT = Prediction(
    model=TOY_MODEL, element_bytes=4, max_running=4, limits=EngineLimits(chunk_tokens=100), micro_batch_tokens=512
)
CORRECTIONS = Corrections(launch=3.0)


def test_a_burst_takes_its_prompts_steps_and_then_its_batch() -> None:
    cost = ServingCost(TOY_MODEL, Roofline(toy_device(), CORRECTIONS), 1, 4)
    # The first call begins alone; the others' prompts fill the second step beside its first token.
    steps = [
        StepWork(prefill_tokens=50, prefill_pairs=50 * 51 / 2, num_prompts=1),
        StepWork(num_decoding=1, kv_tokens=51.5, prefill_tokens=100, prefill_pairs=2 * 50 * 51 / 2, num_prompts=2),
        *(StepWork(num_decoding=3, kv_tokens=3 * 52.0 + at) for at in range(3)),
    ]
    expected = sum(cost.step_s(step) for step in steps)
    found = PREDICT(CORRECTIONS, toy_device(), Burst(num_calls=3, prompt_tokens=50, new_tokens=4))
    assert found == pytest.approx(expected, rel=0.1)


def test_more_calls_than_run_at_once_take_waves() -> None:
    one = PREDICT(CORRECTIONS, toy_device(), Burst(num_calls=4, prompt_tokens=10, new_tokens=100))
    three = PREDICT(CORRECTIONS, toy_device(), Burst(num_calls=12, prompt_tokens=10, new_tokens=100))
    assert three == pytest.approx(3 * one, rel=0.05)


def test_a_training_step_grows_with_its_rows_from_a_fixed_cost() -> None:
    times = [PREDICT(CORRECTIONS, toy_device(), TrainStep(num_rows=rows, row_tokens=64)) for rows in (1, 2, 8, 16)]
    assert times == sorted(times)
    assert times[3] - times[2] == pytest.approx(times[2], rel=0.3)


def test_a_model_that_does_not_fit_is_refused() -> None:
    small = msgspec.structs.replace(toy_device(), memory_bytes=1e6)
    with pytest.raises(InputError, match="tp must be large enough that small fits"):
        PREDICT(CORRECTIONS, small, Burst(num_calls=1, prompt_tokens=1, new_tokens=1))
