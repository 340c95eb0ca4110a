"""What a run did, read from its directory alone; and a simulation of it, as fast as it was."""

import asyncio
from pathlib import Path

import pytest

from steelyard.errors import InputError
from steelyard.run.directory import RunDirectory
from steelyard.run.observed import observe
from steelyard.testing.observed_runs import END_S, START_S, TOOL_S, TRAIN_S, write_run


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    return asyncio.run(write_run(tmp_path / "run"))


def test_work_and_times_of_a_run_are_read_from_its_stores(directory: RunDirectory) -> None:
    observed = observe(directory)
    assert [step.places for step in observed.steps] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    group = observed.workload.groups[0]
    assert len(group.trajectories) == 2
    first, second = group.trajectories[0].turns
    assert (first.new_prompt_tokens, first.generated_tokens) == (30, 10)
    assert (second.new_prompt_tokens, second.generated_tokens) == (5, 10)
    assert first.tool_s == pytest.approx(TOOL_S)
    assert second.tool_s == 0.0
    assert observed.start_s == pytest.approx(START_S)
    assert observed.end_s == pytest.approx(END_S)
    assert all(step.ended_at_s - step.begun_at_s == pytest.approx(TRAIN_S) for step in observed.steps)


def test_a_run_without_a_step_is_refused(tmp_path: Path) -> None:
    directory = asyncio.run(write_run(tmp_path / "run", num_steps=0))
    with pytest.raises(InputError, match="RUN must have trained at least one step"):
        observe(directory)
