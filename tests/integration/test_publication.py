"""Whole runs whose weights change: trainers and replicas that die are replaced; tokens of several versions."""

from pathlib import Path
from typing import Any

import pytest

from steelyard.cli.main import EXIT_DONE
from steelyard.coordinator import events as e
from steelyard.processes.faults import FaultPlan
from steelyard.run.auditing import audit_run_deeply
from steelyard.run.directory import existing_directory
from steelyard.testing.rehearsal import rehearse
from steelyard.testing.small_runs import journal_events, write_small_config
from steelyard.testing.tiny_model import write_tiny_model
from steelyard.weights.publisher import FAULT_POINTS

DEADLINE_S = 600.0
TRAINER_POINTS = (
    "gradients_ready",
    "stepped",
    "reply:trainer.train_step",
    *(f"publish:{point}" for point in FAULT_POINTS),
    "reply:trainer.publish",
)
"""From the gradient to the version's event, in order: each of them is the last thing that some trainer does."""


def chain(process: str, points: tuple[str, ...]) -> FaultPlan | None:
    """Each process dies at the point of its turn; the last one lives."""
    plan = None
    for point in reversed(points):
        plan = FaultPlan(process=process, point=point, then=plan)
    return plan


def carry_through(home: Path, fault: FaultPlan | None, **sections: dict[str, Any]) -> list[e.AnyEvent]:
    """A run that must come to its end by itself and pass its audit; the events of its journal."""
    run = home / "run"
    every: dict[str, dict[str, Any]] = {"run": {"dir": str(run)}, "algorithm": {"entropy_coef": 0.01}, **sections}
    config = write_small_config(home, write_tiny_model(home / "policy"), **every)
    ended = rehearse(config, home, fault, is_resume=False, deadline_s=DEADLINE_S)
    assert ended.returncode == EXIT_DONE, ended.stderr
    report = audit_run_deeply(existing_directory(str(run)), seed=0, num_attempts=4)
    assert report.is_passed, "\n".join(report.lines())
    return journal_events(run)


@pytest.mark.timeout(900)
def test_a_trainer_may_die_at_every_point_of_a_publication_and_the_replicas_serve_on(tmp_path: Path) -> None:
    events = carry_through(
        tmp_path,
        chain("trainer", TRAINER_POINTS),
        runtime={"max_restarts": len(TRAINER_POINTS)},
        train={"max_steps": 2, "checkpoint_every": 2},
    )
    published = [event for event in events if isinstance(event, e.VersionPublished)]
    assert [event.step for event in published] == [0, 1, 2]
    assert not any(isinstance(event, e.ReplicaDown | e.VersionOrphaned | e.RunResumed) for event in events)


@pytest.mark.timeout(900)
def test_a_replica_may_die_while_it_samples_and_while_it_loads(tmp_path: Path) -> None:
    points = ("call:engine.generate", "reply:engine.load", "call:engine.load")
    events = carry_through(tmp_path, chain("replica-0", points), train={"max_steps": 2})
    kinds = [e.kind_of(event) for event in events]
    assert kinds.count("REPLICA_DOWN") == len(points)
    assert kinds.count("REPLICA_STARTED") == 1 + len(points)
    failed = [event for event in events if isinstance(event, e.InfraFailed)]
    assert failed, "what it was sampling is sampled again"
    assert "RUN_RESUMED" not in kinds


@pytest.mark.timeout(900)
def test_a_segmented_run_trains_on_trajectories_of_several_versions(tmp_path: Path) -> None:
    events = carry_through(
        tmp_path,
        None,
        weights={"mode": "segmented"},
        rollout={"max_turns": 4, "max_tokens": 48, "max_concurrent": 4},
        admission={"max_policy_lag": 3},
        train={"max_steps": 5},
        eval={"num_tasks": 2, "greedy": False},
    )
    trained = {
        sample.split("/")[0] for event in events if isinstance(event, e.StepBegun) for sample in event.sample_ids
    }
    traces = [event.report.trace for event in events if isinstance(event, e.ArtifactReady)]
    spanning = [trace for trace in traces if trace.oldest_version < trace.newest_version]
    assert {trace.attempt_id for trace in spanning} & trained
    assert any(isinstance(event, e.ReplicaLoading) and event.in_place for event in events)
