"""A whole run whose journal is in a database: it is killed, goes on, and proves itself."""

from pathlib import Path

import pytest

from steelyard.cli.main import EXIT_BAD_INPUT, EXIT_DONE, EXIT_RUN_FAILED
from steelyard.coordinator import events as e
from steelyard.processes.faults import FaultPlan
from steelyard.testing.postgres import PASSWORD, PostgresServer
from steelyard.testing.rehearsal import adopting, left_running, rehearse
from steelyard.testing.small_runs import journal_events, steelyard, write_small_config
from steelyard.testing.tiny_model import write_tiny_model

LAUNCH_DEADLINE_S = 100.0
KILLED = -9


@pytest.mark.timeout(400)
def test_a_run_on_postgres_that_is_killed_goes_on_and_is_whole_in_the_end(
    tmp_path: Path, postgres: PostgresServer
) -> None:
    run = tmp_path / "run"
    journal = {"kind": "postgres", "url": postgres.new_database(), "name": "small", "lease_s": 3}
    policy = write_tiny_model(tmp_path / "policy")
    config = write_small_config(tmp_path, policy, run={"dir": str(run)}, journal=journal)
    plan = FaultPlan(process="control", point="event:STEP_BEGUN:after", occurrence=2)
    with adopting():
        died = rehearse(config, tmp_path, plan, is_resume=False, deadline_s=LAUNCH_DEADLINE_S)
        assert died.returncode == KILLED, died.stderr
        assert left_running(LAUNCH_DEADLINE_S) == []
    waits = steelyard("doctor", run)
    assert "step 2 waits for the trainer" in waits.stdout, waits.stderr + waits.stdout
    ended = rehearse(run, tmp_path, None, is_resume=True, deadline_s=LAUNCH_DEADLINE_S)
    assert ended.returncode == EXIT_DONE, ended.stderr
    audited = steelyard("audit", run)
    assert audited.returncode == EXIT_DONE, audited.stdout
    assert "audit passed" in audited.stdout
    assert "the run is finished" in steelyard("doctor", run).stdout
    assert "rollouts; the last" in steelyard("show", run).stdout
    assert "is finished" in steelyard("train", "--resume", run).stdout
    assert not (run / "journal.sqlite").exists()
    events = journal_events(run)
    assert sum(isinstance(event, e.RunResumed) for event in events) == 1
    assert isinstance(events[-1], e.RunFinished)
    again = steelyard("train", config, f"run.dir={tmp_path / 'other'}")
    assert again.returncode == EXIT_BAD_INPUT
    assert (
        f"journal.name must be new for a new run, got small, whose journal holds {len(events)} events" in again.stderr
    )


def test_a_database_out_of_reach_ends_a_run_with_one_line(tmp_path: Path) -> None:
    policy = write_tiny_model(tmp_path / "policy")
    journal = {"kind": "postgres", "url": f"postgresql://me@/runs?host={tmp_path}", "name": "small"}
    config = write_small_config(tmp_path, policy, journal=journal)
    refused = steelyard("train", config, f"run.dir={tmp_path / 'run'}")
    assert refused.returncode == EXIT_RUN_FAILED
    assert refused.stderr.startswith("steelyard: journal small: the database of journal.url cannot be reached: ")
    assert refused.stderr.count("\n") == 1


def test_a_password_in_the_url_is_refused_and_shown_nowhere(tmp_path: Path) -> None:
    url = f"journal.url=postgresql://me:{PASSWORD}@/runs"
    config = tmp_path / "run.yaml"
    config.write_text("{}")
    refused = steelyard("train", config, "journal.kind=postgres", "journal.name=small", url, "--dry-run")
    assert refused.returncode == EXIT_BAD_INPUT
    assert "journal.url must not hold a password" in refused.stderr
    assert PASSWORD not in refused.stdout + refused.stderr
