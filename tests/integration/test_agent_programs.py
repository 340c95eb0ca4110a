"""Agent programs of other people, unmodified: they get an address and a key, and are trained."""

import asyncio
import itertools
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from steelyard.assembly.samples import trace_samples
from steelyard.cli.main import EXIT_BAD_INPUT, EXIT_DONE, EXIT_RUN_FAILED, main
from steelyard.config import BlobsConfig
from steelyard.coordinator.events import InfraFailed, Scored, StepBegun
from steelyard.run.auditing import audit_run
from steelyard.run.blob_reading import reading_blobs
from steelyard.run.directory import RunDirectory, existing_directory
from steelyard.testing.gateway import ATTEMPT, GatewayWorld
from steelyard.testing.rehearsal import adopting, left_running
from steelyard.testing.small_runs import journal_events, steelyard, write_small_config
from steelyard.testing.tiny_model import write_tiny_model
from steelyard.types import Trace

STOP_DEADLINE_S = 40.0
RUN_DEADLINE_S = 240.0
PROGRAM_DEADLINE_S = 60.0
READ_FILE = "def read_file(name: str) -> str:\n    'Read a file.'\n    return open(name).read()\n"
LLM = ["llm", "prompt", "-m", "gpt-4o-mini", "--functions", READ_FILE, "{prompt}"]
PAI = ["pai", "-m", "anthropic:claude-sonnet-4-5", "{prompt}"]
TOOL_CALL = '<tool_call>{"name": "read_file", "arguments": {"name":  "solution.py"}}</tool_call>'
# An agent of the user's own, written with a framework that speaks Anthropic's dialect.
OWN_AGENT = """
from pydantic_ai import Agent

agent = Agent("anthropic:claude-sonnet-4-5", instructions="Repair it.")


@agent.tool_plain
def read_file(name: str) -> str:
    'Read a file.'
    return open(name).read()
"""


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("policy"))


@pytest.fixture(autouse=True)
def nothing_is_left_running() -> Iterator[None]:
    with adopting():
        yield
        assert left_running(STOP_DEADLINE_S) == []


def write_config(directory: Path, policy: Path, command: list[str]) -> Path:
    harness = {"kind": "command", "command": command, "isolation": "none", "deadline_s": PROGRAM_DEADLINE_S}
    return write_small_config(
        directory,
        policy,
        run={"dir": str(directory / "run")},
        harness=harness,
        model={"max_context_tokens": 1024},
        rollout={"max_turns": 4, "max_concurrent": 2, "max_attempts": 1},
        train={"max_steps": 1},
        admission={"max_policy_lag": 0},
    )  # fmt: skip


def trained_traces(run: RunDirectory) -> list[Trace]:
    (step,) = [event for event in journal_events(run.path) if isinstance(event, StepBegun)]
    with reading_blobs(run, BlobsConfig()) as blobs:
        attempt_ids = dict.fromkeys(sample_id.split("/")[0] for sample_id in step.sample_ids)
        return [blobs.trace(attempt_id)[0] for attempt_id in attempt_ids]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("command", [LLM, PAI], ids=["llm", "pai"])
def test_a_program_is_trained_for_one_step_on_what_was_sampled_for_it(
    tmp_path: Path, policy: Path, command: list[str]
) -> None:
    done = steelyard("train", write_config(tmp_path, policy, command), deadline_s=RUN_DEADLINE_S)
    assert done.returncode == EXIT_DONE, done.stdout + done.stderr
    run = existing_directory(str(tmp_path / "run"))
    traces = trained_traces(run)
    assert len(traces) == 4
    for trace in traces:
        sampled = [list(turn.token_ids) for turn in trace.turns]
        samples = trace_samples(trace, 1.0)
        masked = [token for sample in samples for token in itertools.compress(sample.token_ids, sample.loss_mask)]
        assert masked == [token for tokens in sampled for token in tokens]
        assert len(masked) < sum(len(sample.token_ids) for sample in samples)
    rows = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    (num_loss_tokens,) = [row["num_loss_tokens"] for row in rows if row.get("num_loss_tokens")]
    assert num_loss_tokens == sum(len(turn.token_ids) for trace in traces for turn in trace.turns)
    report = audit_run(run)
    assert report.is_passed, report.lines()


def run_against_script(tmp_path: Path, command: list[str], script: list[str]) -> tuple[GatewayWorld, str]:
    """Start a program against a gateway whose engine says ``script``; the gateway, closed, and what was printed."""
    world = GatewayWorld(tmp_path / "gateway", script)
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "solution.py").write_text("def f():\n    return 41\n")
    (folder / "own_agent.py").write_text(OWN_AGENT)

    async def scenario() -> bytes:
        url = await world.server.start()
        environment = {
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.defpath]),
            "HOME": str(folder), "NO_PROXY": "*", "PYTHONPATH": str(folder),
            "OPENAI_BASE_URL": url, "OPENAI_API_KEY": world.key(),
            "ANTHROPIC_BASE_URL": url.removesuffix("/v1"), "ANTHROPIC_API_KEY": world.key(),
        }  # fmt: skip
        words = [word.replace("{prompt}", "Repair f.") for word in command]
        process = await asyncio.create_subprocess_exec(
            *words, env=environment, cwd=folder, stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        async with asyncio.timeout(PROGRAM_DEADLINE_S):
            printed, errors = await process.communicate()
        assert process.returncode == 0, errors.decode()
        await world.close()
        return printed

    return world, asyncio.run(scenario()).decode()


OWN = ["pai", "--agent", "own_agent:agent", "{prompt}"]


@pytest.mark.parametrize(
    "command",
    [LLM, [*LLM[:-1], "--no-stream", "{prompt}"], OWN, [*OWN[:-1], "--no-stream", "{prompt}"]],
    ids=["llm", "llm whole", "pai", "pai whole"],
)
def test_a_program_that_calls_tools_goes_on_in_one_segment(tmp_path: Path, command: list[str]) -> None:
    world, printed = run_against_script(tmp_path, command, [f"I look.\n{TOOL_CALL}", "It is 41."])
    assert "It is 41." in printed
    turns = world.store.open_turns(ATTEMPT)
    assert [turn.segment_index for turn in turns] == [0, 0]
    assert turns[1].prompt_token_ids[: len(turns[0].prompt_token_ids)] == turns[0].prompt_token_ids
    assert "return 41" in world.gateway.text_of(turns[1].prompt_token_ids)


def test_a_program_that_never_calls_the_policy_is_no_reward(tmp_path: Path, policy: Path) -> None:
    script = "import sys; sys.exit('no such library')"
    done = steelyard("train", write_config(tmp_path, policy, [sys.executable, "-c", script]))
    assert done.returncode == EXIT_RUN_FAILED
    events = journal_events(tmp_path / "run")
    failures = [event for event in events if isinstance(event, InfraFailed)]
    assert failures
    assert all("must call the policy at least once, but ended (1) first: no such library" in f.detail for f in failures)
    assert not any(isinstance(event, Scored) for event in events)


def test_a_program_that_does_not_exist_is_bad_input(
    tmp_path: Path, policy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path, policy, ["no-such-agent", "{prompt}"])
    assert main(["train", str(config)]) == EXIT_BAD_INPUT
    assert (
        "harness.command must begin with a program that can be started, got 'no-such-agent'" in capsys.readouterr().err
    )
    assert not (tmp_path / "run").exists()
