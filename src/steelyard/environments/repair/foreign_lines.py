"""Lines that are wrong because they come from elsewhere, and bugs made of them, for the warm-up of a policy.

No kind of mutation makes them, so they teach to compare every line with what it should be. A foreign line is never what
a held-out mutation would have made of that line.
"""

import random

import msgspec

from steelyard.environments.repair.catalogue import Variant, draw_constants, make_variant, split_kinds, wrong_cases
from steelyard.environments.repair.generator import RepairTask, draw_tests
from steelyard.environments.repair.mutations import Mutant, MutationKind, apply_mutant
from steelyard.environments.repair.template import NAMES, rename, words_in
from steelyard.environments.repair.templates import SEEN_TEMPLATES

_NUMBER_FRAC = 0.5
"""Share of the foreign lines that differ in a digit alone, where the line has one."""
_NUM_DRAWS = 24
_NUM_BUG_DRAWS = 8
_HEADS = ("if ", "while ", "for ", "return ", "else", "elif ")


def with_foreign_bug(task: RepairTask, rng: random.Random) -> RepairTask:
    """``task`` with a foreign line as its bug; ``task`` itself where no drawn line makes a good bug."""
    variant = task.variant
    for _ in range(_NUM_BUG_DRAWS):
        number = rng.randrange(2, len(variant.lines) + 1)
        mutant = Mutant(MutationKind.FOREIGN, number, foreign_line(variant, number, rng))
        lines = apply_mutant(variant.lines, mutant)
        wrong = wrong_cases(variant, lines)
        if not wrong:
            continue
        visible, hidden = draw_tests(variant, wrong, rng)
        return msgspec.structs.replace(
            task,
            kind=mutant.kind,
            lines=tuple(rename(line, task.words) for line in lines),
            bug_number=number,
            visible=visible,
            hidden=hidden,
            mutant=mutant,
        )
    return task


def foreign_line(variant: Variant, number: int, rng: random.Random) -> str:
    """What stands in place of line ``number``, in canonical names: a line from elsewhere, or it with another digit.

    Never what a held-out mutation would have made of that line.
    """
    right = variant.lines[number - 1]
    held_out = split_kinds(variant.template.name).held_out
    banned = {right, *(one.text for one in variant.mutants if one.number == number and one.kind in held_out)}
    has_digit = any(map(str.isdigit, right))
    if has_digit and rng.random() < _NUMBER_FRAC:
        return _with_other_digit(right, banned, rng)
    return _from_elsewhere(right, banned, set(variant.template.names()), rng)


def _with_other_digit(right: str, banned: set[str], rng: random.Random) -> str:
    digits = [position for position, letter in enumerate(right) if letter.isdigit()]
    found = right
    while found in banned:
        position = digits[rng.randrange(len(digits))]
        found = right[:position] + str(rng.randrange(10)) + right[position + 1 :]
    return found


def _from_elsewhere(right: str, banned: set[str], known: set[str], rng: random.Random) -> str:
    """A line of another function; of the same form and with known names, where one of some draws is so."""
    indentation = right[: len(right) - len(right.lstrip())]
    found = right
    while found in banned:
        for _ in range(_NUM_DRAWS):
            template = SEEN_TEMPLATES[rng.randrange(len(SEEN_TEMPLATES))]
            other = make_variant(template.name, draw_constants(template, rng)).lines
            found = indentation + other[rng.randrange(1, len(other))].lstrip()
            if found not in banned and _form(found) == _form(right) and words_in(found) & NAMES.keys() <= known:
                break
    return found


def _form(line: str) -> str:
    return next((head for head in _HEADS if line.lstrip().startswith(head)), "")
