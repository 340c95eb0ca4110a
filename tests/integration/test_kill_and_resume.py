"""Twenty deaths at seeded moments of real runs; after each the run goes on, and its end proves itself."""

import functools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from steelyard.cli.main import EXIT_DONE, EXIT_RUN_FAILED
from steelyard.coordinator import events as e
from steelyard.processes.faults import FaultPlan
from steelyard.run.auditing import audit_run
from steelyard.run.directory import existing_directory
from steelyard.testing.rehearsal import adopting, left_running, rehearse
from steelyard.testing.small_runs import journal_events, write_small_config
from steelyard.testing.tiny_model import write_tiny_model

SEED = 64
"""Draws deaths between a publication and its event and pin, a step and its checkpoint, the last work and the end."""

NUM_CHAINS = 4
KILLS_A_CHAIN = 5
MAX_STEPS = 4
LAUNCH_DEADLINE_S = 90.0
KILLED = -9

EVENTS_IN_ORDER = (
    "RUN_STARTED", "VERSION_PUBLISHED", "VERSION_PINNED", "VERSION_LOADED", "VERSION_READY", "GROUP_ADMITTED",
    "RUN_RESUMED", "LEASED", "RUNNING", "ARTIFACT_READY", "SCORED", "ACCEPTED", "GROUP_COMPLETED", "STEP_BEGUN",
    "VERSION_RELEASED", "CHECKPOINTED", "VERSION_DELETED", "BATCH_DELETED", "GROUP_EVALUATED", "VERSION_UNPINNED",
    "RUN_FINISHED",
)  # fmt: skip
"""Kinds that every run commits, in the order of their first time; RUN_RESUMED can be met from the second life on."""

NUM_EVENTS = 15
DURING_TRAINING = float(EVENTS_IN_ORDER.index("STEP_BEGUN"))
OTHERS: tuple[tuple[str, bool, tuple[str, ...]], ...] = (
    ("trainer", False, ("gradients_ready", "stepped", "publish:weights_written", "optimizer_written")),
    ("trainer", True, ("publish:manifest_written", "publish:renamed", "before_rename", "weights_written")),
    ("replica-0", False, ("call:engine.generate", "reply:engine.generate", "reply:engine.load")),
    ("scorer-0", True, ("call:grade", "reply:grade")),
    (
        "control",
        False,
        ("journal.mid_append", "trace:appended", "trace:before_rename", "batch:fsynced", "blob:renamed"),
    ),
)
"""One moment of each row is drawn: process, whether the whole run dies with it, points inside its work."""


@dataclass(frozen=True)
class Moment:
    """Where to die; ``order`` says which of two moments comes first in a run's life."""

    order: float
    plan: FaultPlan

    @property
    def kind(self) -> str | None:
        """The event at whose commit the death comes."""
        parts = self.plan.point.split(":")
        return parts[1] if parts[0] == "event" else None


def draw_chains(seed: int) -> list[list[Moment]]:
    """All moments, dealt to chains and each chain in the order of a run's life."""
    draw = random.Random(seed)
    moments = [
        Moment(EVENTS_IN_ORDER.index(kind), FaultPlan(process="control", point=f"event:{kind}:{when}"))
        for kind in draw.sample(EVENTS_IN_ORDER, NUM_EVENTS)
        for when in [draw.choice(("before", "after"))]
    ]
    for process, whole_run, points in OTHERS:
        plan = FaultPlan(process=process, point=draw.choice(points), whole_run=whole_run)
        moments.append(Moment(DURING_TRAINING, plan))
    draw.shuffle(moments)
    return [sorted(moments[index::NUM_CHAINS], key=lambda moment: moment.order) for index in range(NUM_CHAINS)]


CHAINS = draw_chains(SEED)


class Rehearsals:
    """Runs each chain once, whoever asks first."""

    def __init__(self, root: Path, policy: Path) -> None:
        self._root = root
        self._policy = policy
        self.chain = functools.cache(self._chain)

    def _chain(self, index: int) -> tuple[Path, list[Moment]]:
        """The directory of the finished run, and the moments at which it really died."""
        home = self._root / f"chain-{index}"
        home.mkdir()
        run = home / "run"
        config = write_small_config(
            home,
            self._policy,
            run={"dir": str(run), "seed": index},
            # A random policy never succeeds; with a bonus on entropy its weights move all the same.
            algorithm={"entropy_coef": 0.01},
            # Here every death ends the run; test_publication has those that it survives.
            runtime={"max_restarts": 0},
            train={"max_steps": MAX_STEPS, "checkpoint_every": 2},
            eval={"num_tasks": 2, "greedy": False},
        )
        died: list[Moment] = []
        for moment in CHAINS[index]:
            path = run if died else config
            ended = rehearse(path, home, moment.plan, is_resume=bool(died), deadline_s=LAUNCH_DEADLINE_S)
            check_death(moment.plan, run, ended.returncode, ended.stderr)
            died.append(moment)
        ended = rehearse(run, home, None, is_resume=True, deadline_s=LAUNCH_DEADLINE_S)
        assert ended.returncode == EXIT_DONE, ended.stderr
        assert left_running(LAUNCH_DEADLINE_S) == []
        return run, died


def check_death(plan: FaultPlan, run: Path, returncode: int, stderr: str) -> None:
    """It died there and nowhere else; nothing of it goes on, and the user is told how to go on."""
    assert left_running(LAUNCH_DEADLINE_S) == []
    if plan.process == "control" or plan.whole_run:
        assert returncode == KILLED, f"{plan} was not reached: {returncode}, {stderr}"
        return
    assert returncode == EXIT_RUN_FAILED, f"{plan}: {returncode}, {stderr}"
    assert f"process {plan.process} ended with signal 9" in stderr
    assert f"steelyard train --resume {run}" in stderr
    assert "Traceback" not in stderr


@pytest.fixture(scope="module")
def rehearsals(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rehearsals]:
    root = tmp_path_factory.mktemp("k")
    with adopting():
        yield Rehearsals(root, write_tiny_model(root / "policy"))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("index", range(NUM_CHAINS))
def test_a_run_that_is_killed_five_times_is_whole_in_the_end(rehearsals: Rehearsals, index: int) -> None:
    run, died = rehearsals.chain(index)
    assert len(died) == KILLS_A_CHAIN
    report = audit_run(existing_directory(str(run)))
    assert report.is_passed, "\n".join(report.lines())
    check_complete(journal_events(run))


def check_complete(events: list[e.AnyEvent]) -> None:
    """Every step, every prompt trained once or dropped, the end said once and last; each replay gave the same bits."""
    published = [event.weights_digest for event in events if isinstance(event, e.VersionPublished)]
    assert len(set(published)) == len(published) == MAX_STEPS + 1
    assert not any(isinstance(event, e.VersionOrphaned) for event in events)
    surviving: dict[int, e.StepBegun] = {}
    for event in events:
        if isinstance(event, e.StepBegun):
            assert event.step not in surviving
            surviving[event.step] = event
        elif isinstance(event, e.StepVoided):
            del surviving[event.step]
    assert sorted(surviving) == list(range(MAX_STEPS))
    trained = [group for step in surviving.values() for group in step.group_ids]
    dropped = {event.group_id for event in events if isinstance(event, e.GroupDropped)}
    admitted = {event.group_id for event in events if isinstance(event, e.GroupAdmitted) and event.label is None}
    assert len(set(trained)) == len(trained)
    assert set(trained) | dropped == admitted
    assert not set(trained) & dropped
    assert isinstance(events[-1], e.RunFinished)
    checkpoints = [event.step for event in events if isinstance(event, e.Checkpointed)]
    assert checkpoints[-1] == MAX_STEPS
    evaluated = [event for event in events if isinstance(event, e.GroupEvaluated)]
    assert len(evaluated) == 4


@pytest.mark.timeout(1200)
def test_the_deaths_meet_many_kinds_of_events_every_process_and_the_whole_run(rehearsals: Rehearsals) -> None:
    died = [moment for index in range(NUM_CHAINS) for moment in rehearsals.chain(index)[1]]
    assert len(died) == NUM_CHAINS * KILLS_A_CHAIN
    assert len({moment.kind for moment in died if moment.kind}) >= NUM_EVENTS
    assert {moment.plan.process for moment in died} == {"control", "trainer", "replica-0", "scorer-0"}
    assert any(moment.plan.whole_run for moment in died)
    assert {moment.plan.point.rpartition(":")[2] for moment in died if moment.kind} == {"before", "after"}
