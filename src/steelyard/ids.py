"""Identifiers: strings with a kind prefix, never reused, without an order.

Order always comes from numbers (steps, versions, attempt numbers), never from ids.
"""

import random
import secrets
from typing import Literal, Protocol

IdKind = Literal["run", "grp", "rol", "att", "req", "call", "score", "load", "wrk", "rep", "ses"]

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
_NUM_CHARS = 16


class IdSource(Protocol):
    """Gives out identifiers."""

    def new(self, kind: IdKind) -> str:
        """A fresh id such as ``att_5k9...``."""
        ...


class RandomIds:
    """Ids with 80 random bits from the operating system; for real runs."""

    def new(self, kind: IdKind) -> str:
        return f"{kind}_{_encode(secrets.randbits(5 * _NUM_CHARS))}"


class SeededIds:
    """Reproducible ids; for tests and the simulator. Two sources with one seed collide."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def new(self, kind: IdKind) -> str:
        return f"{kind}_{_encode(self._random.getrandbits(5 * _NUM_CHARS))}"


def _encode(number: int) -> str:
    chars = []
    for _ in range(_NUM_CHARS):
        number, digit = divmod(number, len(_ALPHABET))
        chars.append(_ALPHABET[digit])
    return "".join(chars)
