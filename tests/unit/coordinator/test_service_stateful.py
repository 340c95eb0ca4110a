"""The coordinator under random use, late, double and unknown messages, and crashes inside commits.

After every rule the books close; at the end every prompt of the stream has ended exactly once and the audit passes.
"""

import asyncio
import contextlib
import random
from collections.abc import Awaitable
from typing import TypeVar

import msgspec
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from steelyard.coordinator import admission
from steelyard.coordinator.books import books
from steelyard.coordinator.entities import Group, State
from steelyard.coordinator.journal.memory import MemoryJournal
from steelyard.coordinator.records import CoordinatorSettings
from steelyard.coordinator.recovery import recover
from steelyard.coordinator.snapshot import take
from steelyard.coordinator.state import apply
from steelyard.coordinator.transitions import GroupState
from steelyard.errors import Refused, RunError
from steelyard.testing.manual_clock import settle
from steelyard.testing.run_rig import SCORER, WORKER, RunRig, make_score, make_settings
from steelyard.types import ArtifactReport, AttemptFailure, Lease, Outcome, Purpose, Sampling, Score, ScoreJob

T = TypeVar("T")
NUM_TASKS = 30


def plain_choice(
    state: State, settings: CoordinatorSettings, step: int, now_s: float, since_s: float
) -> admission.Choice:
    """The batch of a step by a look at every group."""
    size, bound = settings.rules.groups_per_batch, settings.rules.max_policy_lag
    train = [g for g in state.live_groups.values() if g.purpose is Purpose.TRAIN and g.state is not GroupState.PARKED]
    train.sort(key=lambda group: (group.admitted_step, group.order))
    complete = [group for group in train if group.state is GroupState.COMPLETE]
    stale = [group for group in complete if admission.is_stale(state, settings, step, now_s, group)]
    live = [group for group in train if group not in stale]
    chosen = [group for group in complete if group not in stale][:size]
    num_awaited, waits_for = 0, list[Group]()
    for due_step in range(step, step + bound + 1):
        due = [group for group in live if group.admitted_step + bound <= due_step]
        needed = min(size, len(due) - (due_step - step) * size)
        num_awaited = max(0, needed - sum(group in due for group in chosen))
        if num_awaited:
            waits_for = [group for group in due if group.state is GroupState.OPEN]
            break
    late_at_s = [max(since_s, group.admitted_at_s) + settings.max_tail_wait_s for group in waits_for]
    late = [group for group, at_s in zip(waits_for, late_at_s, strict=True) if now_s >= at_s]
    stale += late[:num_awaited]
    num_missing = size - len(chosen)
    return admission.Choice(
        groups=() if stale or num_awaited or num_missing else tuple(chosen),
        stale=tuple(stale),
        waits_for=tuple(waits_for),
        num_awaited=num_awaited,
        num_missing=num_missing,
        look_again_s=min(late_at_s, default=None),
    )


class PowerCut(BaseException):
    """The process is gone in the middle of a write."""


class CrashingJournal(MemoryJournal):
    """Dies at the next passing of ``die_at``."""

    def __init__(self) -> None:
        super().__init__(self._pass)
        self.die_at: str | None = None

    def _pass(self, point: str) -> None:
        if point == self.die_at:
            self.die_at = None
            raise PowerCut(point)


class CoordinatorMachine(RuleBasedStateMachine):
    """Drives a rig; keeps every message it ever saw, to send it again at any later time."""

    @initialize(
        seed=st.integers(0, 1000),
        lag=st.integers(0, 3),
        groups_per_batch=st.integers(1, 2),
        budget_tokens=st.sampled_from([None, 12]),
        budget_s=st.sampled_from([None, 60.0]),
    )
    def start(
        self, seed: int, lag: int, groups_per_batch: int, budget_tokens: int | None, budget_s: float | None
    ) -> None:
        self.loop = asyncio.new_event_loop()
        self.journal = CrashingJournal()
        chosen = make_settings(
            lag=lag,
            groups_per_batch=groups_per_batch,
            max_drop_frac=1.0,
            max_tail_wait_s=30.0,
            lease_s=20.0,
            score_lease_s=15.0,
            snapshot_every_events=7,
            budget_tokens=budget_tokens,
            budget_s=budget_s,
        )
        self.rig = RunRig(
            chosen,
            seed=seed,
            journal=self.journal,
            num_tasks=NUM_TASKS,
            num_epochs=1,
            jitter=random.Random(seed),
        )
        self.rig.memory_journal = self.journal
        self.leases: list[Lease] = []
        self.reports: list[ArtifactReport] = []
        self.jobs: list[ScoreJob] = []
        self.scores: list[Score] = []
        self.run(self.rig.start())

    def run(self, call: Awaitable[T]) -> T:
        async def bounded() -> T:
            return await asyncio.wait_for(call, 20)

        return self.loop.run_until_complete(bounded())

    def attempt(self, call: Awaitable[object]) -> None:
        """A refusal is an answer."""
        with contextlib.suppress(Refused):
            self.run(call)

    def pick(self, items: list[T], draw: int) -> T:
        return items[draw % len(items)]

    @rule(count=st.integers(1, 6))
    def lease(self, count: int) -> None:
        self.leases += self.run(self.rig.coordinator.lease(WORKER, count, 0.0))

    @precondition(lambda self: self.leases)
    @rule(draw=st.integers(0, 10_000))
    def finish_attempt(self, draw: int) -> None:
        """For any lease ever given, live or long over."""
        lease = self.pick(self.leases, draw)
        if lease.attempt_id in self.rig.stores.traces:
            report = next(r for r in self.reports if r.attempt_id == lease.attempt_id)
        elif self.rig.coordinator.is_alive(lease.attempt_id):
            report = self.rig.seal(lease)
            self.reports.append(report)
        else:
            return
        self.attempt(self.rig.coordinator.artifact_ready(report))

    @precondition(lambda self: self.reports)
    @rule(draw=st.integers(0, 10_000), change=st.sampled_from(["digest", "attempt", "number"]))
    def report_nonsense(self, draw: int, change: str) -> None:
        report = self.pick(self.reports, draw)
        changed = {
            "digest": msgspec.structs.replace(report, artifact_digest="0" * 32),
            "attempt": msgspec.structs.replace(report, attempt_id="att_unknown"),
            "number": msgspec.structs.replace(report, attempt_number=report.attempt_number + 1),
        }[change]
        rollout = self.rig.coordinator.state.attempts.get(changed.attempt_id)
        if change == "digest" and rollout is not None and rollout.report is None:
            return  # for a live attempt this would be a first report like any other
        try:
            self.run(self.rig.coordinator.artifact_ready(changed))
        except Refused:
            return
        raise AssertionError(f"{change} must be refused")

    @precondition(lambda self: self.leases)
    @rule(draw=st.integers(0, 10_000), tokens=st.integers(0, 9))
    def fail_attempt(self, draw: int, tokens: int) -> None:
        lease = self.pick(self.leases, draw)
        if self.rig.coordinator.is_alive(lease.attempt_id):
            self.attempt(self.rig.lose(lease, tokens))

    @precondition(lambda self: self.leases)
    @rule(draw=st.integers(0, 10_000), outcome=st.sampled_from(Outcome))
    def report_an_outcome(self, draw: int, outcome: Outcome) -> None:
        """Whatever a worker says of its attempt, only four outcomes are its to give."""
        lease = self.pick(self.leases, draw)
        is_alive = self.rig.coordinator.is_alive(lease.attempt_id)
        failure = AttemptFailure(
            attempt_id=lease.attempt_id, attempt_number=lease.attempt_number, outcome=outcome, reason="r"
        )
        self.attempt(self.rig.coordinator.attempt_failed(failure))
        is_taken = is_alive and outcome not in (Outcome.SCORED, Outcome.GRADER_FAILED)
        assert self.rig.coordinator.is_alive(lease.attempt_id) is (is_alive and not is_taken)

    @precondition(lambda self: self.leases)
    @rule(draw=st.integers(0, 10_000), is_whole_task=st.booleans(), dice=st.integers(0, 2))
    def cancel(self, draw: int, is_whole_task: bool, dice: int) -> None:
        """A group or a task that was leased at any time; twice, for the second changes nothing."""
        if dice:
            return
        lease, coordinator = self.pick(self.leases, draw), self.rig.coordinator
        if is_whole_task:
            self.run(coordinator.cancel_task(lease.task_id, "withdrawn"))
            assert self.run(coordinator.cancel_task(lease.task_id, "withdrawn")) == ()
        else:
            self.run(coordinator.cancel_group(lease.group_id, "withdrawn"))
            assert not self.run(coordinator.cancel_group(lease.group_id, "withdrawn"))
        assert not coordinator.is_alive(lease.attempt_id)

    @rule(count=st.integers(1, 6))
    def lease_scores(self, count: int) -> None:
        self.jobs += self.run(self.rig.coordinator.lease_scores(SCORER, count, 0.0))

    @precondition(lambda self: self.jobs)
    @rule(draw=st.integers(0, 10_000), value=st.sampled_from([0.0, 1.0, 0.5, float("nan"), None]))
    def score(self, draw: int, value: float | None) -> None:
        """For any job ever given, live or long over, again and again."""
        job = self.pick(self.jobs, draw)
        outcome = Outcome.GRADER_FAILED if value is None else Outcome.SCORED
        self.scores.append(make_score(job, value, outcome))
        self.attempt(self.rig.coordinator.score(self.scores[-1]))

    @precondition(lambda self: self.scores)
    @rule(draw=st.integers(0, 10_000))
    def score_again(self, draw: int) -> None:
        self.attempt(self.rig.coordinator.score(self.pick(self.scores, draw)))

    @rule(seconds=st.floats(0.1, 40.0))
    def wait(self, seconds: float) -> None:
        self.rig.clock.advance(seconds)
        self.run(settle())

    @precondition(lambda self: self.leases)
    @rule(count=st.integers(1, 20))
    def heartbeat(self, count: int) -> None:
        self.run(self.rig.coordinator.heartbeat(WORKER, tuple(lease.attempt_id for lease in self.leases[-count:])))

    @rule(count=st.integers(1, 12))
    def work(self, count: int) -> None:
        """A harness and a scorer that do what they should."""
        leases = self.run(self.rig.coordinator.lease(WORKER, count, 0.0))
        self.leases += leases
        for lease in leases:
            self.reports.append(self.rig.seal(lease))
            self.run(self.rig.coordinator.artifact_ready(self.reports[-1]))
        self.run(self.rig.score_all())

    @rule(is_prepared=st.booleans())
    def train(self, is_prepared: bool) -> None:
        step = self.rig.coordinator.state.next_step
        if is_prepared:
            self.run(self.rig.rollouts())
        if self.rig.coordinator.version_at_step(step) is None:
            self.run(self.rig.publish(step))
        waiter = self.loop.create_task(self.rig.coordinator.next_batch(step, 1e9))
        self.run(settle())
        if not waiter.done():
            waiter.cancel()
            self.run(settle())
        elif not isinstance(waiter.exception(), RunError):
            self.run(self.rig.begin(step))

    @rule()
    def publish(self) -> None:
        step = self.rig.coordinator.state.next_step
        if self.rig.coordinator.version_at_step(step) is None:
            self.run(self.rig.publish(step))

    @rule(dice=st.integers(0, 2))
    def checkpoint(self, dice: int) -> None:
        if dice:
            return
        newest = max(self.rig.coordinator.state.lineage)
        self.run(self.rig.checkpoint(newest))

    @rule(salt=st.integers(0, 10**9), dice=st.integers(0, 2))
    def replay_with_other_weights(self, salt: int, dice: int) -> None:
        if dice:
            return
        state = self.rig.coordinator.state
        held = state.checkpoints[0] if state.checkpoints else 0
        doomed = [version for step, version in sorted(state.lineage.items()) if step > held]
        if not doomed:
            return
        self.rig.weights_salt = str(salt)
        self.run(self.rig.coordinator.orphan(doomed[0], "replay"))
        survivor = state.lineage[max(state.lineage)]
        if state.newest_ready is None:
            self.run(self.rig.load(survivor))

    @rule(tasks=st.integers(1, 2), priority=st.integers(-2, 2))
    def evaluate(self, tasks: int, priority: int) -> None:
        newest = self.rig.coordinator.newest_ready()
        if newest is not None:
            names = tuple(f"held-{n}" for n in range(tasks))
            label = f"eval-{newest.version}"
            self.run(
                self.rig.coordinator.admit_evaluation(
                    names, version=newest.version, sampling=Sampling(), label=label, priority=priority
                )
            )

    @rule(abandon=st.booleans(), dice=st.integers(0, 3))
    def crash(self, abandon: bool, dice: int) -> None:
        if dice:
            return
        self.run(self.rig.coordinator.crash())
        self.reopen(abandon)

    @rule(
        point=st.sampled_from(["journal.before_append", "journal.mid_append", "journal.after_commit"]),
        count=st.integers(1, 4),
        dice=st.integers(0, 3),
    )
    def crash_inside_a_commit(self, point: str, count: int, dice: int) -> None:
        if dice:
            return
        self.journal.die_at = point
        try:
            granted = self.run(self.rig.coordinator.lease(WORKER, count, 0.0))
            granted += self.run(self.rig.coordinator.lease(WORKER, 1, 0.0))
            self.leases += granted
        except PowerCut:
            pass
        self.journal.die_at = None
        self.run(self.rig.coordinator.crash())
        self.reopen(abandon=False)

    def reopen(self, abandon: bool) -> None:
        self.run(self.recovery_agrees_with_a_replay())
        self.run(self.rig.open())
        if abandon:
            self.run(self.rig.coordinator.abandon("interrupted"))

    async def recovery_agrees_with_a_replay(self) -> None:
        recovered, _ = await recover(self.journal)
        replayed = State()
        for event in await self.journal.replay():
            apply(replayed, event)
        assert take(recovered, self.journal.stored_head) == take(replayed, self.journal.stored_head)

    @invariant()
    def books_close(self) -> None:
        found = books(self.rig.coordinator.state, self.rig.stores.recorded)
        assert found.are_closed, found

    @invariant()
    def no_more_is_admitted_than_the_bound_allows(self) -> None:
        state, rules = self.rig.coordinator.state, self.rig.settings.rules
        live = [
            g for g in state.live_groups.values() if g.purpose is Purpose.TRAIN and g.state is not GroupState.PARKED
        ]
        assert len(live) <= (rules.max_policy_lag + 1) * rules.groups_per_batch

    @invariant()
    def the_batch_is_the_one_that_a_look_at_every_group_finds(self) -> None:
        state, now_s = self.rig.coordinator.state, self.rig.clock.now_s()
        for step in (state.next_step, state.next_step + 1):
            for held_to in (
                self.rig.settings,
                msgspec.structs.replace(self.rig.settings, max_age_s=1.0, max_tail_wait_s=1.0),
            ):
                for since_s in (now_s, now_s - 2.0):
                    found = admission.choose_batch(state, held_to, step, now_s, since_s)
                    assert found == plain_choice(state, held_to, step, now_s, since_s)

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        self.run(self.finish())
        self.loop.close()
        state = self.rig.coordinator.state
        assert state.prompts.issued == state.prompts.trained + state.prompts.dropped.total()
        report = self.rig.audit()
        assert report.is_passed, "\n".join(report.lines())

    async def finish(self) -> None:
        await self.rig.coordinator.finish("end of test")
        found = await self.rig.coordinator.books(self.rig.stores.recorded)
        assert found.are_closed, found
        assert found.prompts.live == found.tokens.in_flight == 0
        await self.rig.coordinator.close()


TestCoordinator = CoordinatorMachine.TestCase
TestCoordinator.settings = settings(
    max_examples=60, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)
