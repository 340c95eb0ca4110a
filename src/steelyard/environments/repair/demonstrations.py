"""Scripted, imperfect demonstrations of ``repair``, for the supervised warm-up of a policy from scratch.

They are whole attempts with all tools: the demonstrator knows the right function and yet often fails, as a careless
person would: it suspects the first condition before it has looked, writes a line down as it was, hands in without
testing, gives up. A policy that imitates it has met all the skills (finding, mending, testing, trying again) and
succeeds seldom; to choose well among them is left to reinforcement learning. Tool results are those of the real
rules (``state.py``) on functions that really run.
"""

import json
import random
from collections.abc import Iterator
from typing import Annotated

import msgspec

from steelyard.environments.base import ToolOutcome
from steelyard.environments.repair.catalogue import passes, seed_of, texts_by_line
from steelyard.environments.repair.environment import task_messages
from steelyard.environments.repair.execution import run_known
from steelyard.environments.repair.foreign_lines import with_foreign_bug
from steelyard.environments.repair.generator import TRAIN, RepairTask, make_task, make_task_id, parse_task_id
from steelyard.environments.repair.state import TOOLS, PublicTask, RepairState, ReplaceLine, ToolName
from steelyard.environments.repair.template import rename
from steelyard.errors import InputError
from steelyard.types import CallResult, CallStatus, Message, ToolCall, ToolSpec

Frac = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]


class Mixture(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How imperfect the demonstrator is; all are probabilities.

    The defaults put most faults where they teach something all the same: writing a line down as it was trains the
    copying that a right text needs too, while an edit of the wrong line hides which one was wrong. More than half
    of the demonstrations fail, and what is done most often (copy, give up) fails too.

    Attributes:
        test_first: runs the tests before the first edit.
        habit_line: edits the line it always suspects, if it has not done so yet.
        other_line: edits any line, right or wrong.
        copied_text: writes a faulty line down as it is.
        wrong_text: writes a faulty line wrongly in another way.
        damage: given a right line, breaks it instead of copying it.
        submit_untested: hands in right after an edit.
        give_up: hands in though tests fail.
        bad_call: makes an invalid call instead of what it wanted to do.
        foreign_bug: the function it is given has a line from elsewhere instead of a bug of a trained kind.
    """

    test_first: Frac = 0.8
    habit_line: Frac = 0.25
    other_line: Frac = 0.1
    copied_text: Frac = 0.8
    wrong_text: Frac = 0.05
    damage: Frac = 0.2
    submit_untested: Frac = 0.15
    give_up: Frac = 0.6
    bad_call: Frac = 0.03
    foreign_bug: Frac = 0.5


class Demonstration(msgspec.Struct, frozen=True, kw_only=True):
    """One conversation, from the first message to the last call, or to its result.

    ``success``: the hidden tests pass, and a whole attempt was submitted.
    """

    task_id: str
    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...]
    success: bool


def demonstrations(seed: int, mixture: Mixture, max_turns: int = 6) -> Iterator[Demonstration]:
    """Endless demonstrations, all on tasks of the train split, the same for the same seed."""
    rng = random.Random(seed_of("demonstrations", seed))
    while True:
        task = make_task(make_task_id(TRAIN, rng.randrange(1 << 30)))
        if rng.random() < mixture.foreign_bug:
            task = with_foreign_bug(task, rng)
        yield demonstrate(task, rng, mixture, max_turns)


def check_trained_on(task: RepairTask) -> None:
    """Raises ``InputError`` unless the task is of the train split: held-out pairs must not be seen in the warm-up."""
    split, _ = parse_task_id(task.task_id)
    if split != TRAIN:
        raise InputError(f"demonstrations must use the split {TRAIN!r}, got the task {task.task_id}")


def demonstrate(task: RepairTask, rng: random.Random, mixture: Mixture, max_turns: int = 6) -> Demonstration:
    """One attempt of the demonstrator.

    Raises:
        InputError: the task is not of the train split; held-out pairs must not be seen in the warm-up.
    """
    check_trained_on(task)
    attempt = _Attempt(task, rng, mixture)
    while not attempt.submitted and attempt.turn_index < max_turns:
        attempt.take_turn(is_last=attempt.turn_index == max_turns - 1)
    return Demonstration(
        task_id=task.task_id, messages=tuple(attempt.messages), tools=TOOLS, success=attempt.is_success()
    )


class _Attempt:
    """The demonstrator at work. Lines are kept in canonical names too, by which results are cached."""

    def __init__(self, task: RepairTask, rng: random.Random, mixture: Mixture) -> None:
        self.task = task
        self.rng = rng
        self.mixture = mixture
        self.state = RepairState(PublicTask(source=task.source, visible=task.visible))
        self.messages = list(task_messages(task))
        self.lines = list(task.variant.lines)
        self.lines[task.bug_number - 1] = task.mutant.text
        self.source = task.source
        self.turn_index = 0
        self.submitted = False
        self.num_failing: int | None = None
        self.has_edited = False
        self.suspects = True

    def take_turn(self, is_last: bool) -> None:
        """One message of the assistant and what came of it."""
        if self._happens(self.mixture.bad_call):
            self._call_badly()
        elif is_last or self._wants_to_submit():
            self._say(ToolName.SUBMIT, {}, self.state.submit(self.source))
            self.submitted = True
        elif self._wants_to_test():
            outcome = self.state.tested(self.source, self._run_tests())
            self.num_failing = self.state.artifact().actions[-1].num_failing
            self._say(ToolName.RUN_TESTS, {}, outcome)
        else:
            self._edit()
        self.state.turn_ended()
        self.turn_index += 1

    def is_success(self) -> bool:
        results = run_known(tuple(self.lines), [case.arguments for case in self.task.hidden])
        return self.submitted and all(map(passes, results, self.task.hidden))

    def _happens(self, probability: float) -> bool:
        return self.rng.random() < probability

    def _wants_to_submit(self) -> bool:
        if self.num_failing == 0:
            return True
        if self.num_failing is not None:
            return self.has_edited and self._happens(self.mixture.give_up)
        return self.has_edited and self._happens(self.mixture.submit_untested)

    def _wants_to_test(self) -> bool:
        """``num_failing`` is None from an edit to the next test."""
        return self.num_failing is None and (self.has_edited or self._happens(self.mixture.test_first))

    def _run_tests(self) -> list[CallResult]:
        results = list(run_known(tuple(self.lines), [case.arguments for case in self.task.visible]))
        for position, result in enumerate(results):
            if result.status is CallStatus.TIMED_OUT:  # in the sandbox it takes the rest with it
                rest = len(results) - position - 1
                return [*results[: position + 1], *[CallResult(status=CallStatus.NOT_RUN)] * rest]
        return results

    def _edit(self) -> None:
        number = self._choose_line()
        canonical = self._choose_text(number)
        text = rename(canonical, self.task.words).strip()
        changed, outcome = self.state.replace(self.source, ReplaceLine(number, text))
        if changed is None:
            raise AssertionError(f"the demonstrator must edit what it was shown, yet: {outcome.text}")
        self.source = changed
        self.lines[number - 1] = canonical
        self.num_failing = None
        self.has_edited = True
        self._say(ToolName.REPLACE_LINE, {"number": number, "text": text}, outcome)

    def _choose_line(self) -> int:
        draw = self.rng.random()
        if draw < self.mixture.habit_line and self.suspects:
            self.suspects = False
            return suspected_line(self.task.variant.lines)
        if draw > 1.0 - self.mixture.other_line:
            return self.rng.randrange(2, len(self.lines) + 1)
        wrong = [
            i
            for i, (line, right) in enumerate(zip(self.lines, self.task.variant.lines, strict=True), 1)
            if line != right
        ]
        return wrong[self.rng.randrange(len(wrong))]

    def _choose_text(self, number: int) -> str:
        present, right = self.lines[number - 1], self.task.variant.lines[number - 1]
        draw = self.rng.random()
        if present == right:
            breaks = draw < self.mixture.damage
        elif draw < self.mixture.copied_text:
            return present
        else:
            breaks = draw < self.mixture.copied_text + self.mixture.wrong_text
        if not breaks:
            return right
        variant = self.task.variant
        others = texts_by_line(variant.template.name, variant.constants).get(number, (right,))
        return others[self.rng.randrange(len(others))]

    def _call_badly(self) -> None:
        """One of the ways in which an untrained policy goes wrong."""
        way = self.rng.randrange(3)
        if way == 0:
            content = '<tool_call>{"name": "replace_line", "arguments": {"number": }}</tool_call>'
            self.messages.append(Message(role="assistant", content=content))
            self.messages.append(Message(role="user", content=self.state.no_call().text))
            return
        name, arguments = (ToolName.REPLACE_LINE, '{"number": 1}') if way == 1 else ("replace", "{}")
        call = self._tool_call(name, arguments)
        outcome = self.state.decode(call)
        if not isinstance(outcome, ToolOutcome):
            raise AssertionError(f"a bad call must be refused, {name} {arguments} was not")
        self._append(call, outcome)

    def _say(self, name: ToolName, arguments: dict[str, int | str], outcome: ToolOutcome) -> None:
        self._append(self._tool_call(name, json.dumps(arguments)), outcome)

    def _tool_call(self, name: str, arguments: str) -> ToolCall:
        return ToolCall(id=f"call_{self.turn_index}", name=str(name), arguments=arguments)

    def _append(self, call: ToolCall, outcome: ToolOutcome) -> None:
        self.messages.append(Message(role="assistant", tool_calls=(call,)))
        self.messages.append(Message(role="tool", content=outcome.text, tool_call_id=call.id))


def suspected_line(lines: tuple[str, ...]) -> int:
    """The line that the demonstrator suspects out of habit: the first condition, else the last line."""
    for number, line in enumerate(lines, start=1):
        if line.lstrip().startswith(("if ", "while ")):
            return number
    return len(lines)
