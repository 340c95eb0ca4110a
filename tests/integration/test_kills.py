"""Coordinator, workers, scorers and a trainer as real processes over HTTP: ten are killed or stopped at random."""

from pathlib import Path

import pytest

from steelyard.testing.kills.rig import KillPlan, KillRig, Verdict, postgres_plan
from steelyard.testing.postgres import PostgresServer

NUM_FAULTS = 10
SEED = 21
"""Kills and stops the coordinator and workers, kills the trainer and a scorer."""


@pytest.mark.timeout(300)
def test_whoever_is_killed_or_stopped_the_audit_passes_and_nothing_acknowledged_is_lost(tmp_path: Path) -> None:
    with KillRig(tmp_path, SEED, KillPlan()) as rig:
        check(rig.run(NUM_FAULTS))


@pytest.mark.timeout(300)
def test_the_same_holds_on_postgres_where_a_standby_takes_the_place_of_the_coordinator(
    tmp_path: Path, postgres: PostgresServer
) -> None:
    with KillRig(tmp_path, SEED, postgres_plan(postgres.new_database())) as rig:
        check(rig.run(NUM_FAULTS))


def check(verdict: Verdict) -> None:
    assert verdict.failures == ()
    assert verdict.num_audits_passed == verdict.num_faults == NUM_FAULTS
    assert verdict.num_trained > 0
    assert {fault.split()[0] for fault in verdict.faults} >= {"coordinator", "worker", "scorer", "trainer"}
    assert {fault.split()[1] for fault in verdict.faults} >= {"killed", "stopped"}
