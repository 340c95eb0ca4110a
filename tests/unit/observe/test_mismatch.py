"""The mismatch of engine and trainer, in words."""

import msgspec

from steelyard.observe.mismatch import mismatch_alarm, steps_by_engine
from steelyard.observe.rows import StepRow
from steelyard.testing.metrics_rows import make_step


def with_p99(step: StepRow, p99: float) -> StepRow:
    assert step.mismatch is not None
    return msgspec.structs.replace(step, mismatch=msgspec.structs.replace(step.mismatch, abs_p99=p99))


def test_an_alarm_goes_on_above_the_bound_and_names_engine_and_key() -> None:
    step = msgspec.structs.replace(make_step(4), engine="vllm", mismatch_bound=1e-3)
    assert mismatch_alarm(with_p99(step, 1e-3)) is None
    alarm = mismatch_alarm(with_p99(step, 0.25))
    assert alarm is not None
    assert alarm.startswith("ALARM step 4: engine vllm and trainer differ by 0.25 nats at p99")
    assert "inference.mismatch_bound is 0.0010" in alarm


def test_there_is_no_alarm_where_nothing_was_measured() -> None:
    step = with_p99(make_step(4), 9.0)
    assert mismatch_alarm(msgspec.structs.replace(step, mismatch=None)) is None
    assert mismatch_alarm(msgspec.structs.replace(step, mismatch_bound=None)) is None


def test_steps_are_told_apart_by_engine_and_unmeasured_ones_left_out() -> None:
    steps = [make_step(n) for n in range(3)]
    steps[1] = msgspec.structs.replace(steps[1], mismatch=None)
    steps[2] = msgspec.structs.replace(steps[2], engine="vllm")
    assert {engine: [s.step for s in own] for engine, own in steps_by_engine(steps).items()} == {
        "local": [0],
        "vllm": [2],
    }
