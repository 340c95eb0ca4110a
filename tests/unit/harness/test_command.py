import asyncio
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from steelyard.environments.base import Services as EnvironmentServices
from steelyard.environments.repair.environment import make_repair
from steelyard.environments.repair.grading import decode_artifact
from steelyard.errors import DeadlineExceeded, RunError
from steelyard.harness.base import LoopResult, Session
from steelyard.harness.command import ANSWER_FILE, PROMPT_FILE, TASK_FILE, CommandAgent, CommandSettings, ModelAccess
from steelyard.testing.harness import MemorySandbox, make_lease
from steelyard.testing.repair import run_in_process
from steelyard.types import (
    AttemptStanding,
    EndReason,
    Message,
    SandboxCall,
    SandboxResult,
    SandboxStatus,
    Task,
)

TASK = Task(
    task_id="toy/train/0",
    environment="toy",
    environment_version="1",
    split="train",
    index=0,
    messages=(Message(role="system", content="Be brief."), Message(role="user", content="Say '{folder} {model}'.")),
    tools=(),
)
SPOKE = AttemptStanding(num_turns=1)


class Place(MemorySandbox):
    """A folder in memory in which a program ends as it is told to."""

    def __init__(self, status: SandboxStatus = SandboxStatus.OK, stdout: bytes = b"", stderr: bytes = b"") -> None:
        super().__init__("att_0")
        self.calls: list[SandboxCall] = []
        self._result = SandboxResult(
            status=status, stdout=stdout, stderr=stderr, returncode=int(status is not SandboxStatus.OK), duration_s=0.1
        )

    async def run(self, call: SandboxCall) -> SandboxResult:
        self.calls.append(call)
        return self._result


class Access:
    """A gateway that says how far the calls have come."""

    def __init__(self, standing: AttemptStanding) -> None:
        self._standing = standing

    async def access(self, attempt_id: str) -> ModelAccess:
        return ModelAccess(url="http://127.0.0.1:9", api_key=f"key-of-{attempt_id}", model="policy")

    async def standing(self, attempt_id: str) -> AttemptStanding:
        return self._standing


class ToySession:
    """Keeps the answer."""

    files: Mapping[str, bytes] = {}

    def __init__(self) -> None:
        self.answers: list[str] = []

    async def call(self, sandbox: Any, call: object) -> Any:
        raise AssertionError("no tool is offered")

    def no_call(self, message: Message) -> Any:
        raise AssertionError("the program's messages are its own")

    def turn_ended(self) -> None: ...

    async def submit(self, sandbox: Any, answer: str) -> None:
        self.answers.append(answer)

    def artifact(self) -> bytes:
        return b""


def run(
    place: Place,
    *,
    session: Session | None = None,
    standing: AttemptStanding = SPOKE,
    command: tuple[str, ...] = ("agent", "{prompt}"),
    environment: dict[str, str] | None = None,
) -> LoopResult:
    settings = CommandSettings(command=command, environment=environment or {}, deadline_s=7.0)
    agent = CommandAgent(settings, Access(standing), search_path="/bin:/usr/bin")
    return asyncio.run(agent.run(make_lease(0, TASK.task_id), TASK, session or ToySession(), place))


def test_what_a_program_prints_is_its_answer_unless_it_wrote_one() -> None:
    session = ToySession()
    assert run(Place(stdout=b"it is 41\n"), session=session).end_reason is EndReason.SUBMITTED
    place = Place(stdout=b"thinking aloud")
    place.files[ANSWER_FILE] = b"41"
    run(place, session=session)
    assert session.answers == ["it is 41\n", "41"]


def test_a_program_is_told_its_task_in_files_and_on_its_input() -> None:
    place = Place()
    run(place)
    assert place.files[PROMPT_FILE] == place.calls[0].stdin == b"Be brief.\n\nSay '{folder} {model}'."
    assert [message["role"] for message in json.loads(place.files[TASK_FILE])["messages"]] == ["system", "user"]
    assert place.calls[0].deadline_s == 7.0


def test_a_program_starts_with_address_key_and_filled_in_words(tmp_path: Path) -> None:
    place = Place()
    show = "import json, os, sys; print(json.dumps([sys.argv[1:], dict(os.environ)]))"
    words = ("{prompt}", "x{model}y", "{api_key}", "{openai_base_url}", "{anthropic_base_url}", "{folder}/a", "{other}")
    run(place, command=(sys.executable, "-c", show, *words), environment={"MODEL": "{model}", "OPENAI_API_KEY": "own"})
    launched = subprocess.run(
        [sys.executable, "-c", place.calls[0].program.decode()],
        cwd=tmp_path,
        capture_output=True,
        check=True,
        timeout=30,
    )
    arguments, environment = json.loads(launched.stdout)
    assert arguments == [
        "Be brief.\n\nSay '{folder} {model}'.", "xpolicyy", "key-of-att_0", "http://127.0.0.1:9/v1",
        "http://127.0.0.1:9", f"{tmp_path}/a", "{other}",
    ]  # fmt: skip
    assert (environment["MODEL"], environment["OPENAI_API_KEY"]) == ("policy", "own")
    assert (environment["OPENAI_BASE_URL"], environment["HOME"]) == ("http://127.0.0.1:9/v1", str(tmp_path))
    assert environment["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:9"
    assert environment["ANTHROPIC_API_KEY"] == "key-of-att_0"
    assert environment["STEELYARD_ANSWER"] == f"{tmp_path}/{ANSWER_FILE}"
    assert "PYTEST_CURRENT_TEST" not in environment, "nothing of ours is handed on"


@pytest.mark.parametrize("status", [SandboxStatus.CRASHED, SandboxStatus.MEMORY_LIMIT, SandboxStatus.OUTPUT_LIMIT])
def test_a_program_that_fails_after_it_spoke_is_the_agents_own_doing(status: SandboxStatus) -> None:
    session = ToySession()
    assert run(Place(status), session=session).end_reason is EndReason.ANSWER_CRASHED
    limited = AttemptStanding(num_turns=4, limit=EndReason.MAX_TURNS)
    assert run(Place(status), session=session, standing=limited).end_reason is EndReason.MAX_TURNS
    full = AttemptStanding(limit=EndReason.CONTEXT_FULL)
    assert run(Place(status), session=session, standing=full).end_reason is EndReason.CONTEXT_FULL
    assert session.answers == []


@pytest.mark.parametrize("status", [SandboxStatus.OK, SandboxStatus.CRASHED])
def test_a_failure_of_the_system_is_no_end_of_the_agent(status: SandboxStatus) -> None:
    failed = AttemptStanding(num_turns=1, failure="engine local is gone")
    with pytest.raises(RunError, match="the newest model call of agent failed: engine local is gone"):
        run(Place(status), standing=failed)


def test_a_program_that_never_spoke_is_a_failure_that_shows_its_last_words() -> None:
    with pytest.raises(RunError, match=r"agent must call the policy at least once, but ended \(1\) first: no module"):
        run(Place(SandboxStatus.CRASHED, stderr=b"no module\n"), standing=AttemptStanding())


def test_a_program_that_does_not_end_has_timed_out() -> None:
    with pytest.raises(DeadlineExceeded, match="the end of an agent program"):
        run(Place(SandboxStatus.TIMED_OUT))


def test_repair_takes_the_file_as_the_program_left_it() -> None:
    environment = make_repair({}, EnvironmentServices(run_function=run_in_process))
    session = environment.session(environment.task("repair/train/0"))
    place = Place()
    place.files["solution.py"] = b"def f():\n    return 1\n"
    assert run(place, session=session).end_reason is EndReason.SUBMITTED
    artifact = decode_artifact(session.artifact())
    assert (artifact.source, artifact.submitted) == ("def f():\n    return 1\n", True)


def test_repair_without_its_file_is_not_submitted() -> None:
    environment = make_repair({}, EnvironmentServices(run_function=run_in_process))
    session = environment.session(environment.task("repair/train/0"))
    run(Place(), session=session)
    assert not decode_artifact(session.artifact()).submitted
