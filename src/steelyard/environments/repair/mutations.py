"""Seeding bugs: program transformations that change exactly one line of a function.

Mutations are found on the syntax tree and made on the text, so that everything but the mutated
expression stays as it was written. A mutated line belongs to one kind only: the first that makes it.
"""

import ast
import enum
from collections.abc import Callable, Iterable, Iterator

import msgspec


class MutationKind(enum.StrEnum):
    """What is wrong with the mutated line; ``FOREIGN`` is a line that no mutation made."""

    ARITHMETIC = "arithmetic"
    ACCUMULATION = "accumulation"
    COMPARISON = "comparison"
    BOUND = "bound"
    EQUALITY = "equality"
    BOOLEAN = "boolean"
    NEGATION = "negation"
    INITIAL_VALUE = "initial_value"
    RETURN_VALUE = "return_value"
    BRANCH = "branch"
    RANGE = "range"
    INDEX = "index"
    SWAPPED = "swapped"
    CALL = "call"
    OFF_BY_ONE = "off_by_one"
    VARIABLE = "variable"
    FOREIGN = "foreign"


class Mutant(msgspec.Struct, frozen=True):
    """One line changed: line ``number`` (from 1) now reads ``text``, indentation included."""

    kind: MutationKind
    number: int
    text: str


class Edit(msgspec.Struct, frozen=True):
    """Characters ``start`` to ``end`` of line ``number`` become ``replacement``."""

    number: int
    start: int
    end: int
    replacement: str


_ARITHMETIC: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "+"),
    ast.FloorDiv: ("//", "%"),
    ast.Mod: ("%", "//"),
}
_COMPARISON: dict[type[ast.cmpop], tuple[str, str, MutationKind]] = {
    ast.Eq: ("==", "!=", MutationKind.EQUALITY),
    ast.NotEq: ("!=", "==", MutationKind.EQUALITY),
    ast.In: (" in ", " not in ", MutationKind.EQUALITY),
    ast.NotIn: (" not in ", " in ", MutationKind.EQUALITY),
    ast.Lt: ("<", ">", MutationKind.COMPARISON),
    ast.LtE: ("<=", ">=", MutationKind.COMPARISON),
    ast.Gt: (">", "<", MutationKind.COMPARISON),
    ast.GtE: (">=", "<=", MutationKind.COMPARISON),
}
_BOUND: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
}
_CALLS: dict[str, tuple[str, ...]] = {
    "min": ("max",),
    "max": ("min",),
    "len": ("sum", "max"),
    "startswith": ("endswith",),
    "append": ("extend",),
}

_Found = Iterator[tuple[MutationKind, Edit]]


class Program:
    """A parsed function: its lines, tree and what each finder needs to know about it."""

    def __init__(self, lines: tuple[str, ...]) -> None:
        self.lines = lines
        function = ast.parse("\n".join(lines)).body[0]
        if not isinstance(function, ast.FunctionDef):
            raise ValueError(f"a template must be one function, got {type(function).__name__}")
        self.function = function
        self.nodes = tuple(node for statement in function.body for node in ast.walk(statement))
        self.names = _variables(function)
        self.negative = {
            id(node.operand) for node in self.nodes if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub)
        }
        self.first_values = {id(node.value) for node in function.body if isinstance(node, ast.Assign)}

    def text_of(self, node: ast.expr | ast.stmt) -> str:
        """The node as written; nodes never span lines."""
        return self.lines[node.lineno - 1][node.col_offset : node.end_col_offset]

    def replace(self, node: ast.expr | ast.stmt, text: str) -> Edit:
        return Edit(node.lineno, node.col_offset, _end(node), text)

    def between(self, left: ast.expr, right: ast.expr, old: str, new: str) -> Edit:
        """Replace ``old`` in what is written between two neighbouring expressions."""
        gap = self.lines[left.lineno - 1][_end(left) : right.col_offset]
        start = _end(left) + gap.index(old)
        return Edit(left.lineno, start, start + len(old), new)


def find_mutants(lines: tuple[str, ...]) -> tuple[Mutant, ...]:
    """All mutants of a function, in a fixed order: by kind as declared, then by place.

    Whether a mutant behaves differently is not known here; see ``catalogue.py``.

    Args:
        lines: one function whose statements do not span lines, the ``def`` first.
    """
    program = Program(lines)
    found: list[tuple[MutationKind, Edit]] = []
    for finder in _FINDERS:
        found.extend(finder(program))
    order = {kind: rank for rank, kind in enumerate(MutationKind)}
    found.sort(key=lambda item: (order[item[0]], item[1].number, item[1].start))
    taken = {(number, line) for number, line in enumerate(lines, start=1)}
    mutants = []
    for kind, edit in found:
        line = lines[edit.number - 1]
        text = line[: edit.start] + edit.replacement + line[edit.end :]
        if (edit.number, text) not in taken:
            taken.add((edit.number, text))
            mutants.append(Mutant(kind, edit.number, text))
    return tuple(mutants)


def apply_mutant(lines: tuple[str, ...], mutant: Mutant) -> tuple[str, ...]:
    """The function with the mutated line in place."""
    return (*lines[: mutant.number - 1], mutant.text, *lines[mutant.number :])


def _end(node: ast.expr | ast.stmt) -> int:
    if node.end_col_offset is None:
        raise ValueError(f"a parsed node must have an end, {ast.dump(node)} has none")
    return node.end_col_offset


def _variables(function: ast.FunctionDef) -> tuple[str, ...]:
    stored = {node.id for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return tuple(sorted(stored | {argument.arg for argument in function.args.args}))


def _integer(node: ast.expr) -> int | None:
    """The value of an integer literal, a sign included; None for anything else."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        inner = _integer(node.operand)
        return None if inner is None else -inner
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    return None


def _operators(program: Program) -> _Found:
    for node in program.nodes:
        if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
            old, new = _ARITHMETIC[type(node.op)]
            yield MutationKind.ARITHMETIC, program.between(node.left, node.right, old, new)
        elif isinstance(node, ast.AugAssign) and type(node.op) in _ARITHMETIC:
            old, new = _ARITHMETIC[type(node.op)]
            yield MutationKind.ARITHMETIC, program.between(node.target, node.value, old + "=", new + "=")
            yield MutationKind.ACCUMULATION, program.between(node.target, node.value, old + "=", "=")


def _comparisons(program: Program) -> _Found:
    for node in program.nodes:
        if not isinstance(node, ast.Compare):
            continue
        left, right, operator = node.left, node.comparators[0], type(node.ops[0])
        if operator in _COMPARISON:
            old, new, kind = _COMPARISON[operator]
            yield kind, program.between(left, right, old, new)
        if operator in _BOUND:
            yield MutationKind.BOUND, program.between(left, right, *_BOUND[operator])


def _conditions(program: Program) -> _Found:
    for node in program.nodes:
        if isinstance(node, ast.If):
            if isinstance(node.test, ast.UnaryOp) and isinstance(node.test.op, ast.Not):
                yield MutationKind.NEGATION, program.replace(node.test, program.text_of(node.test.operand))
            else:
                yield MutationKind.NEGATION, program.replace(node.test, f"not {program.text_of(node.test)}")
            if len(node.body) == len(node.orelse) == 1:
                yield MutationKind.BRANCH, program.replace(node.body[0], program.text_of(node.orelse[0]))
                yield MutationKind.BRANCH, program.replace(node.orelse[0], program.text_of(node.body[0]))
        elif isinstance(node, ast.BoolOp):
            old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
            yield MutationKind.BOOLEAN, program.between(node.values[0], node.values[1], old, new)


def _values(program: Program) -> _Found:
    for node in program.nodes:
        if not isinstance(node, ast.expr) or id(node) in program.negative:
            continue
        value = _integer(node)
        if id(node) in program.first_values and value is not None:
            yield MutationKind.INITIAL_VALUE, program.replace(node, "1" if value == 0 else "0")
        elif id(node) in program.first_values and isinstance(node, ast.Subscript):
            yield MutationKind.INITIAL_VALUE, program.replace(node, "0")
        if value is not None:
            yield MutationKind.OFF_BY_ONE, program.replace(node, str(value + 1))
            if value > 0:
                yield MutationKind.OFF_BY_ONE, program.replace(node, str(value - 1))


def _returns(program: Program) -> _Found:
    for node in program.nodes:
        if not isinstance(node, ast.Return) or node.value is None:
            continue
        if isinstance(node.value, ast.Name):
            for name in program.names:
                yield MutationKind.RETURN_VALUE, program.replace(node.value, name)
        elif isinstance(node.value, ast.Constant) and isinstance(node.value.value, bool):
            yield MutationKind.RETURN_VALUE, program.replace(node.value, str(not node.value.value))
        elif _integer(node.value) is not None:
            yield MutationKind.RETURN_VALUE, program.replace(node.value, "0" if _integer(node.value) else "1")


def _places(program: Program) -> _Found:
    for node in program.nodes:
        if isinstance(node, ast.Call) and program.text_of(node.func) == "range":
            last = node.args[-1]
            yield MutationKind.RANGE, program.replace(last, _one_less(program, last))
            if len(node.args) == 1:
                yield MutationKind.RANGE, program.replace(last, f"1, {program.text_of(last)}")
        elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice):
            bounds = program.text_of(node.slice)
            yield (
                MutationKind.INDEX,
                program.replace(node.slice, bounds[1:] + ":" if bounds[0] == ":" else ":" + bounds[:-1]),
            )
        elif isinstance(node, ast.Subscript):
            value = _integer(node.slice)
            other = _one_less(program, node.slice) if value is None else str(-1 - value)
            yield MutationKind.INDEX, program.replace(node.slice, other)


def _one_less(program: Program, node: ast.expr) -> str:
    """The text of ``node - 1``; for ``a + 1`` and ``a - 1`` it is ``a``."""
    if isinstance(node, ast.BinOp) and _integer(node.right) == 1:
        return program.text_of(node.left)
    return f"{program.text_of(node)} - 1"


def _swaps(program: Program) -> _Found:
    for node in program.nodes:
        pair: tuple[ast.expr, ast.expr] | None = None
        if isinstance(node, ast.BinOp):
            pair = (node.left, node.right)
        elif isinstance(node, ast.Call) and len(node.args) == 2:
            pair = (node.args[0], node.args[1])
        elif isinstance(node, ast.Tuple) and isinstance(node.ctx, ast.Store):
            pair = (node.elts[0], node.elts[1])
        if pair is None:
            continue
        first, second = pair
        between = program.lines[first.lineno - 1][_end(first) : second.col_offset]
        text = program.text_of(second) + between + program.text_of(first)
        yield MutationKind.SWAPPED, Edit(first.lineno, first.col_offset, _end(second), text)


def _calls(program: Program) -> _Found:
    for node in program.nodes:
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Name):
            name, start = node.func.id, node.func.col_offset
        elif isinstance(node.func, ast.Attribute):
            name, start = node.func.attr, _end(node.func) - len(node.func.attr)
        else:
            continue
        for other in _CALLS.get(name, ()):
            yield MutationKind.CALL, Edit(node.lineno, start, start + len(name), other)


def _names(program: Program) -> _Found:
    for node in program.nodes:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in program.names:
            for name in program.names:
                yield MutationKind.VARIABLE, program.replace(node, name)


_FINDERS: Iterable[Callable[[Program], _Found]] = (
    _operators,
    _comparisons,
    _conditions,
    _values,
    _returns,
    _places,
    _swaps,
    _calls,
    _names,
)
