"""C1: the data cursor was ahead of consumption, so a crash skipped the prompts between them, silently.

The cursor is the frontier of what was issued; what was issued and not trained is issued again to somebody else. Each
prompt is trained exactly once, whatever dies in between.
"""

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from steelyard.coordinator import events as e
from steelyard.coordinator.journal.sqlite import SqliteJournal
from steelyard.errors import RunError
from steelyard.testing.run_rig import WORKER, RunRig, make_settings
from steelyard.testing.small_runs import CrashedRun, journal_events, steelyard

NUM_TASKS = 8
GROUPS_PER_BATCH = 2
CRASHES = ("leased", "sealed", "scored", "batch begun", "published")


def trained_tasks(events: list[e.AnyEvent]) -> list[str]:
    """Tasks of all surviving steps, in order of training."""
    task_of = {event.group_id: event.task_id for event in events if isinstance(event, e.GroupAdmitted)}
    return [task_of[group] for event in events if isinstance(event, e.StepBegun) for group in event.group_ids]


async def crash_and_take_over(rig: RunRig, crash: str) -> None:
    """Lease 4 prompts, train 2, die at the named point, open the journal again."""
    await rig.start()
    assert len(await rig.coordinator.lease(WORKER, 4 * 2, 0.0)) == 8, "4 prompts in groups of 2 fit into bound 1"
    assert await rig.coordinator.abandon("so that the attempts can be leased again") == 8
    await rig.train(0)
    leases = await rig.coordinator.lease(WORKER, 3, 0.0)
    if crash != "leased":
        for lease in leases:
            await rig.coordinator.artifact_ready(rig.seal(lease))
    if crash == "scored":
        await rig.score_all()
    if crash in ("batch begun", "published"):
        await rig.rollouts()
        await rig.begin(1)
    if crash == "published":
        await rig.publish(2, is_ready=False)
    await rig.coordinator.crash()
    await rig.journal.close()


async def finish(rig: RunRig) -> None:
    """What control does with a journal that is not finished, then the rest of the tasks."""
    await rig.open()
    await rig.coordinator.abandon("the control process was started again")
    for pending in await rig.coordinator.pending_steps_after(0):
        if pending.published_version is None:
            await rig.publish(pending.step + 1, is_ready=False)
    newest = rig.coordinator.version_at_step(rig.coordinator.state.next_step)
    assert newest is not None
    await rig.load(newest.version)
    for step in range(rig.coordinator.state.next_step, NUM_TASKS // GROUPS_PER_BATCH):
        await rig.train(step)
    with pytest.raises(RunError, match="the task stream ended after 8 tasks"):
        await rig.coordinator.next_batch(NUM_TASKS // GROUPS_PER_BATCH, 1.0)
    books = await rig.coordinator.books(rig.stores.recorded)
    assert books.are_closed, books
    assert (books.prompts.issued, books.prompts.trained, books.prompts.live) == (NUM_TASKS, NUM_TASKS, 0)
    await rig.coordinator.close()


@pytest.mark.parametrize("crash", CRASHES)
def test_c1_eight_prompts_four_leased_two_trained_then_a_crash(tmp_path: Path, crash: str) -> None:
    async def scenario() -> None:
        settings = make_settings(lag=1, groups_per_batch=GROUPS_PER_BATCH, group_size=2)
        first = RunRig(settings, num_tasks=NUM_TASKS, num_epochs=1, journal=SqliteJournal(tmp_path / "journal.sqlite"))
        await crash_and_take_over(first, crash)
        again = RunRig(
            settings, num_tasks=NUM_TASKS, num_epochs=1, seed=0, journal=SqliteJournal(tmp_path / "journal.sqlite")
        )
        again.stores, again.ids, again.clock = first.stores, first.ids, first.clock
        await finish(again)

    asyncio.run(scenario())
    assert sorted(trained_tasks(journal_events(tmp_path))) == [f"task-{index:04d}" for index in range(NUM_TASKS)]


def test_c1_a_run_that_was_killed_and_resumed_skips_no_prompt_and_trains_none_twice(crashed_run: CrashedRun) -> None:
    assert crashed_run.resumed.returncode == 0, crashed_run.resumed.stderr
    events = journal_events(crashed_run.directory)
    assert sum(isinstance(event, e.RunResumed) for event in events) == 1
    admitted = [event for event in events if isinstance(event, e.GroupAdmitted)]
    assert [event.stream_position for event in admitted] == list(range(len(admitted)))
    trained = Counter(trained_tasks(events))
    dropped = {event.group_id for event in events if isinstance(event, e.GroupDropped)}
    left = Counter(event.task_id for event in admitted if event.group_id in dropped)
    # Siblings may be consumed out of order within the lag bound; none is skipped, none is trained twice.
    assert trained + left == Counter(event.task_id for event in admitted)
    assert set((trained + left).values()) == {1}
    audit = steelyard("audit", crashed_run.directory)
    assert (audit.returncode, audit.stdout.splitlines()[-1]) == (0, "audit passed")
