"""Floats that stay bytes: to whoever reads, compares or writes them they are the tuple."""

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.packed_floats import PackedFloats, encode_packed, packed

ENCODE = msgspec.msgpack.Encoder(enc_hook=encode_packed).encode
FLOATS = st.lists(st.floats(), max_size=20).map(tuple)


def raw_of(value: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.msgpack.encode(value))


@given(values=FLOATS)
def test_packed_floats_are_read_and_written_as_their_tuple(values: tuple[float, ...]) -> None:
    found = packed(raw_of(values))
    assert isinstance(found, PackedFloats)
    assert (len(found), repr(tuple(found)), repr(found)) == (len(values), repr(values), repr(values))
    assert repr(found[1:-1]) == repr(values[1:-1])
    assert ENCODE({"a": found}) == msgspec.msgpack.encode({"a": values})
    if not any(map(math.isnan, values)):
        assert found == values
        assert values == found
        assert hash(found) == hash(values)
        assert found == packed(raw_of(values))
    assert found != (*values, 1.0)
    assert found.__eq__("a") is NotImplemented


@pytest.mark.parametrize("num_values", [0, 1, 15, 16, 65_535, 65_536])
def test_the_head_of_every_length_is_read(num_values: int) -> None:
    values = tuple(-0.5 * place for place in range(num_values))
    found = packed(raw_of(values))
    assert isinstance(found, PackedFloats)
    assert found == values


@given(values=FLOATS)
def test_log_masses_are_finite_and_at_most_zero(values: tuple[float, ...]) -> None:
    found = packed(raw_of(values))
    assert isinstance(found, PackedFloats)
    assert found.are_log_masses() == all(math.isfinite(value) and value <= 0.0 for value in values)


@given(values=st.lists(st.floats(allow_nan=False) | st.integers(-(2**63), 2**64 - 1), min_size=1, max_size=20))
def test_whole_numbers_among_them_are_read_as_floats_too(values: list[float]) -> None:
    assert packed(raw_of(values)) == tuple(map(float, values))


@pytest.mark.parametrize("value", [None, "text", {"a": 1.0}, [1.0, None], [[1.0]], b"12345678", [float("1"), "x" * 8]])
def test_what_is_no_row_of_numbers_is_refused(value: object) -> None:
    with pytest.raises(msgspec.ValidationError):
        packed(raw_of(value))


def test_other_types_are_still_refused_by_the_encoder() -> None:
    with pytest.raises(NotImplementedError, match="type object"):
        ENCODE(object())
