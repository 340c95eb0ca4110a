"""Plain rows for the coordinator's entities and back, derived from their own field lists, so that none is forgotten.

Sets become sorted lists and dictionaries lists of pairs: a row has one form only, and keeps the order of dictionaries.
Frozen records (scores, reports, proofs) stand in rows as they are.
"""

import types
from collections import Counter
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from operator import attrgetter
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints

Convert = Callable[[Any], Any]


class Shape(NamedTuple):
    """How one type is stored: its type in a row, and the ways there and back; None where the value stays as it is."""

    wire: Any
    pack: Convert | None
    unpack: Convert | None


def shape_of(hint: Any) -> Shape:
    """The shape of a field by its annotation.

    Raises:
        TypeError: an annotation that rows have no form for.
    """
    origin, arguments = get_origin(hint), get_args(hint)
    if is_dataclass(hint):
        return EntityRows(hint).shape
    if origin is set:
        return Shape(types.GenericAlias(list, arguments), sorted, set)
    if origin is Counter:
        return _dictionary(shape_of(arguments[0]), shape_of(int))._replace(unpack=_counter)
    if origin is dict:
        return _dictionary(shape_of(arguments[0]), shape_of(arguments[1]))
    if origin is list:
        return _list(shape_of(arguments[0]))
    if origin in (Union, types.UnionType) and any(is_dataclass(argument) for argument in arguments):
        return _optional(hint, arguments)
    if any(get_origin(argument) in (set, dict, list) or is_dataclass(argument) for argument in arguments):
        raise TypeError(f"a field of an entity must be a plain value, a record or a collection of such, got {hint}")
    return Shape(hint, None, None)


def _items(mapping: dict[Any, Any]) -> list[tuple[Any, Any]]:
    return list(mapping.items())


def _counter(pairs: list[tuple[Any, int]]) -> Counter[Any]:
    return Counter(dict(pairs))


def _list(item: Shape) -> Shape:
    wire = types.GenericAlias(list, (item.wire,))
    pack, unpack = item.pack, item.unpack
    return Shape(
        wire,
        list if pack is None else lambda values: [pack(value) for value in values],
        list if unpack is None else lambda values: [unpack(value) for value in values],
    )


def _dictionary(key: Shape, value: Shape) -> Shape:
    if key.pack is not None:
        raise TypeError(f"a key must be a plain value, got {key.wire}")
    wire = types.GenericAlias(list, (types.GenericAlias(tuple, (key.wire, value.wire)),))
    pack, unpack = value.pack, value.unpack
    return Shape(
        wire,
        _items if pack is None else lambda mapping: [(name, pack(item)) for name, item in mapping.items()],
        dict if unpack is None else lambda pairs: {name: unpack(item) for name, item in pairs},
    )


def _optional(hint: Any, arguments: tuple[Any, ...]) -> Shape:
    kinds = [argument for argument in arguments if argument is not type(None)]
    if len(kinds) != 1 or len(arguments) != 2:
        raise TypeError(f"a field that holds an entity may only be that or None, got {hint}")
    rows = EntityRows(kinds[0])
    return Shape(
        rows.wire | None,
        lambda entity: None if entity is None else rows.pack(entity),
        lambda row: None if row is None else rows.unpack(row),
    )


class EntityRows:
    """Rows of one dataclass: its fields in order.

    Args:
        kind: the dataclass.
        omit: fields that refer to other entities and are stored by whoever calls.
    """

    def __init__(self, kind: Any, omit: frozenset[str] = frozenset()) -> None:
        hints = get_type_hints(kind)
        self.kind = kind
        self.names = tuple(field.name for field in fields(kind) if field.name not in omit)
        shapes = [shape_of(hints[name]) for name in self.names]
        self.wire: Any = types.GenericAlias(tuple, tuple(shape.wire for shape in shapes))
        self._read = attrgetter(*self.names)
        self._packs = [(index, shape.pack) for index, shape in enumerate(shapes) if shape.pack]
        self._unpacks = [(index, shape.unpack) for index, shape in enumerate(shapes) if shape.unpack]

    @property
    def shape(self) -> Shape:
        """For a field that holds such an entity."""
        return Shape(self.wire, self.pack, self.unpack)

    def pack(self, entity: Any) -> tuple[Any, ...]:
        """The row of an entity; it shares nothing that can change with it."""
        row: tuple[Any, ...] = self._read(entity)
        if not self._packs:
            return row
        values = list(row)
        for index, pack in self._packs:
            values[index] = pack(values[index])
        return tuple(values)

    def unpack(self, row: tuple[Any, ...], **omitted: Any) -> Any:
        """The entity of a row; ``omitted`` gives the fields that the row leaves out."""
        values = dict(zip(self.names, row, strict=True))
        for index, unpack in self._unpacks:
            values[self.names[index]] = unpack(row[index])
        return self.kind(**values, **omitted)
