"""Keys of files: the nearest one is named, wherever it stands."""

from typing import Any

import msgspec
import pytest

from steelyard.errors import ConfigError
from steelyard.keys import in_our_words, known_keys, refuse_unknown_keys
from steelyard.types.record import Record


class Inner(Record, frozen=True, kw_only=True):
    weight: int = 0


class Outer(Record, frozen=True, kw_only=True):
    name: str
    part: Inner = Inner()
    maybe: Inner | None = None
    many: tuple[Inner, ...] = ()
    free: dict[str, Any] = msgspec.field(default_factory=dict)


def test_sections_in_unions_and_lists_have_keys() -> None:
    assert list(known_keys(Outer)) == [
        *("name", "part", "part.weight", "maybe", "maybe.weight", "many", "many.weight", "free"),
    ]


@pytest.mark.parametrize(
    "tree",
    [
        {"name": "x", "maybe": None},
        {"maybe": {"weight": 1}, "many": [{"weight": 1}, 3]},
        {"free": {"any": {"thing": 1}}},
    ],
)
def test_known_keys_pass(tree: dict[str, Any]) -> None:
    refuse_unknown_keys(tree, Outer)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"nam": 1}, "nam is not a file key; the nearest is name"),
        ({"maybe": {"wait": 1}}, r"maybe\.wait is not a file key; the nearest is maybe\.weight"),
        ({"many": [{"weight": 1}, {"weigth": 1}]}, r"many\.weigth is not a file key; the nearest is many\.weight"),
        ({"part": None}, "part must be a section of keys, got None"),
        ({7: 1}, "7 is not a file key; the nearest is "),
    ],
)
def test_an_unknown_key_names_the_nearest(tree: dict[Any, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        refuse_unknown_keys(tree, Outer, "file")


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("Expected `int`, got `str` - at `$.part.weight`", "part.weight must be of type int, got str"),
        ("Object missing required field `name`", "name must be given, and is missing"),
        ("Object missing required field `total` - at `$.devices`", "devices.total must be given, and is missing"),
        ("Something else", "Something else"),
    ],
)
def test_the_field_stands_first(said: str, message: str) -> None:
    assert in_our_words(said) == message
