"""An agent program that knows nothing of training: started once for each attempt, in a folder of its own.

::

    task files, TASK.md, TASK.json --> folder --> program --OPENAI_BASE_URL, key--> gateway --> turns, recorded
                                         |           `--> stdout, or ANSWER.txt --> session.submit --> artifact
                                         `--> files that it changed ----------------^

    consumes   the task's messages, an address and a key
    waits for  the program, at most ``deadline_s``, which is ours and never the policy's: past it the attempt timed out
    produces   LoopResult: how the program ended, as far as that was the agent's doing

Whether a model call failed by the system's fault is asked of the gateway, not of the program.
"""

import re
from typing import Any, Protocol

import msgspec

from steelyard.errors import DeadlineExceeded, RunError
from steelyard.harness.base import LoopResult, SandboxHandle, Session
from steelyard.types import (
    AttemptStanding,
    EndReason,
    Lease,
    Record,
    SandboxCall,
    SandboxResult,
    SandboxStatus,
    Task,
)

PROMPT_FILE = "TASK.md"
TASK_FILE = "TASK.json"
ANSWER_FILE = "ANSWER.txt"
_TAIL_CHARS = 300
_FOLDER = "{folder}"
_WORDS = re.compile(r"(\{(?:prompt|model|api_key|openai_base_url|anthropic_base_url|folder)\})")

# Becomes the program. What depends on the folder is filled in there, where the folder is known.
_LAUNCHER = """
import json, os
job = json.loads({job!r})
here = os.getcwd()
def filled(parts): return "".join(here if part is None else part for part in parts)
environment = {{name: filled(parts) for name, parts in job["environment"].items()}}
command = [filled(parts) for parts in job["command"]]
os.execvpe(command[0], command, environment)
"""
_FOLDERS = {
    "HOME": "{folder}",
    "TMPDIR": "{folder}",
    "STEELYARD_PROMPT": f"{{folder}}/{PROMPT_FILE}",
    "STEELYARD_TASK": f"{{folder}}/{TASK_FILE}",
    "STEELYARD_ANSWER": f"{{folder}}/{ANSWER_FILE}",
}


class ModelAccess(Record, frozen=True, kw_only=True):
    """Where an attempt calls the policy. ``url`` is the gateway's, without ``/v1``; ``model`` a name that it serves."""

    url: str
    api_key: str
    model: str


class AccessSource(Protocol):
    """The gateway, as an agent program needs it."""

    async def access(self, attempt_id: str) -> ModelAccess:
        """Address and key of a live attempt. Raises ``Refused`` where it is none."""
        ...

    async def standing(self, attempt_id: str) -> AttemptStanding:
        """How far its model calls have come."""
        ...


class ProgramPlace(SandboxHandle, Protocol):
    """A folder in which a program may run; everything that it started ends with it."""

    async def read_file(self, name: str) -> bytes: ...

    async def run(self, call: SandboxCall) -> SandboxResult: ...


class CommandSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What is started.

    Attributes:
        command: the program and its arguments. ``{prompt}`` stands for the text of the task's messages, ``{model}``,
            ``{api_key}``, ``{openai_base_url}`` and ``{anthropic_base_url}`` for the policy, ``{folder}`` for the
            working directory.
        environment: variables beside those that every program gets; the same words stand for the same.
        deadline_s: for the whole program.
    """

    command: tuple[str, ...]
    environment: dict[str, str]
    deadline_s: float


class CommandAgent:
    """Carries attempts through by starting a program for each.

    Args:
        search_path: the ``PATH`` of programs.
    """

    def __init__(self, settings: CommandSettings, access: AccessSource, search_path: str) -> None:
        self._settings = settings
        self._access = access
        self._search_path = search_path

    async def run(self, lease: Lease, task: Task, session: Session, sandbox: Any) -> LoopResult:
        """Start the program and wait for its end.

        Args:
            sandbox: a :class:`ProgramPlace`.

        Raises:
            DeadlineExceeded: the program did not end in time.
            RunError: a model call failed by no fault of the agent, or the program never made one.
        """
        place: ProgramPlace = sandbox
        access = await self._access.access(lease.attempt_id)
        prompt = prompt_of(task)
        await place.write_file(PROMPT_FILE, prompt.encode("utf-8", "replace"))
        await place.write_file(TASK_FILE, msgspec.json.encode({"messages": task.messages, "tools": task.tools}))
        result = await place.run(
            SandboxCall(
                program=self._program(prompt, access),
                stdin=prompt.encode("utf-8", "replace"),
                deadline_s=self._settings.deadline_s,
            )
        )
        standing = await self._access.standing(lease.attempt_id)
        self._require_fair_end(result, standing)
        if result.status is not SandboxStatus.OK:
            return LoopResult(end_reason=standing.limit or EndReason.ANSWER_CRASHED, tools=())
        await session.submit(place, await _answer(place, result))
        return LoopResult(end_reason=EndReason.SUBMITTED, tools=())

    def _program(self, prompt: str, access: ModelAccess) -> bytes:
        words = {
            "{prompt}": prompt,
            "{model}": access.model,
            "{api_key}": access.api_key,
            "{openai_base_url}": f"{access.url}/v1",
            "{anthropic_base_url}": access.url,
        }
        given = {
            "PATH": self._search_path,
            "PYTHONUTF8": "1",
            "NO_PROXY": "*",
            "OPENAI_BASE_URL": f"{access.url}/v1",
            "OPENAI_API_BASE": f"{access.url}/v1",
            "OPENAI_API_KEY": access.api_key,
            "ANTHROPIC_BASE_URL": access.url,
            "ANTHROPIC_API_KEY": access.api_key,
        }
        own = {name: _parts(value, words) for name, value in (_FOLDERS | self._settings.environment).items()}
        job = {
            "command": [_parts(word, words) for word in self._settings.command],
            "environment": {name: [value] for name, value in given.items()} | own,
        }
        return _LAUNCHER.format(job=msgspec.json.encode(job).decode("utf-8")).encode("utf-8")

    def _require_fair_end(self, result: SandboxResult, standing: AttemptStanding) -> None:
        """Raise where the attempt ended by the system's fault, so that it is no reward."""
        name = self._settings.command[0]
        if standing.failure is not None:
            raise RunError(f"the newest model call of {name} failed: {standing.failure}")
        if result.status is SandboxStatus.TIMED_OUT:
            raise DeadlineExceeded("the end of an agent program", (name,), self._settings.deadline_s)
        if standing.num_turns == 0 and standing.limit is None:
            said = result.stderr.decode("utf-8", "replace").strip()[-_TAIL_CHARS:]
            raise RunError(f"{name} must call the policy at least once, but ended ({result.returncode}) first: {said}")


def prompt_of(task: Task) -> str:
    """The texts of the task's messages, the system's first, with empty lines between them."""
    return "\n\n".join(message.content for message in task.messages if message.content)


async def _answer(place: ProgramPlace, result: SandboxResult) -> str:
    """The file, where the program wrote one, or what it printed."""
    try:
        data = await place.read_file(ANSWER_FILE)
    except FileNotFoundError:
        data = result.stdout
    return data.decode("utf-8", "replace")


def _parts(text: str, words: dict[str, str]) -> list[str | None]:
    """``text`` in parts, words replaced; None stands for the folder. What replaces a word is not looked at again."""
    return [None if part == _FOLDER else words.get(part, part) for part in _WORDS.split(text)]
