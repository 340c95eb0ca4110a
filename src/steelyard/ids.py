"""Identifiers: strings with a kind prefix, never reused, without an order.

Order always comes from numbers (steps, versions, attempt numbers), never from ids.
"""

import os
import random
import secrets
from typing import Literal, Protocol

IdKind = Literal["run", "grp", "rol", "att", "req", "call", "score", "load", "wrk", "rep", "ses"]

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
_PAIRS = [low + high for high in _ALPHABET for low in _ALPHABET]
_SHIFTS = range(0, 80, 10)
_NUM_BYTES = 10
_NUM_CHARS = 16
_CHAR_OF_BYTE = (_ALPHABET * 8).encode("ascii")
"""Five random bits of each byte make a character."""
# Each call of the operating system lets go of the interpreter, and another thread may keep it for milliseconds.
_IDS_PER_DRAW = 64


class IdSource(Protocol):
    """Gives out identifiers."""

    def new(self, kind: IdKind) -> str:
        """A fresh id such as ``att_5k9...``."""
        ...


class RandomIds:
    """Ids with 80 random bits from the operating system; for real runs. A forked process draws its own."""

    def __init__(self) -> None:
        self._process_id = os.getpid()
        self._drawn = ""
        self._position = 0

    def new(self, kind: IdKind) -> str:
        end = self._position + _NUM_CHARS
        if end > len(self._drawn) or self._process_id != os.getpid():
            self._process_id = os.getpid()
            self._drawn = secrets.token_bytes(_NUM_CHARS * _IDS_PER_DRAW).translate(_CHAR_OF_BYTE).decode("ascii")
            self._position, end = 0, _NUM_CHARS
        drawn, self._position = self._drawn[self._position : end], end
        return f"{kind}_{drawn}"


class SeededIds:
    """Reproducible ids; for tests and the simulator. Two sources with one seed collide."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def new(self, kind: IdKind) -> str:
        return f"{kind}_{_encode(self._random.getrandbits(8 * _NUM_BYTES))}"


def _encode(number: int) -> str:
    """16 characters of 5 bits each, those of the lowest bits first."""
    return "".join([_PAIRS[number >> shift & 1023] for shift in _SHIFTS])
