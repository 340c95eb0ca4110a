"""Seeding bugs."""

import ast
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.environments.repair.catalogue import draw_constants
from steelyard.environments.repair.mutations import Mutant, MutationKind, apply_mutant, find_mutants
from steelyard.environments.repair.templates import TEMPLATES

TEMPLATE_NAMES = st.sampled_from(sorted(TEMPLATES))


def texts_of(kind: MutationKind, *body: str) -> set[str]:
    lines = ("def f(xs, a, b):", *(" " + line for line in body))
    return {mutant.text.strip() for mutant in find_mutants(lines) if mutant.kind is kind}


@pytest.mark.parametrize(
    ("kind", "line", "expected"),
    [
        (MutationKind.ARITHMETIC, "return a * b", {"return a + b"}),
        (MutationKind.ACCUMULATION, "a += b", {"a = b"}),
        (MutationKind.INDEX, "return xs[b - 1]", {"return xs[b]"}),
        (MutationKind.INDEX, "return xs[0]", {"return xs[-1]"}),
        (MutationKind.INDEX, "return xs[:b]", {"return xs[b:]"}),
        (MutationKind.SWAPPED, "return a - b", {"return b - a"}),
        (MutationKind.SWAPPED, "return max(a, b)", {"return max(b, a)"}),
        (MutationKind.CALL, "return max(a, b)", {"return min(a, b)"}),
        (MutationKind.RETURN_VALUE, "return True", {"return False"}),
        (MutationKind.RETURN_VALUE, "return -1", {"return 0"}),
        (MutationKind.OFF_BY_ONE, "return a + 3", {"return a + 2", "return a + 4"}),
        (MutationKind.INITIAL_VALUE, "b = 0", {"b = 1"}),
        (MutationKind.VARIABLE, "b = a", {"b = b", "b = xs"}),
    ],
)
def test_each_kind_changes_what_it_says(kind: MutationKind, line: str, expected: set[str]) -> None:
    assert texts_of(kind, line) == expected


@pytest.mark.parametrize(
    ("kind", "line", "expected"),
    [
        (MutationKind.COMPARISON, "if a < b:", {"if a > b:"}),
        (MutationKind.BOUND, "if a < b:", {"if a <= b:"}),
        (MutationKind.EQUALITY, "if a not in xs:", {"if a in xs:"}),
        (MutationKind.EQUALITY, "if a == b:", {"if a != b:"}),
        (MutationKind.NEGATION, "if not a:", {"if a:"}),
        (MutationKind.NEGATION, "if a:", {"if not a:"}),
        (MutationKind.BOOLEAN, "if a and b:", {"if a or b:"}),
        (MutationKind.RANGE, "for i in range(a + 1):", {"for i in range(a):", "for i in range(1, a + 1):"}),
        (MutationKind.RANGE, "for i in range(1, a):", {"for i in range(1, a - 1):"}),
    ],
)
def test_each_kind_changes_what_it_says_in_a_block(kind: MutationKind, line: str, expected: set[str]) -> None:
    assert texts_of(kind, line, " return a") == expected


def test_a_wrong_branch_does_what_the_other_one_should() -> None:
    found = texts_of(MutationKind.BRANCH, "if a:", " b = 1", "else:", " b = 2")
    assert found == {"b = 1", "b = 2"}


def test_a_sign_belongs_to_its_number() -> None:
    assert texts_of(MutationKind.OFF_BY_ONE, "return -1") == {"return 0"} - texts_of(
        MutationKind.RETURN_VALUE, "return -1"
    )


@given(TEMPLATE_NAMES, st.integers(0, 2**32))
def test_a_mutant_is_a_function_that_differs_in_exactly_one_line(name: str, seed: int) -> None:
    template = TEMPLATES[name]
    lines = template.lines(dict(draw_constants(template, random.Random(seed))))
    mutants = find_mutants(lines)
    assert mutants
    for mutant in mutants:
        changed = apply_mutant(lines, mutant)
        assert [i for i, (new, old) in enumerate(zip(changed, lines, strict=True), 1) if new != old] == [mutant.number]
        assert isinstance(ast.parse("\n".join(changed)).body[0], ast.FunctionDef)


@given(TEMPLATE_NAMES)
def test_a_changed_line_belongs_to_one_kind_only(name: str) -> None:
    template = TEMPLATES[name]
    mutants = find_mutants(template.lines(dict(draw_constants(template, random.Random(0)))))
    places = [(mutant.number, mutant.text) for mutant in mutants]
    assert len(places) == len(set(places))


def test_the_first_kind_that_makes_a_line_keeps_it() -> None:
    mutants = find_mutants(("def f(a):", " b = 0", " return b"))
    assert Mutant(MutationKind.INITIAL_VALUE, 2, " b = 1") in mutants
    assert not [mutant for mutant in mutants if mutant.kind is MutationKind.OFF_BY_ONE]


def test_only_functions_can_be_mutated() -> None:
    with pytest.raises(ValueError, match="one function"):
        find_mutants(("a = 1",))
