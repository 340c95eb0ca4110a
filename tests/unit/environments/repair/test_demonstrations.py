"""The imperfect demonstrator."""

import asyncio
import itertools
import random

import pytest

from steelyard.environments.base import Services, ToolOutcome
from steelyard.environments.repair.catalogue import split_kinds
from steelyard.environments.repair.demonstrations import (
    Demonstration,
    Mixture,
    demonstrate,
    demonstrations,
    suspected_line,
)
from steelyard.environments.repair.environment import make_repair, task_messages
from steelyard.environments.repair.foreign_lines import with_foreign_bug
from steelyard.environments.repair.generator import TRAIN, RepairTask, make_task, make_task_id
from steelyard.environments.repair.session import RepairSession
from steelyard.environments.repair.state import PublicTask
from steelyard.errors import InputError
from steelyard.testing.harness import MemorySandbox
from steelyard.testing.repair import run_in_process
from steelyard.types import Message

PERFECT = Mixture(**dict.fromkeys(Mixture.__struct_fields__, 0.0) | {"test_first": 1.0})
TRAINED_BUGS = Mixture(foreign_bug=0.0)
SAMPLE = list(itertools.islice(demonstrations(1, TRAINED_BUGS), 400))


def tools_of(demonstration: Demonstration) -> list[str]:
    return [call.name for message in demonstration.messages for call in message.tool_calls]


async def replay(demonstration: Demonstration, task: RepairTask) -> bytes | None:
    """The artifact of a demonstration played against the real session; None where a result is not what was shown."""
    session = RepairSession(PublicTask(source=task.source, visible=task.visible), Services(run_function=run_in_process))
    sandbox = MemorySandbox("att")
    sandbox.files.update(session.files)
    for message, answer in itertools.pairwise(demonstration.messages):
        if message.role != "assistant":
            continue
        outcome: ToolOutcome
        if message.tool_calls:
            outcome = await session.call(sandbox, message.tool_calls[0])
        else:
            outcome = session.no_call(message)
        session.turn_ended()
        if outcome.text != answer.content:
            return None
    return session.artifact()


async def is_graded_as_shown(demonstration: Demonstration) -> bool:
    artifact = await replay(demonstration, make_task(demonstration.task_id))
    assert artifact is not None
    grader = make_repair({}, Services(run_function=run_in_process)).grader()
    verdict = await grader.grade(demonstration.task_id, artifact, MemorySandbox("att"))
    return verdict.success == demonstration.success


def test_every_result_shown_is_what_the_real_session_says() -> None:
    for demonstration in SAMPLE:
        assert asyncio.run(is_graded_as_shown(demonstration))


def test_the_same_holds_where_the_bug_is_a_line_from_elsewhere() -> None:
    rng = random.Random(5)
    for index in range(100):
        task = with_foreign_bug(make_task(make_task_id(TRAIN, index)), rng)
        demonstration = demonstrate(task, rng, Mixture())
        assert demonstration.messages[:2] == task_messages(task)
        assert asyncio.run(replay(demonstration, task)) is not None


def test_half_of_the_demonstrations_have_a_bug_that_no_mutation_makes() -> None:
    shown = list(itertools.islice(demonstrations(4, Mixture()), 400))
    num_foreign = sum(one.messages[:2] != task_messages(make_task(one.task_id)) for one in shown)
    assert 0.35 * len(shown) < num_foreign < 0.65 * len(shown)


def test_a_perfect_demonstrator_tests_mends_tests_and_submits() -> None:
    for demonstration in itertools.islice(demonstrations(2, PERFECT), 200):
        assert demonstration.success
        assert tools_of(demonstration) == ["run_tests", "replace_line", "run_tests", "submit"]


def test_the_demonstrator_fails_often_and_succeeds_often() -> None:
    successes = sum(demonstration.success for demonstration in SAMPLE)
    assert 0.15 * len(SAMPLE) < successes < 0.8 * len(SAMPLE)


def test_all_skills_and_all_faults_are_shown() -> None:
    sequences = [tools_of(demonstration) for demonstration in SAMPLE]
    assert any(tools.count("replace_line") >= 2 for tools in sequences)
    assert any(tools.count("replace_line") == 1 and tools[-1] == "submit" for tools in sequences)
    assert any("submit" not in tools for tools in sequences)
    assert any(message.role == "user" and message.content == "error: no tool call" for message in all_messages())


def all_messages() -> list[Message]:
    return [message for demonstration in SAMPLE for message in demonstration.messages]


def test_demonstrations_keep_to_the_pairs_that_are_trained_on() -> None:
    for demonstration in SAMPLE:
        task = make_task(demonstration.task_id)
        assert task.kind in split_kinds(task.template).train


@pytest.mark.parametrize("task_id", ["repair/heldout/0", "repair/unseen_templates/0"])
def test_a_task_of_another_split_is_refused(task_id: str) -> None:
    with pytest.raises(InputError, match="train"):
        demonstrate(make_task(task_id), random.Random(0), Mixture())


def test_demonstrations_are_the_same_for_the_same_seed() -> None:
    again = list(itertools.islice(demonstrations(1, Mixture()), 50))
    assert again == list(itertools.islice(demonstrations(1, Mixture()), 50))
    assert again != list(itertools.islice(demonstrations(2, Mixture()), 50))


def test_an_attempt_never_takes_more_turns_than_allowed() -> None:
    for demonstration in itertools.islice(demonstrations(3, Mixture(), max_turns=3), 100):
        assert sum(message.role == "assistant" for message in demonstration.messages) <= 3


@pytest.mark.parametrize(
    ("lines", "number"),
    [(("def f(a):", " if a:", "  a = 1", " return a"), 2), (("def f(a):", " b = a", " return b"), 3)],
)
def test_the_demonstrator_suspects_the_first_condition_else_the_last_line(lines: tuple[str, ...], number: int) -> None:
    assert suspected_line(lines) == number
