"""Leases of attempts: granted, renewed, expired, ended. An attempt is a fencing token; an ended one is refused."""

import heapq
import logging
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from steelyard.coordinator import admission
from steelyard.coordinator import effects as fx
from steelyard.coordinator import events as e
from steelyard.coordinator.apply_rollouts import failure_digest
from steelyard.coordinator.core import Core, short
from steelyard.coordinator.deliveries import Deliveries
from steelyard.coordinator.entities import FailedAttempt, Group, Rollout
from steelyard.coordinator.groups import Groups
from steelyard.coordinator.retry_rules import REPORTED, RETRY_RULES, Ending, RetryRule
from steelyard.coordinator.transitions import HELD, RolloutState
from steelyard.digests import digest_bytes
from steelyard.types import ArtifactReport, AttemptFailure, Lease, Outcome, Purpose, Sampling, SealedTrace

logger = logging.getLogger(__name__)


@dataclass(order=True, frozen=True, slots=True)
class _Waiting:
    """Retries of admitted groups need no new slot and go first; then by priority and age; then the oldest group.

    ``rank_s`` is the time of admission, ``admission.priority_ageing_s`` earlier for each level of priority. So priority
    ages: a group is overtaken only by groups that were admitted less than so many levels x ``priority_ageing_s`` after
    it, however many of a higher priority keep coming, and the order never changes while they wait.
    """

    is_new: bool
    rank_s: float
    order: int
    rollout_id: str


class Leases:
    """The queue of rollouts that can be leased, and the clock of those that are.

    Renewals are not journalled: after a recovery every lease gets one full period.
    """

    def __init__(self, core: Core, groups: Groups) -> None:
        self._core = core
        self._groups = groups
        self._ready: list[_Waiting] = []
        self._delayed: list[tuple[float, _Waiting]] = []
        self._expires_at_s: dict[str, float] = {}
        self._expiries: list[tuple[float, str]] = []
        self._unstarted = Deliveries()
        core.subscribe(fx.WorkWaits, self._on_work)
        core.subscribe(fx.AttemptBegan, self._on_began)
        core.subscribe(fx.AttemptEnded, self._on_ended)
        core.subscribe(fx.VersionChanged, lambda _: core.work.notify())
        core.subscribe(fx.ReplicaChanged, lambda _: core.work.notify())

    def grant(self, worker_id: str, max_leases: int, unstarted: frozenset[str] | None = None) -> tuple[Lease, ...]:
        """Lease up to ``max_leases`` rollouts to a worker, each bound to a READY version.

        ``unstarted``: attempts that the worker has and has not started; any other that is leased to it and not
        started never arrived, and is handed out first. None: nothing gets lost on the way to this worker.
        """
        granted = [] if unstarted is None else self._lost(worker_id, max_leases, unstarted)
        set_aside: list[_Waiting] = []
        try:
            while self._ready and len(granted) < max_leases and not self._groups.is_draining:
                waiting = heapq.heappop(self._ready)
                # Until it is known what becomes of it: an error on the way must not lose it.
                set_aside.append(waiting)
                if self._try_lease(worker_id, waiting, granted):
                    set_aside.pop()
        finally:
            for waiting in set_aside:
                heapq.heappush(self._ready, waiting)
        return tuple(granted)

    def _try_lease(self, worker_id: str, waiting: _Waiting, granted: list[Lease]) -> bool:
        """Lease one rollout if it can be leased now; False where it must go back in line."""
        rollout = self._core.state.rollouts.get(waiting.rollout_id)
        if rollout is None or rollout.state is not RolloutState.PENDING:
            return True
        now_s = self._core.now_s()
        if not self._may_be_leased(waiting, rollout, now_s):
            return True
        version = admission.bindable(self._core.state, rollout.group)
        if version is None:
            return False
        granted.append(self._grant_one(worker_id, rollout, version, now_s))
        return True

    def _lost(self, worker_id: str, max_leases: int, unstarted: frozenset[str]) -> list[Lease]:
        lost = self._unstarted.lost(worker_id, unstarted)[:max_leases]
        if lost:
            self._core.counters.add("leases_handed_out_again", len(lost))
        return [self.lease_of(self._core.state.attempts[attempt_id]) for attempt_id in lost]

    def start(self, worker_id: str | None, attempt_id: str, attempt_number: int) -> None:
        """The worker has begun. Idempotent while the attempt runs.

        Raises:
            Refused: the attempt is not live, is another worker's, or is over.
        """
        self._ensure_running(self._held(attempt_id, attempt_number, worker_id))

    def heartbeat(self, worker_id: str, attempt_ids: tuple[str, ...]) -> tuple[str, ...]:
        """Renew the leases that ``worker_id`` holds; the attempts that it must stop."""
        dead = []
        until_s = self._core.now_s() + self._core.settings.lease_s
        for attempt_id in attempt_ids:
            rollout = self._core.state.attempts.get(attempt_id)
            if rollout is None or rollout.state not in HELD or rollout.worker_id != worker_id:
                dead.append(attempt_id)
            else:
                self._expires_at_s[attempt_id] = until_s
        return tuple(dead)

    def finish(self, report: ArtifactReport, worker_id: str | None = None) -> None:
        """The trace is sealed and the artifact durable; ``worker_id`` says so, where that is known.

        Raises:
            Refused: ``late``, ``expired``, ``unknown``, ``foreign``; ``double`` where another report came before.
                An identical one is counted and accepted again.
        """
        core = self._core
        rollout = core.attempt(report.attempt_id, report.attempt_number)
        self._require_holder(rollout, worker_id)
        if rollout.state not in HELD:
            if rollout.report == report:
                core.counters.add("duplicate.artifact_ready")
                return
            raise core.refuse("double", f"attempt {report.attempt_id} is {rollout.state} already")
        if report.trace.attempt_id != report.attempt_id:
            raise core.refuse("foreign", f"{report.attempt_id} reports the trace of {report.trace.attempt_id}")
        self._require_versions(rollout, report.trace)
        self._ensure_running(rollout)
        core.record(e.ArtifactReady(at_s=core.now_s(), report=report))

    def _require_versions(self, rollout: Rollout, trace: SealedTrace) -> None:
        """Fail an attempt that sampled from a version that it may not have.

        Pinned: the one that its lease names. Where weights may change under it, that one or later ones, each proven:
        a replica goes over a moment before its proof is in the journal, and may never come to give it.
        """
        if not trace.num_tokens:
            return
        core, bound = self._core, rollout.policy_version or 0
        sampled = {trace.oldest_version, trace.newest_version}
        ending, reason, wrong = Ending.INFRA_FAILED, "wrong_version", sampled - {bound}
        if core.settings.rules.follows_updates and rollout.group.purpose is Purpose.TRAIN:
            wrong = {version for version in sampled if version < bound}
            if not wrong:
                ending, reason = Ending.ABANDONED, "unproven_version"
                wrong = {version for version in sampled if not admission.was_proven(core.state, version)}
        if wrong:
            detail = f"attempt {trace.attempt_id} is bound to version {bound}, sampled {sorted(wrong)}: {reason}"
            self.fail(rollout, ending, reason, detail, lost_tokens=trace.num_tokens)
            raise core.refuse("foreign", detail)

    def report_failure(self, failure: AttemptFailure, worker_id: str | None = None) -> None:
        """The system could not carry the attempt through; ``worker_id`` says so, where that is known.

        Raises:
            Refused: the attempt is not live, or has reported its end already; ``malformed`` for an outcome that is
                not a worker's to give. An identical failure is counted and accepted again.
        """
        if self._is_repeated(failure, worker_id):
            self._core.counters.add("duplicate.attempt_failed")
            return
        rollout = self._held(failure.attempt_id, failure.attempt_number, worker_id)
        ending = REPORTED.get(failure.outcome)
        if ending is None:
            detail = f"outcome of a failure must be one of {', '.join(REPORTED)}, got {failure.outcome}"
            raise self._core.refuse("malformed", detail)
        may_retry = self._core.settings.retry_after_external or not failure.made_external_call
        self.fail(rollout, ending, failure.reason, failure.detail, may_retry=may_retry)

    def has_failed(self, attempt_id: str, outcome: Outcome, reason: str, detail: str) -> FailedAttempt | None:
        """How an attempt failed, if it did for just that."""
        known = self._core.state.failed_attempts.get(attempt_id)
        is_same = known is not None and known.content_digest == failure_digest(outcome, short(reason), short(detail))
        return known if is_same else None

    def _is_repeated(self, failure: AttemptFailure, worker_id: str | None) -> bool:
        known = self.has_failed(failure.attempt_id, failure.outcome, failure.reason, failure.detail)
        is_same_number = known is not None and known.attempt_number == failure.attempt_number
        return known is not None and is_same_number and worker_id in (None, known.worker_id)

    def fail(
        self,
        rollout: Rollout,
        ending: Ending,
        reason: str,
        detail: str = "",
        *,
        may_retry: bool = True,
        lost_tokens: int | None = None,
    ) -> None:
        """End the newest attempt of ``rollout`` without a result, then do as the rule of ``ending`` says.

        Args:
            lost_tokens: sampled tokens recorded for the attempt; None asks the recorder and ends the recording.
        """
        rule = RETRY_RULES[ending]
        attempt_id = rollout.attempt_id or ""
        if lost_tokens is None:
            lost_tokens = self._core.discard(attempt_id) if rollout.state in HELD else 0
        event = e.InfraFailed(
            at_s=self._core.now_s(),
            attempt_id=attempt_id,
            outcome=rule.outcome,
            reason=short(reason),
            detail=short(detail),
            lost_tokens=lost_tokens,
            is_counted=rule.is_counted,
        )
        self._core.record(event)
        self._core.counters.add(f"attempt_failed.{event.reason}")
        logger.warning("attempt %s of %s failed: %s", attempt_id, rollout.rollout_id, event.reason)
        self._go_on(rollout, rule, may_retry)

    def abandon(self, reason: str) -> int:
        """End every held attempt without using up budget: their workers are known to be gone. How many."""
        held = list(self._core.state.held())
        for rollout in held:
            self.fail(rollout, Ending.ABANDONED, reason)
        return len(held)

    def advance(self) -> None:
        """Expire what is overdue and make ready what has waited out its back-off."""
        now_s = self._core.now_s()
        while self._expiries and self._expiries[0][0] <= now_s:
            _, attempt_id = heapq.heappop(self._expiries)
            until_s = self._expires_at_s.get(attempt_id)
            if until_s is None:
                continue
            if until_s > now_s:
                heapq.heappush(self._expiries, (until_s, attempt_id))
                continue
            self._expire(attempt_id)
        is_woken = False
        while self._delayed and self._delayed[0][0] <= now_s:
            heapq.heappush(self._ready, heapq.heappop(self._delayed)[1])
            is_woken = True
        if is_woken:
            self._core.work.notify()

    def next_due_s(self) -> float | None:
        """When ``advance`` has something to do at the earliest."""
        firsts = [queue[0][0] for queue in (self._expiries, self._delayed) if queue]
        return min(firsts, default=None)

    def expires_at_s(self, attempt_id: str) -> float | None:
        """When a held attempt expires unless it is renewed."""
        return self._expires_at_s.get(attempt_id)

    def expiries(self) -> Mapping[str, float]:
        """When each held attempt expires unless it is renewed."""
        return self._expires_at_s

    def lease_of(self, rollout: Rollout) -> Lease:
        """The lease under which the newest attempt of ``rollout`` is held."""
        group = rollout.group
        assert rollout.attempt_id is not None and rollout.policy_version is not None
        return Lease(
            attempt_id=rollout.attempt_id,
            rollout_id=rollout.rollout_id,
            group_id=group.group_id,
            task_id=group.task_id,
            purpose=group.purpose,
            member_index=rollout.member_index,
            attempt_number=rollout.attempt_number,
            policy_version=rollout.policy_version,
            sampling=_own_seed(group, rollout),
            max_turns=group.max_turns,
            issued_at_s=rollout.issued_at_s,
            expires_at_s=self._expires_at_s.get(rollout.attempt_id, rollout.expires_at_s),
        )

    def _grant_one(self, worker_id: str, rollout: Rollout, version: int, now_s: float) -> Lease:
        core = self._core
        core.record(
            e.Leased(
                at_s=now_s,
                rollout_id=rollout.rollout_id,
                attempt_id=core.ids.new("att"),
                attempt_number=rollout.attempt_number + 1,
                worker_id=worker_id,
                policy_version=version,
                expires_at_s=now_s + core.settings.lease_s,
            )
        )
        return self.lease_of(rollout)

    def _may_be_leased(self, waiting: _Waiting, rollout: Rollout, now_s: float) -> bool:
        """Whether back-off and budgets allow it at this very moment; where a budget does not, the rollout ends.

        A moment has passed since the clock was looked at last, and budgets may be smaller since a resume.
        """
        reason = admission.used_up(self._core.settings, rollout, now_s)
        if reason is not None:
            self._groups.cancel(rollout, reason.value)
            self._groups.settle(rollout.group)
        elif rollout.not_before_s > now_s:
            heapq.heappush(self._delayed, (rollout.not_before_s, waiting))
        else:
            return True
        return False

    def _held(self, attempt_id: str, attempt_number: int, worker_id: str | None) -> Rollout:
        rollout = self._core.attempt(attempt_id, attempt_number)
        self._require_holder(rollout, worker_id)
        if rollout.state not in HELD:
            raise self._core.refuse("double", f"attempt {attempt_id} is {rollout.state} already")
        return rollout

    def _require_holder(self, rollout: Rollout, worker_id: str | None) -> None:
        if worker_id is not None and rollout.worker_id != worker_id:
            detail = f"attempt {rollout.attempt_id} is held by {rollout.worker_id}, not {worker_id}"
            raise self._core.refuse("foreign", detail)

    def _ensure_running(self, rollout: Rollout) -> None:
        if rollout.state is RolloutState.LEASED:
            attempt_id = rollout.attempt_id or ""
            self._core.record(e.Running(at_s=self._core.now_s(), attempt_id=attempt_id))
            self._unstarted.remove(attempt_id)

    def _expire(self, attempt_id: str) -> None:
        rollout = self._core.state.attempts.get(attempt_id)
        if rollout is None or rollout.state not in HELD:
            return
        lost_tokens = self._core.discard(attempt_id)
        self._core.record(e.LeaseExpired(at_s=self._core.now_s(), attempt_id=attempt_id, lost_tokens=lost_tokens))
        self._core.counters.add("lease_expired")
        logger.warning("the lease of attempt %s by worker %s has expired", attempt_id, rollout.worker_id)
        self._go_on(rollout, RETRY_RULES[Ending.LEASE_EXPIRED], may_retry=True)

    def _go_on(self, rollout: Rollout, rule: RetryRule, may_retry: bool) -> None:
        core = self._core
        draw = core.jitter.random() if rule.has_backoff else 0.0
        event = admission.after_failure(core.settings, rollout, core.now_s(), rule, may_retry=may_retry, draw=draw)
        core.record(event)
        if isinstance(event, e.RolloutCancelled):
            core.counters.add(f"cancelled.{event.reason}")
        self._groups.settle(rollout.group)

    def _on_work(self, effect: fx.WorkWaits) -> None:
        group = self._core.state.rollouts[effect.rollout_id].group
        rank_s = group.admitted_at_s - group.priority * self._core.settings.priority_ageing_s
        is_new = not effect.is_retry
        waiting = _Waiting(is_new=is_new, rank_s=rank_s, order=effect.order, rollout_id=effect.rollout_id)
        if effect.not_before_s > self._core.now_s():
            heapq.heappush(self._delayed, (effect.not_before_s, waiting))
            self._core.timers.notify()
        else:
            heapq.heappush(self._ready, waiting)
            self._core.work.notify()

    def _on_began(self, effect: fx.AttemptBegan) -> None:
        until_s = self._core.now_s() + self._core.settings.lease_s
        self._expires_at_s[effect.attempt_id] = until_s
        heapq.heappush(self._expiries, (until_s, effect.attempt_id))
        rollout = self._core.state.attempts[effect.attempt_id]
        if rollout.state is RolloutState.LEASED:
            self._unstarted.add(rollout.worker_id or "", effect.attempt_id)

    def _on_ended(self, effect: fx.AttemptEnded) -> None:
        self._unstarted.remove(effect.attempt_id)
        self._expires_at_s.pop(effect.attempt_id, None)


def _own_seed(group: Group, rollout: Rollout) -> Sampling:
    """Siblings must differ: each rollout gets a seed of its own, the same for each of its attempts."""
    seed = group.sampling.seed
    if seed is None:
        return group.sampling
    name = f"{seed}/{group.stream_position}/{group.task_id}/{group.num_stale_restarts}/{rollout.member_index}"
    return msgspec.structs.replace(group.sampling, seed=int(digest_bytes(name.encode())[:15], 16))
