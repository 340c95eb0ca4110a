"""The environment ``repair``."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from steelyard.environments.base import Services, parse_options
from steelyard.environments.repair.catalogue import FAMILY_VERSION
from steelyard.environments.repair.failures import failure_cause
from steelyard.environments.repair.generator import SPLITS, RepairTask, make_task, make_task_id
from steelyard.environments.repair.grading import RepairGrader, RepairOptions, decode_artifact
from steelyard.environments.repair.session import RepairSession
from steelyard.environments.repair.state import TOOLS, PublicTask, numbered
from steelyard.errors import InputError
from steelyard.types import EndReason, Message, Task

SYSTEM_TEXT = "One line of f is wrong. Repair it."

_encoder = msgspec.msgpack.Encoder()
_public_decoder = msgspec.msgpack.Decoder(PublicTask)


class RepairEnvironment:
    """Small functions with one seeded bug each; endless in every split.

    Args:
        options: what a success is worth.
        services: how to run the agent's function.
    """

    name = "repair"
    version = FAMILY_VERSION

    def __init__(self, options: RepairOptions, services: Services) -> None:
        self._options = options
        self._services = services

    def task_id(self, split: str, index: int) -> str:
        return make_task_id(split, index)

    def task(self, task_id: str) -> Task:
        task = make_task(task_id)
        _, split, index = task_id.split("/")
        return Task(
            task_id=task_id,
            environment=self.name,
            environment_version=self.version,
            split=split,
            index=int(index),
            messages=task_messages(task),
            tools=TOOLS,
            public=_encoder.encode(PublicTask(source=task.source, visible=task.visible)),
        )

    def num_tasks(self, split: str) -> int | None:
        """None: every split is endless.

        Raises:
            InputError: an unknown split.
        """
        if split not in SPLITS:
            raise InputError(f"a split of repair must be one of {', '.join(SPLITS)}, got {split!r}")
        return None

    def session(self, task: Task) -> RepairSession:
        return RepairSession(_public_decoder.decode(task.public), self._services)

    def grader(self) -> RepairGrader:
        return RepairGrader(self._services, self._options)

    def failure_cause(self, task_id: str, artifact: bytes, end_reason: EndReason) -> str:
        return failure_cause(make_task(task_id), decode_artifact(artifact), end_reason)


def task_messages(task: RepairTask) -> tuple[Message, ...]:
    """What the agent is first shown: what the function should return, and its lines, numbered."""
    return (Message(role="system", content=SYSTEM_TEXT), shown_function(task.doc, task.lines))


def shown_function(doc: str, lines: Sequence[str]) -> Message:
    """A function as the agent is shown it."""
    numbered_lines = [numbered(number, line) for number, line in enumerate(lines, start=1)]
    return Message(role="user", content="\n".join((doc, *numbered_lines)))


def make_repair(options: Mapping[str, Any], services: Services) -> RepairEnvironment:
    """The environment with ``environment.options`` checked; raises ``ConfigError``."""
    return RepairEnvironment(parse_options(options, RepairOptions), services)
