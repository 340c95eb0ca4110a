"""Keys of files that people write: which there are, and which was meant where one is unknown.

A file is read into a tree of plain dicts and lists, which is checked against the record that it will become: an unknown
key is an error that names the nearest valid one, so that no key is dropped in silence.
"""

import difflib
import re
import types
import typing
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from steelyard.errors import ConfigError

Kind = type[msgspec.Struct]
_WRAPPERS = (types.UnionType, typing.Union, tuple)


def known_keys(record: Kind, prefix: str = "") -> Iterator[str]:
    """All dotted keys of a file that becomes ``record``, sections included."""
    for name, (section, _) in _fields(record).items():
        yield prefix + name
        if section is not None:
            yield from known_keys(section, prefix + name + ".")


def refuse_unknown_keys(tree: dict[str, Any], record: Kind, what: str = "configuration") -> None:
    """Check that every key of ``tree`` is one of ``record``'s.

    Args:
        what: the kind of file, for the message.

    Raises:
        ConfigError: names the first key that is unknown and the nearest valid one, or the section that is none.
    """
    _refuse(tree, record, "", record, what)


def in_our_words(message: str) -> str:
    """What msgspec says of a value, with the field's dotted name in front."""
    found = re.match(r"(?P<rule>.*?)(?: - at `\$\.?(?P<path>[^`]*)`)?$", message, re.DOTALL)
    missing = re.match(r"Object missing required field `(?P<field>[^`]*)`", message)
    if missing is not None:
        path = found["path"] + "." if found is not None and found["path"] else ""
        return f"{path}{missing['field']} must be given, and is missing"
    if found is None or not found["path"]:
        return message
    rule = found["rule"]
    wanted = re.match(r"Expected `(?P<want>[^`]*)`, got `(?P<got>[^`]*)`$", rule)
    if wanted is not None:
        rule = f"must be of type {wanted['want']}, got {wanted['got']}"
    return f"{found['path']} {rule[0].lower()}{rule[1:]}"


def closest(name: str, candidates: Sequence[str]) -> str:
    """The candidate that looks most like ``name``."""
    return difflib.get_close_matches(name, candidates, n=1, cutoff=0.0)[0]


def _refuse(tree: dict[str, Any], record: Kind, prefix: str, root: Kind, what: str) -> None:
    fields = _fields(record)
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if key not in fields:
            raise ConfigError(_unknown_key(name, value, root, what))
        section, takes_null = fields[key]
        if section is None or (value is None and takes_null):
            continue
        if isinstance(value, list):
            for element in value:
                if isinstance(element, dict):
                    _refuse(element, section, name + ".", root, what)
            continue
        if not isinstance(value, dict):
            raise ConfigError(f"{name} must be a section of keys, got {value!r}")
        _refuse(value, section, name + ".", root, what)


def _unknown_key(name: str, value: Any, root: Kind, what: str) -> str:
    # Where a whole section is misspelt, its first key makes the guess better and the message more useful.
    if isinstance(value, dict) and value:
        name = f"{name}.{next(iter(value))}"
    return f"{name} is not a {what} key; the nearest is {_nearest(name, root)}"


def _nearest(name: str, root: Kind) -> str:
    """The key that was meant: one of the same section where there is such a section, else any that takes a value."""
    keys = list(known_keys(root))
    sections = {key.rpartition(".")[0] for key in keys} - {""}
    section, _, last = name.rpartition(".")
    if section in sections:
        siblings = [key.rpartition(".")[2] for key in keys if key.rpartition(".")[0] == section]
        return f"{section}.{closest(last, siblings)}"
    leaves = [key for key in keys if key not in sections]
    return closest(name, leaves if section else [*leaves, *sections])


def _fields(record: Kind) -> dict[str, tuple[Kind | None, bool]]:
    """The keys of a record; for each the record of its section (None: it is a value), and whether it may be null."""
    return {
        field.encode_name: (_section(field.type), _takes_null(field.type)) for field in msgspec.structs.fields(record)
    }


def _section(kind: Any) -> Kind | None:
    """The record in a field's type: itself, or in ``X | None`` and ``tuple[X, ...]``."""
    parts = (kind, *typing.get_args(kind)) if typing.get_origin(kind) in _WRAPPERS else (kind,)
    return next((part for part in parts if isinstance(part, type) and issubclass(part, msgspec.Struct)), None)


def _takes_null(kind: Any) -> bool:
    return type(None) in typing.get_args(kind)
