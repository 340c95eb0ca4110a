"""Exercises of the warm-up."""

import itertools
import random

import pytest

from steelyard.environments.repair.catalogue import split_kinds
from steelyard.environments.repair.demonstrations import Demonstration
from steelyard.environments.repair.environment import task_messages
from steelyard.environments.repair.exercises import exercise, exercises, foreign_exercise
from steelyard.environments.repair.generator import RepairTask, make_task
from steelyard.environments.repair.mutations import apply_mutant
from steelyard.environments.repair.state import PublicTask, RepairState, ReplaceLine
from steelyard.environments.repair.template import rename
from steelyard.errors import InputError


def source_shown(shown: Demonstration) -> str:
    """The function as the agent reads it, without the description and the numbers of the lines."""
    lines = (shown.messages[0].content or "").split("\n")[1:]
    return "\n".join(line.partition(" ")[2] for line in lines) + "\n"


def mended(shown: Demonstration, task: RepairTask) -> str | None:
    """What the exercise's own edit makes of the function that it shows, by the real rules."""
    source = source_shown(shown)
    state = RepairState(PublicTask(source=source, visible=task.visible))
    edit = state.decode(shown.messages[1].tool_calls[0])
    assert isinstance(edit, ReplaceLine)
    return state.replace(source, edit)[0]


def test_an_exercise_is_a_function_and_the_edit_that_mends_it() -> None:
    for shown in itertools.islice(exercises(4), 400):
        task = make_task(shown.task_id)
        assert task.kind in split_kinds(task.template).train
        right = "\n".join(task.right_lines) + "\n"
        assert source_shown(shown) != right
        assert mended(shown, task) == right


def test_an_exercise_without_a_foreign_line_is_what_an_agent_is_shown() -> None:
    for shown in itertools.islice(exercises(4, foreign_frac=0.0), 100):
        assert shown.messages[0] == task_messages(make_task(shown.task_id))[1]


def test_a_foreign_line_is_the_only_difference_from_the_right_function() -> None:
    for shown in itertools.islice(exercises(5, foreign_frac=1.0), 400):
        task = make_task(shown.task_id)
        lines = source_shown(shown).splitlines()
        assert sum(map(str.__ne__, lines, task.right_lines)) == 1
        assert lines[0] == task.right_lines[0]


def test_no_exercise_shows_what_a_held_out_mutation_makes_of_a_function() -> None:
    for shown in itertools.islice(exercises(6), 2000):
        task = make_task(shown.task_id)
        held_out = split_kinds(task.template).held_out
        forbidden = {
            "\n".join(rename(line, task.words) for line in apply_mutant(task.variant.lines, mutant)) + "\n"
            for mutant in task.variant.mutants
            if mutant.kind in held_out
        }
        assert source_shown(shown) not in forbidden


@pytest.mark.parametrize("task_id", ["repair/heldout/0", "repair/unseen_templates/0"])
def test_a_task_of_another_split_is_refused(task_id: str) -> None:
    with pytest.raises(InputError, match="train"):
        exercise(make_task(task_id))
    with pytest.raises(InputError, match="train"):
        foreign_exercise(make_task(task_id), random.Random(0))


def test_exercises_are_the_same_for_the_same_seed() -> None:
    first = list(itertools.islice(exercises(1), 50))
    assert first == list(itertools.islice(exercises(1), 50))
    assert first != list(itertools.islice(exercises(2), 50))
