"""Exercises of ``repair``: the heart of an attempt alone, for the supervised warm-up of a policy from scratch.

An exercise is a function with one wrong line and the edit that mends it. Exercises are short, so that a policy sees
many functions and comes to know what a right one looks like. In some the wrong line is a bug of a trained pair of
template and mutation; in others it is a *foreign line*, taken from another function, or has a *foreign number*. Those
teach to compare every line with what it should be, not only to know the bugs that the trained pairs have, and so to
find bugs never seen. A foreign line is never what a held-out mutation would have made of that line.
"""

import json
import random
from collections.abc import Iterator

from steelyard.environments.repair.catalogue import seed_of
from steelyard.environments.repair.demonstrations import Demonstration, check_trained_on
from steelyard.environments.repair.environment import shown_function, task_messages
from steelyard.environments.repair.foreign_lines import foreign_line
from steelyard.environments.repair.generator import TRAIN, RepairTask, make_task, make_task_id
from steelyard.environments.repair.state import ToolName
from steelyard.environments.repair.template import rename
from steelyard.types import Message, ToolCall

FOREIGN_FRAC = 0.5
"""Share of the exercises whose wrong line is a foreign one."""


def exercises(seed: int, foreign_frac: float = FOREIGN_FRAC) -> Iterator[Demonstration]:
    """Endless exercises, all on tasks of the train split, the same for the same seed."""
    rng = random.Random(seed_of("exercises", seed))
    while True:
        task = make_task(make_task_id(TRAIN, rng.randrange(1 << 30)))
        if rng.random() < foreign_frac:
            yield foreign_exercise(task, rng)
        else:
            yield exercise(task)


def exercise(task: RepairTask) -> Demonstration:
    """The function as an agent is shown it, and the edit that mends it; no system message, no tools listed.

    Raises:
        InputError: the task is not of the train split.
    """
    check_trained_on(task)
    _, shown = task_messages(task)
    return _mended(task, shown, task.bug_number)


def foreign_exercise(task: RepairTask, rng: random.Random) -> Demonstration:
    """The task's right function with one line taken from elsewhere, and the edit that mends it.

    Raises:
        InputError: the task is not of the train split.
    """
    check_trained_on(task)
    number = rng.randrange(2, len(task.right_lines) + 1)
    lines = list(task.variant.lines)
    lines[number - 1] = foreign_line(task.variant, number, rng)
    shown = shown_function(task.doc, [rename(line, task.words) for line in lines])
    return _mended(task, shown, number)


def _mended(task: RepairTask, shown: Message, number: int) -> Demonstration:
    arguments = json.dumps({"number": number, "text": task.right_lines[number - 1].strip()})
    call = ToolCall(id="call_0", name=ToolName.REPLACE_LINE, arguments=arguments)
    messages = (shown, Message(role="assistant", tool_calls=(call,)))
    return Demonstration(task_id=task.task_id, messages=messages, tools=(), success=True)
