"""Making a task from its id: pick a template and a bug, name things, draw tests."""

import functools
import random
from typing import Any

import msgspec

from steelyard.environments.repair.catalogue import (
    Case,
    Variant,
    draw_constants,
    failing_cases,
    good_mutants,
    make_variant,
    seed_of,
    split_kinds,
)
from steelyard.environments.repair.mutations import Mutant, MutationKind, apply_mutant
from steelyard.environments.repair.template import NAMES, rename
from steelyard.environments.repair.templates import SEEN_TEMPLATES, UNSEEN_TEMPLATES
from steelyard.errors import InputError

NUM_VISIBLE = 4
MAX_HIDDEN = 12

TRAIN = "train"
HELD_OUT = "heldout"
UNSEEN = "unseen_templates"
SPLITS = (TRAIN, HELD_OUT, UNSEEN)


class RepairTask(msgspec.Struct, frozen=True, kw_only=True):
    """All that is true of a task, the private part included. It never leaves trusted processes.

    Attributes:
        doc: what the function should return, in words.
        lines: the function with its bug; ``lines[bug_number - 1]`` is wrong.
        right_lines: the function before the bug.
        visible: tests that the agent may run.
        hidden: tests that decide the score.
        words: canonical name to the name used here; the canonical forms are what results are cached by.
    """

    task_id: str
    template: str
    kind: MutationKind
    doc: str
    lines: tuple[str, ...]
    right_lines: tuple[str, ...]
    bug_number: int
    visible: tuple[Case, ...]
    hidden: tuple[Case, ...]
    variant: Variant
    mutant: Mutant
    words: dict[str, str]

    @property
    def source(self) -> str:
        return "\n".join(self.lines) + "\n"


def make_task_id(split: str, index: int) -> str:
    """``repair/<split>/<index>``.

    Raises:
        InputError: an unknown split or a negative index.
    """
    if split not in SPLITS:
        raise InputError(f"a split of repair must be one of {', '.join(SPLITS)}, got {split!r}")
    if index < 0:
        raise InputError(f"the index of a task must be at least 0, got {index}")
    return f"repair/{split}/{index}"


def parse_task_id(task_id: str) -> tuple[str, int]:
    """The split and index of a task id.

    Raises:
        InputError: it is no task id of repair.
    """
    environment, _, rest = task_id.partition("/")
    split, _, index = rest.partition("/")
    if environment != "repair" or not index.isdecimal() or make_task_id(split, int(index)) != task_id:
        raise InputError(f"a task id must look like repair/train/17, got {task_id!r}")
    return split, int(index)


@functools.lru_cache(maxsize=8192)
def make_task(task_id: str) -> RepairTask:
    """The task of that id, the same in every process.

    Raises:
        InputError: it is no task id of repair.
    """
    split, index = parse_task_id(task_id)
    rng = random.Random(seed_of("task", split, index))
    variant, mutant_index = _draw_bug(split, rng)
    mutant = variant.mutants[mutant_index]
    words = {name: NAMES[name][rng.randrange(len(NAMES[name]))] for name in variant.template.names()}
    wrong = failing_cases((variant.template.name, variant.constants), mutant_index)
    visible, hidden = draw_tests(variant, wrong, rng)
    return RepairTask(
        task_id=task_id,
        template=variant.template.name,
        kind=mutant.kind,
        doc=variant.template.describe({**words, **dict(variant.constants)}),
        lines=tuple(rename(line, words) for line in apply_mutant(variant.lines, mutant)),
        right_lines=tuple(rename(line, words) for line in variant.lines),
        bug_number=mutant.number,
        visible=visible,
        hidden=hidden,
        variant=variant,
        mutant=mutant,
        words=words,
    )


def _draw_bug(split: str, rng: random.Random) -> tuple[Variant, int]:
    """A variant and a good bug of it. Not every kind has a good bug for all constants: then draw again."""
    templates = UNSEEN_TEMPLATES if split == UNSEEN else SEEN_TEMPLATES
    while True:
        template = templates[rng.randrange(len(templates))]
        kinds = split_kinds(template.name)
        allowed = {TRAIN: kinds.train, HELD_OUT: kinds.held_out, UNSEEN: kinds.train + kinds.held_out}[split]
        variant = make_variant(template.name, draw_constants(template, rng))
        if not allowed:
            continue
        good = good_mutants(variant, allowed[rng.randrange(len(allowed))])
        if good:
            return variant, good[rng.randrange(len(good))]


def draw_tests(
    variant: Variant, wrong: tuple[int, ...], rng: random.Random
) -> tuple[tuple[Case, ...], tuple[Case, ...]]:
    """Visible and hidden tests, disjoint; the bug is wrong in the cases ``wrong`` and fails at least one of each."""
    failing = list(wrong)
    rng.shuffle(failing)
    others = [i for i in range(len(variant.pool)) if i not in failing[:2]]
    rng.shuffle(others)
    visible = [failing[0], *others[: NUM_VISIBLE - 1]]
    hidden = [failing[1], *others[NUM_VISIBLE - 1 : NUM_VISIBLE - 1 + MAX_HIDDEN - 1]]
    rng.shuffle(visible)
    rng.shuffle(hidden)
    return tuple(variant.pool[i] for i in visible), tuple(variant.pool[i] for i in hidden)


def show_call(arguments: tuple[Any, ...]) -> str:
    """A call of the function as the agent would write it."""
    return f"f({', '.join(map(repr, arguments))})"
