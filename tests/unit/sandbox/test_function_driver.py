import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.sandbox.function_calls import read_results
from steelyard.sandbox.function_driver import from_json, to_json
from steelyard.testing.sandbox import result
from steelyard.types import CallStatus, SandboxStatus

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
KEYS = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=4)
DATA = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.lists(inner, max_size=4).map(tuple) | st.dictionaries(KEYS, inner, max_size=4)
    ),
    max_leaves=20,
)


def typed(value: Any) -> Any:
    """Equal only where all types are equal too: True is not 1, and 0.0 is not -0.0."""
    if isinstance(value, list | tuple):
        return type(value), [typed(item) for item in value]
    if isinstance(value, dict):
        return dict, [(typed(key), typed(item)) for key, item in value.items()]
    return type(value), repr(value)


@given(DATA)
def test_data_come_back_as_they_were_types_included(value: Any) -> None:
    assert typed(from_json(json.loads(json.dumps(to_json(value))))) == typed(value)


def test_numbers_that_json_lacks_come_back() -> None:
    assert [repr(from_json(json.loads(json.dumps(to_json(x))))) for x in (float("nan"), float("inf"), -0.0)] == [
        "nan", "inf", "-0.0",
    ]  # fmt: skip
    assert from_json(json.loads(json.dumps(to_json(10**5000)))) == 10**5000


class Sly(int):
    pass


@pytest.mark.parametrize("value", [{1}, b"x", Sly(3), [Sly(3)], {Sly(3): 1}, object(), 1j])
def test_other_types_are_refused_subclasses_too(value: Any) -> None:
    with pytest.raises(TypeError, match="must be None, bool"):
        to_json(value)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["t", "d", "i", "x"]), inner, max_size=2)
    ),
)
LINES = st.binary(max_size=60) | st.tuples(
    st.integers(-1, 4), st.sampled_from(["returned", "raised", "unloadable", "x"]), JSON
).map(lambda line: json.dumps(line).encode())


@given(st.lists(LINES, max_size=6), st.sampled_from(SandboxStatus), st.integers(1, 4))
def test_reading_survives_any_output_and_gives_one_result_an_input(
    lines: list[bytes], status: SandboxStatus, num_inputs: int
) -> None:
    results = read_results(result(b"\n".join(lines), status), num_inputs)
    assert len(results) == num_inputs
    for each in results:
        assert (each.status is CallStatus.RETURNED) or each.error != "" or each.status is CallStatus.RAISED


@pytest.mark.parametrize(
    "hostile",
    [
        b'[0, "returned", ' + b"[" * 30_000 + b"]" * 30_000 + b"]\n",
        b'[0, "returned", {"d": [[[], 1]]}]\n',
        b'[0, "returned", {"d": [[1]]}]\n',
        b'[0, "returned", {"t": [], "i": "1"}]\n',
        b'[0, "returned", {"i": "one"}]\n',
        b'[0, "returned", ' + b"1" * 5000 + b"]\n",
        b'[1, "returned", 1]\n',
        b'[0, "returned", 1]',
        b"\xff\xfe\n",
    ],
)
def test_a_malformed_line_is_no_answer(hostile: bytes) -> None:
    (only,) = read_results(result(hostile), 1)
    assert only.status is CallStatus.CRASHED
    assert only.value is None


def test_reading_stops_at_the_first_line_out_of_order() -> None:
    lines = [b'[0, "returned", 1]', b'[0, "returned", 2]', b'[1, "returned", 3]', b'[2, "returned", 4]', b""]
    results = read_results(result(b"\n".join(lines)), 3)
    assert [each.status for each in results] == [CallStatus.RETURNED, CallStatus.CRASHED, CallStatus.NOT_RUN]
    assert results[0].value == 1


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (SandboxStatus.TIMED_OUT, CallStatus.TIMED_OUT),
        (SandboxStatus.OK, CallStatus.CRASHED),
        (SandboxStatus.CRASHED, CallStatus.CRASHED),
        (SandboxStatus.MEMORY_LIMIT, CallStatus.CRASHED),
        (SandboxStatus.OUTPUT_LIMIT, CallStatus.CRASHED),
        (SandboxStatus.KILLED, CallStatus.CRASHED),
    ],
)
def test_the_first_missing_answer_says_how_the_run_ended_and_the_rest_were_not_run(
    status: SandboxStatus, expected: CallStatus
) -> None:
    results = read_results(result(b'[0, "raised", "ValueError: x"]\n', status), 3)
    assert [each.status for each in results] == [CallStatus.RAISED, expected, CallStatus.NOT_RUN]
