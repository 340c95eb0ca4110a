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

from steelyard.environments.repair.catalogue import draw_constants, make_variant, seed_of, split_kinds
from steelyard.environments.repair.demonstrations import Demonstration, check_trained_on
from steelyard.environments.repair.environment import shown_function, task_messages
from steelyard.environments.repair.generator import TRAIN, RepairTask, make_task, make_task_id
from steelyard.environments.repair.state import ToolName
from steelyard.environments.repair.template import NAMES, rename, words_in
from steelyard.environments.repair.templates import SEEN_TEMPLATES
from steelyard.types import Message, ToolCall

FOREIGN_FRAC = 0.5
"""Share of the exercises whose wrong line is a foreign one."""
_NUMBER_FRAC = 0.5
"""Share of the foreign lines that differ in a digit alone, where the line has one."""
_NUM_DRAWS = 24
_HEADS = ("if ", "while ", "for ", "return ", "else", "elif ")


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
    lines[number - 1] = _foreign_line(task, number, rng)
    shown = shown_function(task.doc, [rename(line, task.words) for line in lines])
    return _mended(task, shown, number)


def _mended(task: RepairTask, shown: Message, number: int) -> Demonstration:
    arguments = json.dumps({"number": number, "text": task.right_lines[number - 1].strip()})
    call = ToolCall(id="call_0", name=ToolName.REPLACE_LINE, arguments=arguments)
    messages = (shown, Message(role="assistant", tool_calls=(call,)))
    return Demonstration(task_id=task.task_id, messages=messages, tools=(), success=True)


def _foreign_line(task: RepairTask, number: int, rng: random.Random) -> str:
    """What stands in place of a line, in canonical names: a line from elsewhere, or the line with another digit."""
    variant = task.variant
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
