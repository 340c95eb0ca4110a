"""Agent programs as real processes, against a gateway over HTTP."""

import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from steelyard import config_file
from steelyard.config import Config
from steelyard.errors import ConfigError, DeadlineExceeded, Refused, RunError
from steelyard.harness.base import Agent
from steelyard.run.adapters import LocalAccess
from steelyard.run.harnesses import attempt_deadline_s, check_harness, make_agent, open_places, place_settings
from steelyard.testing.gateway import ATTEMPT, GatewayWorld, Say, binding
from steelyard.testing.harness import make_lease
from steelyard.types import EndReason, FinishReason, Lease, Message, Task

TASK = Task(
    task_id="toy/train/0",
    environment="toy",
    environment_version="1",
    split="train",
    index=0,
    messages=(Message(role="user", content="Say forty."),),
    tools=(),
)
# The smallest agent program: one model call, no library.
ASK = """
import json, os, pathlib, urllib.request
def ask(text):
    body = {"model": "m", "messages": [{"role": "user", "content": text}]}
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"})
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
"""
LEAVE_A_CHILD = (
    "\nimport subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {sleep!r}], start_new_session=True)\n"
)


class ToySession:
    """Keeps the answer."""

    def __init__(self) -> None:
        self.answers: list[str] = []

    files: dict[str, bytes] = {}  # noqa: RUF012 (the protocol's name)

    async def call(self, sandbox: Any, call: object) -> Any: ...
    def no_call(self, message: Message) -> Any: ...
    def turn_ended(self) -> None: ...
    def artifact(self) -> bytes:
        return b""

    async def submit(self, sandbox: Any, answer: str) -> None:
        self.answers.append(answer)


def config_of(program: str, deadline_s: float = 30.0, **harness: Any) -> Config:
    tree = {
        "kind": "command",
        "command": [sys.executable, "-c", program, "{prompt}"],
        "isolation": "none",
        "deadline_s": deadline_s,
        **harness,
    }
    return config_file.from_tree({"harness": tree, "sandbox": {"num_warm": 1}})


Scene = Callable[[Agent, Any, GatewayWorld], Awaitable[None]]


def play(tmp_path: Path, config: Config, script: list[Say | str], scene: Scene, max_turns: int | None = None) -> None:
    world = GatewayWorld(tmp_path / "gateway", script, bindings={ATTEMPT: binding(max_turns=max_turns)})

    async def whole() -> None:
        url = await world.server.start()
        agent = make_agent(config, LocalAccess(world.recorder, world.directory, world.keys, url))
        assert agent is not None
        pool = await open_places(config, tmp_path / "places")
        try:
            place = await pool.acquire(ATTEMPT, 30.0)
            await scene(agent, place, world)
            await place.close()
        finally:
            await pool.close()
            await world.close()

    asyncio.run(whole())


def lease() -> Lease:
    made = make_lease(0, TASK.task_id)
    return type(made)(**{**{name: getattr(made, name) for name in made.__struct_fields__}, "attempt_id": ATTEMPT})


def test_a_program_with_address_and_key_is_recorded_and_answers(tmp_path: Path) -> None:
    config = config_of(ASK + "import sys\nprint(ask(sys.argv[1]))")

    async def scene(agent: Agent, place: Any, world: GatewayWorld) -> None:
        session = ToySession()
        result = await agent.run(lease(), TASK, session, place)
        assert (result.end_reason, session.answers) == (EndReason.SUBMITTED, ["forty\n"])
        (turn,) = world.store.open_turns(ATTEMPT)
        assert "Say forty." in world.gateway.text_of(turn.prompt_token_ids)

    play(tmp_path, config, ["forty"], scene)


def test_a_program_that_asks_too_often_is_stopped_by_the_limit_on_turns(tmp_path: Path) -> None:
    config = config_of(ASK + "while True: ask('more')")

    async def scene(agent: Agent, place: Any, world: GatewayWorld) -> None:
        result = await agent.run(lease(), TASK, ToySession(), place)
        assert result.end_reason is EndReason.MAX_TURNS
        assert len(world.store.open_turns(ATTEMPT)) == 2

    play(tmp_path, config, ["a", "b", "c"], scene, max_turns=2)


def test_a_failing_engine_is_the_systems_fault_even_where_the_program_ends_well(tmp_path: Path) -> None:
    config = config_of(ASK + "ask('x')\ntry: ask('y')\nexcept OSError: print('I gave up')")

    async def scene(agent: Agent, place: Any, world: GatewayWorld) -> None:
        with pytest.raises(RunError, match=r"the newest model call of .* failed: engine local .* engine_error"):
            await agent.run(lease(), TASK, ToySession(), place)

    play(tmp_path, config, ["a", Say(text="", finish_reason=FinishReason.ENGINE_ERROR)], scene)


def test_a_program_is_ended_at_its_deadline_with_all_that_it_started(tmp_path: Path) -> None:
    sleep = f"import time; time.sleep(600)  # {tmp_path}"
    config = config_of(ASK + LEAVE_A_CHILD.format(sleep=sleep) + "ask('x')\nimport time\ntime.sleep(600)", 5.0)

    async def scene(agent: Agent, place: Any, world: GatewayWorld) -> None:
        with pytest.raises(DeadlineExceeded, match="the end of an agent program"):
            await agent.run(lease(), TASK, ToySession(), place)
        command_lines = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
        assert [line for line in command_lines if sleep in line] == []

    play(tmp_path, config, ["a"], scene)


def test_a_child_that_a_program_leaves_behind_is_ended(tmp_path: Path) -> None:
    sleep = f"import time; time.sleep(600)  # {tmp_path}"
    config = config_of(ASK + LEAVE_A_CHILD.format(sleep=sleep) + "print(ask('x'))")

    async def scene(agent: Agent, place: Any, world: GatewayWorld) -> None:
        assert (await agent.run(lease(), TASK, ToySession(), place)).end_reason is EndReason.SUBMITTED
        command_lines = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
        assert [line for line in command_lines if sleep in line] == []

    play(tmp_path, config, ["a"], scene)


def test_a_dead_attempt_gets_no_key(tmp_path: Path) -> None:
    async def scene(agent: Agent, place: Any, world: GatewayWorld) -> None:
        world.directory.bindings.clear()
        with pytest.raises(Refused, match="not alive"):
            await agent.run(lease(), TASK, ToySession(), place)

    play(tmp_path, config_of("pass"), [], scene)


def test_the_built_in_loop_keeps_its_sandbox_and_its_deadline() -> None:
    config = config_file.from_tree({})
    assert place_settings(config) is config.sandbox
    assert attempt_deadline_s(config, 99.0) == 99.0


def test_a_program_has_room_of_its_own_and_leaves_the_graders_sandbox_alone() -> None:
    config = config_of("pass", 100.0, memory_bytes=1 << 33, max_open_files=99)
    places = place_settings(config)
    assert (places.kind, places.memory_bytes, places.max_open_files) == ("process", 1 << 33, 99)
    assert config.sandbox.kind == "bubblewrap"
    assert attempt_deadline_s(config, 9.0) > 100.0


def test_a_program_that_is_not_there_is_named_before_the_start() -> None:
    with pytest.raises(ConfigError, match=r"harness\.command must begin with a program .* got 'no-such-program'"):
        check_harness(config_of("pass", command=["no-such-program"]))
    check_harness(config_of("pass"))


@pytest.mark.parametrize(
    ("harness", "message"),
    [
        ({"kind": "command", "isolation": "none"}, "harness.command must name a program for harness.kind command"),
        ({"kind": "command", "command": ["x"]}, "harness.isolation must be none for harness.kind command"),
        ({"command": ["x"]}, "harness.command is only for harness.kind command, got chat_loop"),
        ({"deadline_s": 0}, "harness.deadline_s must be > 0, got 0"),
        ({"max_open_files": 3}, "harness.max_open_files must be >= 16, got 3"),
    ],
)
def test_a_harness_that_cannot_work_is_bad_input(harness: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_file.from_tree({"harness": harness})
    assert message in str(caught.value)
