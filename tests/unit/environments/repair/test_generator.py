"""Tasks from ids."""

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.digests import digest_bytes
from steelyard.environments.repair.catalogue import Case, passes, split_kinds
from steelyard.environments.repair.execution import KnownFunction
from steelyard.environments.repair.generator import (
    HELD_OUT,
    MAX_HIDDEN,
    NUM_VISIBLE,
    SPLITS,
    TRAIN,
    UNSEEN,
    RepairTask,
    make_task,
    make_task_id,
)
from steelyard.environments.repair.template import rename
from steelyard.environments.repair.templates import UNSEEN_TEMPLATES
from steelyard.errors import InputError

TASK_IDS = st.builds(make_task_id, st.sampled_from(SPLITS), st.integers(0, 2**40))
FINGERPRINT = """
from steelyard.digests import digest_bytes
from steelyard.environments.repair.generator import SPLITS, make_task, make_task_id
tasks = [make_task(make_task_id(split, index)) for split in SPLITS for index in range(30)]
print(digest_bytes(repr([(t.lines, t.doc, t.visible, t.hidden) for t in tasks]).encode()))
"""


def num_failing(lines: tuple[str, ...], cases: tuple[Case, ...]) -> int:
    function = KnownFunction(lines)
    return sum(not passes(function.call(case.arguments), case) for case in cases)


@given(TASK_IDS)
def test_the_bug_fails_visible_and_hidden_tests_and_the_right_function_none(task_id: str) -> None:
    task = make_task(task_id)
    assert num_failing(task.lines, task.visible) >= 1
    assert num_failing(task.lines, task.hidden) >= 1
    assert num_failing(task.right_lines, task.visible) == num_failing(task.right_lines, task.hidden) == 0


@given(TASK_IDS)
def test_exactly_one_line_is_wrong_and_it_is_the_one_named(task_id: str) -> None:
    task = make_task(task_id)
    differing = [
        i for i, (line, right) in enumerate(zip(task.lines, task.right_lines, strict=True), 1) if line != right
    ]
    assert differing == [task.bug_number]
    assert task.bug_number > 1


@given(TASK_IDS)
def test_hidden_tests_are_not_visible_ones(task_id: str) -> None:
    task = make_task(task_id)
    assert len(task.visible) == NUM_VISIBLE
    assert 8 <= len(task.hidden) <= MAX_HIDDEN
    assert not [case for case in task.hidden if case.arguments in [seen.arguments for seen in task.visible]]


@given(TASK_IDS)
def test_names_can_be_taken_back(task_id: str) -> None:
    task = make_task(task_id)
    back = {new: canonical for canonical, new in task.words.items()}
    assert tuple(rename(line, back) for line in task.right_lines) == task.variant.lines


@given(st.integers(0, 2**40))
def test_a_split_keeps_to_its_pairs_of_template_and_mutation(index: int) -> None:
    unseen = {template.name for template in UNSEEN_TEMPLATES}
    train, held_out, other = (make_task(make_task_id(split, index)) for split in SPLITS)
    assert train.template not in unseen
    assert train.kind in split_kinds(train.template).train
    assert held_out.template not in unseen
    assert held_out.kind in split_kinds(held_out.template).held_out
    assert other.template in unseen


def test_no_held_out_function_is_ever_a_training_function() -> None:
    def functions(split: str) -> set[tuple[str, ...]]:
        tasks = [make_task(make_task_id(split, index)) for index in range(2000)]
        return {(task.mutant.text, str(task.mutant.number), *task.variant.lines) for task in tasks}

    assert not functions(TRAIN) & functions(HELD_OUT)
    assert not functions(TRAIN) & functions(UNSEEN)


def test_tasks_vary_in_template_kind_and_place() -> None:
    tasks = [make_task(make_task_id(TRAIN, index)) for index in range(1000)]
    assert len({task.template for task in tasks}) >= 22
    assert len({task.kind for task in tasks}) >= 12
    assert len({task.lines for task in tasks}) >= 600


@settings(max_examples=3, deadline=None)
@given(st.sampled_from(["0", "1", "random"]))
def test_a_task_is_the_same_in_every_process(hash_seed: str) -> None:
    tasks: list[RepairTask] = [make_task(make_task_id(split, index)) for split in SPLITS for index in range(30)]
    here = digest_bytes(repr([(t.lines, t.doc, t.visible, t.hidden) for t in tasks]).encode())
    command = [sys.executable, "-c", FINGERPRINT]
    there = subprocess.run(command, env={"PYTHONHASHSEED": hash_seed}, capture_output=True, text=True, check=True)
    assert there.stdout.strip() == here


@pytest.mark.parametrize(
    "task_id", ["repair/train/-1", "repair/train/07", "repair/tests/1", "other/train/1", "repair/train/x", "repair", ""]
)
def test_what_is_no_task_id_is_refused(task_id: str) -> None:
    with pytest.raises(InputError):
        make_task(task_id)


def test_an_unknown_split_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(InputError, match="unseen_templates"):
        make_task_id("tset", 0)
