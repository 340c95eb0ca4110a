"""Which mutants of which templates make good bugs, and which pairs are held out.

All is in canonical names and cached: a variant is a template with its constants chosen. Nothing here
depends on the process: seeds come from xxh3 of text, never from ``hash``.
"""

import functools
import itertools
import random
from typing import Any

import msgspec
import xxhash

from steelyard.environments.repair.execution import known_function, run_known
from steelyard.environments.repair.inputs import LETTERS, make_input
from steelyard.environments.repair.mutations import Mutant, MutationKind, apply_mutant, find_mutants
from steelyard.environments.repair.template import Template
from steelyard.environments.repair.templates import TEMPLATES
from steelyard.types import CallResult, CallStatus

FAMILY_VERSION = "1"
"""Changes whenever a task id would give another task."""

POOL_SIZE = 24
MIN_FAILING = 3
MAX_RAISING_FRAC = 0.5
HELD_OUT_FRAC = 0.15


class Case(msgspec.Struct, frozen=True):
    """One input of a function and what the right function returns."""

    arguments: tuple[Any, ...]
    expected: Any


class Variant(msgspec.Struct, frozen=True):
    """A template with its constants, in canonical names.

    Attributes:
        constants: placeholder to text, in the template's order.
        lines: the right function.
        pool: inputs with right results, from which tasks draw their tests.
        mutants: all mutants, good bugs or not.
    """

    template: Template
    constants: tuple[tuple[str, str], ...]
    lines: tuple[str, ...]
    pool: tuple[Case, ...]
    mutants: tuple[Mutant, ...]


def seed_of(*parts: object) -> int:
    """A seed that is the same in every process."""
    return xxhash.xxh3_64_intdigest(":".join((FAMILY_VERSION, *map(str, parts))).encode())


def same_value(left: Any, right: Any) -> bool:
    """Equality that tells True from 1 and a list from a text; for plain values."""
    if type(left) is not type(right):
        return False
    if isinstance(left, list):
        return len(left) == len(right) and all(map(same_value, left, right))
    return bool(left == right)


def passes(result: CallResult, case: Case) -> bool:
    """Whether a function gave the right result."""
    return result.status is CallStatus.RETURNED and same_value(result.value, case.expected)


@functools.lru_cache(maxsize=4096)
def make_variant(template_name: str, constants: tuple[tuple[str, str], ...]) -> Variant:
    """The variant of a template with the given constants.

    Raises:
        ValueError: the template itself fails on one of its inputs.
    """
    template = TEMPLATES[template_name]
    lines = template.lines(dict(constants))
    near = [int(text) for _, text in constants if text.isdigit()]
    rng = random.Random(seed_of("pool", template_name, constants))
    kinds = [kind for _, kind in template.args]
    inputs: list[tuple[Any, ...]] = []
    for _ in range(20 * POOL_SIZE):
        arguments = make_input(kinds, rng, near)
        if arguments not in inputs:
            inputs.append(arguments)
        if len(inputs) == POOL_SIZE:
            break
    pool = []
    for arguments, result in zip(inputs, run_known(lines, inputs), strict=True):
        if result.status is not CallStatus.RETURNED:
            raise ValueError(f"template {template_name} must return for {arguments}, it {result.status}")
        pool.append(Case(arguments, result.value))
    return Variant(template, constants, lines, tuple(pool), find_mutants(lines))


@functools.lru_cache(maxsize=65_536)
def failing_cases(variant_key: tuple[str, tuple[tuple[str, str], ...]], mutant_index: int) -> tuple[int, ...]:
    """Positions in the pool where a mutant is wrong; empty where it is no good bug.

    A good bug ends quickly, mostly returns something, and is wrong on several inputs.
    """
    variant = make_variant(*variant_key)
    return wrong_cases(variant, apply_mutant(variant.lines, variant.mutants[mutant_index]))


def wrong_cases(variant: Variant, lines: tuple[str, ...]) -> tuple[int, ...]:
    """Positions in the pool where ``lines`` are wrong; empty where they hold no good bug, or are no Python."""
    try:
        known_function(lines)
    except SyntaxError:
        return ()
    results = run_known(lines, [case.arguments for case in variant.pool])
    num_raising = sum(result.status is CallStatus.RAISED for result in results)
    if any(result.status is CallStatus.TIMED_OUT for result in results):
        return ()
    if num_raising > MAX_RAISING_FRAC * len(results):
        return ()
    wrong = tuple(i for i, result in enumerate(results) if not passes(result, variant.pool[i]))
    return wrong if len(wrong) >= MIN_FAILING else ()


def good_mutants(variant: Variant, kind: MutationKind) -> tuple[int, ...]:
    """Indices of the mutants of one kind that make good bugs."""
    key = (variant.template.name, variant.constants)
    return tuple(i for i, mutant in enumerate(variant.mutants) if mutant.kind is kind and failing_cases(key, i))


@functools.lru_cache(maxsize=4096)
def texts_by_line(template_name: str, constants: tuple[tuple[str, str], ...]) -> dict[int, tuple[str, ...]]:
    """What mutants make of each line that they can change, good bugs or not."""
    texts: dict[int, tuple[str, ...]] = {}
    for mutant in make_variant(template_name, constants).mutants:
        texts[mutant.number] = (*texts.get(mutant.number, ()), mutant.text)
    return texts


def draw_constants(template: Template, rng: random.Random) -> tuple[tuple[str, str], ...]:
    """Constants for a task, as text."""
    integers = [(name, str(rng.randrange(least, greatest + 1))) for name, least, greatest in template.constants]
    letters = [(name, f"'{LETTERS[rng.randrange(len(LETTERS))]}'") for name in template.letters]
    return (*integers, *letters)


class KindSplit(msgspec.Struct, frozen=True):
    """The kinds of mutation of one template: those trained on and those held out."""

    train: tuple[MutationKind, ...]
    held_out: tuple[MutationKind, ...]


@functools.cache
def split_kinds(template_name: str) -> KindSplit:
    """Hold out a fraction of a template's kinds.

    A kind is held out only if each line that it touches is also touched by a kind that is trained on:
    held out is the pair of template and mutation, not the knowledge that a line can be wrong.
    """
    template = TEMPLATES[template_name]
    middle = tuple((name, str((least + greatest) // 2)) for name, least, greatest in template.constants)
    variant = make_variant(template_name, (*middle, *((name, f"'{LETTERS[0]}'") for name in template.letters)))
    touched: dict[MutationKind, set[int]] = {}
    for kind in MutationKind:
        numbers = {variant.mutants[i].number for i in good_mutants(variant, kind)}
        if numbers:
            touched[kind] = numbers
    num_held_out = round(HELD_OUT_FRAC * len(touched))
    held_out: list[MutationKind] = []
    for kind in sorted(touched, key=lambda kind: seed_of("pair", template_name, kind)):
        rest = [numbers for other, numbers in touched.items() if other is not kind and other not in held_out]
        if len(held_out) < num_held_out and touched[kind] <= set(itertools.chain.from_iterable(rest)):
            held_out.append(kind)
    train = tuple(kind for kind in touched if kind not in held_out)
    return KindSplit(train, tuple(kind for kind in touched if kind in held_out))
