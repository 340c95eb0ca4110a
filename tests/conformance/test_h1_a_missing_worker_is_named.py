"""H1: a buffer stood at 125 of 128 for a day, and nothing said why.

Waiting for a batch has a deadline. Its error names the missing rollouts, who holds them and since when; ``doctor`` says
the same at any time before.
"""

import asyncio
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from steelyard import config_file
from steelyard.cli.main import main
from steelyard.config import Config
from steelyard.coordinator.journal.sqlite import SqliteJournal
from steelyard.errors import DeadlineExceeded
from steelyard.testing.manual_clock import settle
from steelyard.testing.run_rig import WORKER, RunRig, make_settings
from steelyard.types import Lease

LOST_WORKER = "wrk_lost"
GROUP_SIZE, NUM_GROUPS = 8, 16
DEADLINE_S = 90.0


async def all_but_three(rig: RunRig) -> list[Lease]:
    """128 rollouts are leased; one worker never returns its three, and goes on renewing them. The three."""
    await rig.start()
    lost = list(await rig.coordinator.lease(LOST_WORKER, 3, 0.0))
    assert await rig.run_attempts(1000) == 125
    assert await rig.score_all() == 125
    return lost


def big_rig(journal: SqliteJournal | None = None) -> RunRig:
    settings = make_settings(lag=0, groups_per_batch=NUM_GROUPS, group_size=GROUP_SIZE, max_tail_wait_s=1e6)
    return RunRig(settings, journal=journal)


def test_h1_the_wait_ends_at_its_deadline_and_names_the_three_that_are_missing() -> None:
    async def scenario() -> None:
        rig = big_rig()
        lost = await all_but_three(rig)
        waiting = asyncio.create_task(rig.coordinator.next_batch(0, DEADLINE_S))
        for _ in range(9):
            await settle()
            assert not waiting.done()
            rig.clock.advance(DEADLINE_S / 9)
            assert await rig.coordinator.heartbeat(LOST_WORKER, tuple(lease.attempt_id for lease in lost)) == ()
        with pytest.raises(DeadlineExceeded) as caught:
            await asyncio.wait_for(waiting, 10)
        error = caught.value
        assert error.what == "the batch of step 0"
        assert error.waited_s == DEADLINE_S
        assert len(error.culprits) == 3
        for lease, culprit in zip(lost, sorted(error.culprits, key=_in_order_of(lost)), strict=True):
            assert lease.rollout_id in culprit
            assert lease.attempt_id in culprit
            assert f"waits for worker {LOST_WORKER}" in culprit
            assert f"since {DEADLINE_S:.1f} s" in culprit
            assert culprit in str(error), "the message says it, not only its fields"
        await rig.coordinator.close()

    asyncio.run(scenario())


def _in_order_of(lost: list[Lease]) -> Callable[[str], int]:
    order = {lease.rollout_id: index for index, lease in enumerate(lost)}
    return lambda culprit: order[re.findall(r"rollout (\S+)", culprit)[0]]


def test_h1_doctor_names_them_before_the_deadline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.yaml").write_text(config_file.to_yaml(Config()), encoding="utf-8")

    async def scenario() -> list[Lease]:
        rig = big_rig(journal=SqliteJournal(tmp_path / "journal.sqlite"))
        lost = await all_but_three(rig)
        await rig.coordinator.crash()
        await rig.journal.close()
        return lost

    lost = asyncio.run(scenario())
    assert main(["doctor", str(tmp_path)]) == 0
    waits = [line for line in capsys.readouterr().out.splitlines() if LOST_WORKER in line]
    assert len(waits) == 3
    for lease in lost:
        (line,) = [line for line in waits if lease.rollout_id in line]
        assert lease.attempt_id in line
        assert " since " in line


def test_h1_a_worker_that_does_not_even_renew_loses_its_attempts_and_the_batch_completes() -> None:
    async def scenario() -> None:
        rig = big_rig()
        lost = await all_but_three(rig)
        waiting = asyncio.create_task(rig.coordinator.next_batch(0, 10 * rig.settings.lease_s))
        await settle()
        rig.clock.advance(rig.settings.lease_s + rig.settings.max_backoff_s)
        await settle()
        assert await rig.run_attempts() == 0, "retries wait for a moment"
        rig.clock.advance(rig.settings.max_backoff_s)
        leases = await rig.coordinator.lease(WORKER, 10, 0.0)
        assert {(lease.rollout_id, lease.attempt_number) for lease in leases} == {(one.rollout_id, 2) for one in lost}
        for lease in leases:
            await rig.coordinator.artifact_ready(rig.seal(lease))
        await rig.score_all()
        plan = await asyncio.wait_for(waiting, 10)
        assert len(plan.members) == NUM_GROUPS * GROUP_SIZE
        await rig.coordinator.close()

    asyncio.run(scenario())
