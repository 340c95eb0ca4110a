"""Rows of floats that stay the bytes in which they came, until somebody reads a number of them.

A reply of an engine holds some hundreds of log-probabilities. Between the engine's connection and the trace they are
only checked and written, so there they need not become objects. In msgpack a row of floats is a head and, for each
number, a tag and its eight bytes: a shape that can be read in place.
"""

from collections.abc import Iterator, Sequence
from typing import Any, cast, overload

import msgspec
import numpy as np

_FLOAT_TAG = 0xCB
_ITEM = np.dtype([("tag", "u1"), ("value", ">f8")])
_DECODER = msgspec.msgpack.Decoder(tuple[float, ...])


class PackedFloats(Sequence[float]):
    """A tuple of floats in its msgpack form; behaves as the tuple does. Made by :func:`packed`."""

    __slots__ = ("_items", "_raw")

    def __init__(self, raw: msgspec.Raw, items: "np.ndarray[Any, np.dtype[np.void]]") -> None:
        self._raw = raw
        self._items = items

    @property
    def raw(self) -> msgspec.Raw:
        """The msgpack bytes."""
        return self._raw

    def are_log_masses(self) -> bool:
        """Whether all are finite and at most 0."""
        values = self._items["value"].astype(np.float64)
        # A minimum or maximum of numbers one of which is NaN is NaN, and compares with nothing.
        return not len(values) or bool(values.max() <= 0.0 and values.min() > -np.inf)

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[float]:
        return iter(self._tuple())

    @overload
    def __getitem__(self, place: int) -> float: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[float, ...]: ...
    def __getitem__(self, place: int | slice) -> float | tuple[float, ...]:
        return self._tuple()[place]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, PackedFloats):
            return self._tuple() == other._tuple()
        return self._tuple() == other if isinstance(other, tuple) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._tuple())

    def __repr__(self) -> str:
        return repr(self._tuple())

    def _tuple(self) -> tuple[float, ...]:
        return _DECODER.decode(self._raw)


def packed(raw: msgspec.Raw) -> tuple[float, ...]:
    """The numbers in msgpack bytes of an array of numbers, as the tuple that they are to whoever reads them.

    Where all are floats it is a :class:`PackedFloats`, which has whatever is asked of a tuple here.

    Raises:
        msgspec.ValidationError: the bytes are something else.
    """
    data = memoryview(raw)
    first = data[0]
    num_head, num_items = 1, first & 0x0F
    if first == 0xDC:
        num_head, num_items = 3, int.from_bytes(data[1:3], "big")
    elif first == 0xDD:
        num_head, num_items = 5, int.from_bytes(data[1:5], "big")
    if (first in (0xDC, 0xDD) or first >> 4 == 0x9) and len(data) == num_head + _ITEM.itemsize * num_items:
        items = np.frombuffer(data, _ITEM, num_items, num_head)
        if bool((items["tag"] == _FLOAT_TAG).all()):
            return cast(tuple[float, ...], PackedFloats(raw, items))
    return _DECODER.decode(raw)


def encode_packed(value: object) -> msgspec.Raw:
    """The ``enc_hook`` of encoders that may meet packed floats.

    Raises:
        NotImplementedError: the value is of another type that msgspec does not know.
    """
    if isinstance(value, PackedFloats):
        return value.raw
    raise NotImplementedError(f"objects of type {type(value).__name__} cannot be encoded")
