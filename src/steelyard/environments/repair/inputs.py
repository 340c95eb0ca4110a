"""Test inputs: small values near the constants of the function, so that a wrong bound shows."""

import random
from collections.abc import Callable, Sequence
from typing import Any

LETTERS = "abcd"
_NEAR_FRAC = 0.4

_Maker = Callable[[random.Random, Sequence[int]], Any]


def make_input(kinds: Sequence[str], rng: random.Random, near: Sequence[int]) -> tuple[Any, ...]:
    """One argument for each kind.

    Args:
        kinds: keys of :data:`KINDS`.
        near: the integer constants of the function.
    """
    return tuple(KINDS[kind](rng, near) for kind in kinds)


def _item(rng: random.Random, near: Sequence[int]) -> int:
    if near and rng.random() < _NEAR_FRAC:
        return max(0, near[rng.randrange(len(near))] + rng.randrange(-1, 2))
    return rng.randrange(10)


def _items(rng: random.Random, near: Sequence[int], least: int, most: int) -> list[int]:
    return [_item(rng, near) for _ in range(rng.randrange(least, most + 1))]


def _rising(rng: random.Random, near: Sequence[int]) -> list[int]:
    items = sorted(_items(rng, near, 0, 5))
    if len(items) > 1 and rng.random() < 0.5:
        place = rng.randrange(len(items) - 1)
        items[place], items[place + 1] = items[place + 1], items[place]
    return items


def _text(rng: random.Random, least: int, most: int) -> str:
    return "".join(LETTERS[rng.randrange(len(LETTERS))] for _ in range(rng.randrange(least, most + 1)))


KINDS: dict[str, _Maker] = {
    "ints": lambda rng, near: _items(rng, near, 0, 5),
    "ints1": lambda rng, near: _items(rng, near, 1, 5),
    "three": lambda rng, near: _items(rng, near, 3, 3),
    "rising": _rising,
    "int": lambda rng, near: _item(rng, near) + 10 * (rng.random() < 0.3),
    "count": lambda rng, near: rng.randrange(12),
    "small": lambda rng, near: rng.randrange(6),
    "upper": lambda rng, near: rng.randrange(3, 9),
    "positive": lambda rng, near: rng.randrange(1, 21),
    "large": lambda rng, near: rng.randrange(1000),
    "text": lambda rng, near: _text(rng, 0, 5),
    "words": lambda rng, near: [_text(rng, 1, 4) for _ in range(rng.randrange(4))],
}
