"""A worker as a process of its own: refused at the start where it does not fit, and stopped politely."""

import asyncio
import signal
from pathlib import Path
from typing import Any

import msgspec
import pytest

from steelyard.config import EnvironmentConfig
from steelyard.coordinator.capability import Role
from steelyard.coordinator.effects import AttemptBegan, AttemptEnded
from steelyard.errors import DeadlineExceeded, InputError
from steelyard.run.remote_worker import WorkerOptions, run_worker
from steelyard.testing.joined_rig import CONFIG, JoinedRig, play_joined


def options(joined: JoinedRig, **changes: Any) -> WorkerOptions:
    made = WorkerOptions(
        coordinators=(joined.coordinator_url,),
        gateway=joined.gateway_url,
        key_file=joined.key_file(Role.WORKER),
        home=str(joined.home),
        lost_after_s=20.0,
        drain_s=5.0,
    )
    return msgspec.structs.replace(made, **changes)


def test_a_worker_leases_until_it_is_told_to_stop_and_says_what_it_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    joined = JoinedRig(tmp_path)

    async def scene() -> None:
        ended = joined.heard(AttemptEnded)
        working = asyncio.create_task(run_worker(CONFIG, options(joined)))
        await ended.wait()  # the tasks of the rig are none of this environment: each attempt fails honestly
        signal.raise_signal(signal.SIGTERM)
        await working

    play_joined(joined, scene)
    lines = capsys.readouterr().out.splitlines()
    assert all(line.startswith("worker one: ") for line in lines)
    assert "joined: environment repair 1, 64 attempts at a time" in lines[2]
    assert "told to stop; 0 attempts handed in" in lines[-2]
    assert lines[-1] == "worker one: stopped"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"environment": "chess"}, "environment.kind must be chess as in the run, got repair"),
        ({"environment_version": "99"}, "the environment's version must be 99 as in the run, got 1"),
        ({"verifier_version": "v9"}, "the verifier's version must be v9 as in the run, got repair"),
        ({"artifacts_url": "file:///nowhere/at/all"}, "--artifacts must be a folder that this machine shares"),
        ({"artifacts_url": "ftp://there"}, "--artifacts: .*must be s3://bucket/prefix or file:///folder"),
    ],
)
def test_what_does_not_fit_the_run_is_refused_before_the_first_lease(
    tmp_path: Path, change: dict[str, str], message: str
) -> None:
    joined = JoinedRig(tmp_path)
    joined.describe(**change)

    async def scene() -> None:
        with pytest.raises(InputError, match=message):
            await run_worker(CONFIG, options(joined))
        assert not any(rollout.attempt_id for rollout in joined.rig.coordinator.state.rollouts.values())

    play_joined(joined, scene)


def test_other_options_of_the_environment_are_refused(tmp_path: Path) -> None:
    joined = JoinedRig(tmp_path)
    other = msgspec.structs.replace(CONFIG, environment=EnvironmentConfig(options={"prompt": "terse"}))

    async def scene() -> None:
        with pytest.raises(InputError, match=r"environment\.options"):
            await run_worker(other, options(joined))

    play_joined(joined, scene)


def test_a_key_of_another_run_or_role_and_an_expired_one_are_refused(tmp_path: Path) -> None:
    joined = JoinedRig(tmp_path)
    strange = tmp_path / "strange.key"
    strange.write_text(joined.gateway.worker_key("one")[:-4] + "AAAA")

    async def scene() -> None:
        expired = joined.key_file(Role.WORKER, "late", valid_s=-5.0)
        for key_file in (str(strange), expired, joined.key_file(Role.SCORER)):
            with pytest.raises(InputError, match="--key-file"):
                await run_worker(CONFIG, options(joined, key_file=key_file))

    play_joined(joined, scene)


def test_a_coordinator_that_is_not_there_is_tried_until_the_deadline(tmp_path: Path) -> None:
    joined = JoinedRig(tmp_path)

    async def scene() -> None:
        with pytest.raises(DeadlineExceeded, match=r"an answer of the coordinator .*http://127\.0\.0\.1:1"):
            await run_worker(CONFIG, options(joined, coordinators=("http://127.0.0.1:1",), lost_after_s=0.3))

    play_joined(joined, scene)


def test_a_standby_that_answers_is_as_good_and_a_stop_ends_the_wait_for_one(tmp_path: Path) -> None:
    joined = JoinedRig(tmp_path)

    async def scene() -> None:
        several = ("http://127.0.0.1:1", joined.coordinator_url)
        begun = joined.heard(AttemptBegan)
        working = asyncio.create_task(run_worker(CONFIG, options(joined, coordinators=several)))
        await begun.wait()
        signal.raise_signal(signal.SIGTERM)
        await working
        waiting = asyncio.create_task(run_worker(CONFIG, options(joined, coordinators=several[:1])))
        await asyncio.sleep(0)
        signal.raise_signal(signal.SIGTERM)
        await waiting

    play_joined(joined, scene)
