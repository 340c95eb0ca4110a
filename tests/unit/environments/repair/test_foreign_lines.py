"""Bugs made of lines from elsewhere."""

import random

from steelyard.environments.repair.catalogue import passes, split_kinds
from steelyard.environments.repair.execution import run_known
from steelyard.environments.repair.foreign_lines import with_foreign_bug
from steelyard.environments.repair.generator import TRAIN, RepairTask, make_task, make_task_id
from steelyard.environments.repair.mutations import MutationKind

PAIRS = [
    (task, with_foreign_bug(task, random.Random(index)))
    for index, task in enumerate(make_task(make_task_id(TRAIN, index)) for index in range(300))
]
FOREIGN = [made for _, made in PAIRS if made.kind is MutationKind.FOREIGN]


def canonical_lines(task: RepairTask) -> tuple[str, ...]:
    lines = list(task.variant.lines)
    lines[task.bug_number - 1] = task.mutant.text
    return tuple(lines)


def test_nearly_every_function_can_be_given_one() -> None:
    assert len(FOREIGN) > 0.9 * len(PAIRS)


def test_the_function_is_the_same_but_for_one_line() -> None:
    for task, made in PAIRS:
        assert (made.task_id, made.right_lines, made.doc) == (task.task_id, task.right_lines, task.doc)
        wrong = [
            i for i, (shown, right) in enumerate(zip(made.lines, made.right_lines, strict=True), 1) if shown != right
        ]
        assert wrong == [made.bug_number]


def test_a_visible_and_a_hidden_test_fail_and_no_case_is_both() -> None:
    for made in FOREIGN:
        for cases in (made.visible, made.hidden):
            results = run_known(canonical_lines(made), [case.arguments for case in cases])
            assert not all(map(passes, results, cases))
        assert not [case for case in made.visible if case in made.hidden]


def test_the_line_is_never_what_a_held_out_mutation_makes_of_it() -> None:
    for made in FOREIGN:
        held_out = split_kinds(made.template).held_out
        forbidden = {(one.number, one.text) for one in made.variant.mutants if one.kind in held_out}
        assert (made.bug_number, made.mutant.text) not in forbidden


def test_the_same_seed_makes_the_same_bug() -> None:
    for index, (task, made) in enumerate(PAIRS[:50]):
        assert with_foreign_bug(task, random.Random(index)) == made
