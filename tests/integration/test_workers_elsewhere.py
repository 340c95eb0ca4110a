"""A run without harness and graders of its own: other processes do all of it over HTTP, and one is killed."""

from pathlib import Path

import pytest

from steelyard.coordinator import events as e
from steelyard.run.auditing import audit_run
from steelyard.run.directory import existing_directory
from steelyard.testing.joined_runs import JoinedRun, attempts_held
from steelyard.testing.s3_server import S3Server
from steelyard.testing.small_runs import free_port, journal_events
from steelyard.testing.tiny_model import write_tiny_model

STEPS = 12
LEASE_S = 3.0


@pytest.mark.timeout(300)
def test_two_workers_and_a_scorer_do_all_work_of_a_run_and_one_is_killed_in_the_middle(tmp_path: Path) -> None:
    policy = write_tiny_model(tmp_path / "policy")
    with JoinedRun(tmp_path, policy, rollout={"lease_s": LEASE_S}, train={"max_steps": STEPS}) as joined:
        killed: set[str] = set()

        def on_line(line: str) -> None:
            if " join at " in line:
                joined.worker("w1")
                joined.scorer("s1")
                # The other one comes when this one works: it must not do the whole run before this one has started.
                joined.until(lambda events: bool(attempts_held(events, "w1")))
                joined.worker("w2")
                killed.update(joined.kill_at_work("w1"))

        assert joined.train(on_line) == 0, joined.errors("train")
        for name in ("w2", "s1"):
            assert joined.stop(name) == 0, joined.errors(name)
            assert "told to stop" in joined.said(name)
            assert "stopped" in joined.said(name)
        events = journal_events(joined.run)
    report = audit_run(existing_directory(str(joined.run)))
    assert report.is_passed, "\n".join(report.lines())
    leases = [event for event in events if isinstance(event, e.Leased)]
    assert {event.worker_id for event in leases} == {"w1", "w2"}
    expired = {event.attempt_id for event in events if isinstance(event, e.LeaseExpired)}
    handed_in = {event.report.attempt_id for event in events if isinstance(event, e.ArtifactReady)}
    assert killed, "it held attempts when it died"
    # What it had sent when it was stopped may still have arrived.
    assert killed - handed_in <= expired
    again = {event.rollout_id for event in leases if event.attempt_id in killed - handed_in}
    by_other = {event.rollout_id for event in leases if event.worker_id == "w2" and event.attempt_number > 1}
    assert again <= by_other
    assert sum(isinstance(event, e.StepBegun) for event in events) == STEPS
    assert isinstance(events[-1], e.RunFinished)


@pytest.mark.timeout(300)
def test_workers_outlive_a_control_process_that_is_killed_and_go_on_when_the_run_is_resumed(tmp_path: Path) -> None:
    policy = write_tiny_model(tmp_path / "policy")
    ports = {"coordinator": {"port": free_port()}, "gateway": {"port": free_port()}}
    with JoinedRun(tmp_path, policy, train={"max_steps": STEPS}, **ports) as joined:

        def kill_at_work(line: str) -> None:
            if " join at " in line:
                joined.worker("w1")
                joined.scorer("s1")
                joined.until(lambda events: any(isinstance(event, e.StepBegun) for event in events))
                joined.processes["train"].kill()

        assert joined.train(kill_at_work) == -9
        assert joined.train(lambda _: None, resume=True) == 0, joined.errors("train")
        for name in ("w1", "s1"):
            assert joined.stop(name) == 0, joined.errors(name)
            assert joined.said(name).count("joined") == 1, "it is the process that had joined before the kill"
        events = journal_events(joined.run)
    report = audit_run(existing_directory(str(joined.run)))
    assert report.is_passed, "\n".join(report.lines())
    (resumed,) = [index for index, event in enumerate(events) if isinstance(event, e.RunResumed)]
    before, after = events[:resumed], events[resumed:]
    assert any(isinstance(event, e.StepBegun) for event in before)
    assert {event.worker_id for event in after if isinstance(event, e.Leased)} == {"w1"}
    assert isinstance(events[-1], e.RunFinished)


@pytest.mark.timeout(300)
def test_a_coordinator_that_stays_away_is_given_up_with_exit_code_3(tmp_path: Path) -> None:
    policy = write_tiny_model(tmp_path / "policy")
    with JoinedRun(tmp_path, policy) as joined:

        def kill(line: str) -> None:
            if " join at " in line:
                joined.worker("w1", "--lost-after", "1")
                joined.scorer("s1", "--lost-after", "1")
                joined.until(lambda events: any(isinstance(event, e.Scored) for event in events))
                joined.processes["train"].kill()

        assert joined.train(kill) == -9
        for name in ("w1", "s1"):
            assert joined.processes[name].wait(100) == 3
            assert "steelyard: the coordinator must answer within 1 s" in joined.errors(name)
            assert "Traceback" not in joined.errors(name)


@pytest.mark.timeout(300)
def test_workers_and_scorers_find_the_artifacts_of_a_run_in_an_object_store(
    tmp_path: Path, s3: S3Server, bucket: str
) -> None:
    policy = write_tiny_model(tmp_path / "policy")
    blobs = {"url": f"s3://{bucket}/runs", "endpoint_url": s3.url, "region": "us-east-1"}
    with JoinedRun(tmp_path, policy, blobs=blobs, train={"max_steps": 2}) as joined:

        def on_line(line: str) -> None:
            if " join at " in line:
                joined.worker("w1")
                joined.scorer("s1")

        assert joined.train(on_line) == 0, joined.errors("train")
        assert [joined.stop(name) for name in ("w1", "s1")] == [0, 0]
    assert any("/artifacts/" in key for key in s3.keys(bucket))
    assert not any(path.is_file() for path in (joined.run / "artifacts").rglob("*"))
    report = audit_run(existing_directory(str(joined.run)))
    assert report.is_passed, "\n".join(report.lines())
