"""A scorer as a process of its own: graders of its own, jobs over HTTP, stopped politely."""

import asyncio
import signal
from pathlib import Path
from typing import Any

import msgspec
import pytest

from steelyard.coordinator.capability import Role
from steelyard.coordinator.effects import WorkWaits
from steelyard.errors import InputError
from steelyard.run.remote_scorer import ScorerOptions, run_scorer
from steelyard.testing.joined_rig import CONFIG, JoinedRig, play_joined


def options(joined: JoinedRig, **changes: Any) -> ScorerOptions:
    made = ScorerOptions(
        coordinators=(joined.coordinator_url,),
        key_file=joined.key_file(Role.SCORER),
        home=str(joined.home),
        lost_after_s=20.0,
        num_processes=1,
    )
    return msgspec.structs.replace(made, **changes)


def test_a_scorer_takes_jobs_says_which_artifacts_are_lost_and_stops_when_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    joined = JoinedRig(tmp_path)

    async def scene() -> None:
        assert await joined.rig.run_attempts(1) == 1  # its artifact is in the rig's memory, out of reach
        offered_again = joined.heard(WorkWaits)
        working = asyncio.create_task(run_scorer(CONFIG, options(joined)))
        await offered_again.wait()
        assert joined.rig.coordinator.counters.read()["attempt_failed.artifact_lost"] == 1
        signal.raise_signal(signal.SIGINT)
        await working

    play_joined(joined, scene)
    lines = capsys.readouterr().out.splitlines()
    assert "scorer one: joined: verifier repair-1" in lines[2]
    assert lines[-1] == "scorer one: stopped"


def test_an_unlike_verifier_and_a_workers_key_are_refused(tmp_path: Path) -> None:
    joined = JoinedRig(tmp_path)
    joined.describe(verifier_version="v9")

    async def scene() -> None:
        with pytest.raises(InputError, match="the verifier's version must be v9 as in the run"):
            await run_scorer(CONFIG, options(joined))
        with pytest.raises(InputError, match="must hold the key of a scorer, got that of a worker"):
            await run_scorer(CONFIG, options(joined, key_file=joined.key_file(Role.WORKER)))

    play_joined(joined, scene)
