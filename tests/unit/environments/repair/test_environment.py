"""The environment as the harness and the scorer see it."""

import asyncio

import pytest

from steelyard.environments.base import Environment, Services
from steelyard.environments.repair.environment import make_repair
from steelyard.environments.repair.generator import SPLITS, make_task
from steelyard.errors import InputError
from steelyard.testing.harness import MemorySandbox
from steelyard.testing.repair import run_in_process
from steelyard.types import EndReason, ToolCall

ENVIRONMENT: Environment = make_repair({}, Services(run_function=run_in_process))


def test_the_agent_sees_what_the_function_should_do_and_its_lines_numbered() -> None:
    task = ENVIRONMENT.task("repair/train/3")
    truth = make_task("repair/train/3")
    system, user = task.messages
    assert system.role == "system"
    assert user.content is not None
    assert user.content.split("\n")[0] == truth.doc
    assert user.content.split("\n")[1:] == [f"{n} {line}" for n, line in enumerate(truth.lines, start=1)]


@pytest.mark.parametrize("split", SPLITS)
def test_nothing_that_the_agent_or_its_sandbox_gets_holds_the_right_line_or_a_hidden_test(split: str) -> None:
    for index in range(40):
        task = ENVIRONMENT.task(ENVIRONMENT.task_id(split, index))
        truth = make_task(task.task_id)
        right = truth.right_lines[truth.bug_number - 1]
        assert right not in task.public.decode(errors="replace").split("\n")
        cases = ENVIRONMENT.session(task)
        assert set(cases.files) == {"solution.py"}
        assert cases.files["solution.py"].decode() == truth.source
        public = repr(task)
        assert not [case for case in truth.hidden if f"f({', '.join(map(repr, case.arguments))})" in public]


def test_the_session_is_made_from_the_public_part_alone() -> None:
    task = ENVIRONMENT.task("repair/train/3")
    elsewhere = ENVIRONMENT.session(task)
    assert elsewhere.files["solution.py"].decode() == make_task("repair/train/3").source


def test_a_task_that_is_solved_is_graded_as_a_success() -> None:
    async def solve() -> tuple[bytes, bool]:
        truth = make_task("repair/heldout/8")
        session = ENVIRONMENT.session(ENVIRONMENT.task(truth.task_id))
        sandbox = MemorySandbox("att")
        sandbox.files.update(session.files)
        text = truth.right_lines[truth.bug_number - 1].replace('"', '\\"')
        arguments = f'{{"number": {truth.bug_number}, "text": "{text}"}}'
        await session.call(sandbox, ToolCall(id="a", name="replace_line", arguments=arguments))
        session.turn_ended()
        await session.call(sandbox, ToolCall(id="b", name="submit", arguments="{}"))
        verdict = await ENVIRONMENT.grader().grade(truth.task_id, session.artifact(), MemorySandbox("score"))
        return session.artifact(), verdict.success

    _, success = asyncio.run(solve())
    assert success


def test_a_failure_is_explained_from_the_artifact() -> None:
    session = ENVIRONMENT.session(ENVIRONMENT.task("repair/train/3"))
    assert ENVIRONMENT.failure_cause("repair/train/3", session.artifact(), EndReason.MAX_TURNS) == "no_submit"


def test_every_split_is_endless_and_others_are_refused() -> None:
    assert [ENVIRONMENT.num_tasks(split) for split in SPLITS] == [None, None, None]
    with pytest.raises(InputError, match="train"):
        ENVIRONMENT.num_tasks("test")
