"""``apply`` against an independent model of the state machine.

The model (``steelyard.testing.state_model``) knows only plain dictionaries. Any event is sent at any time, for ids
that live, ended or never were; the model says whether it may follow, and what stands afterwards. Both must agree after
every event, refused ones included.
"""

from collections import Counter

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from steelyard.coordinator import events as e
from steelyard.coordinator.books import books
from steelyard.coordinator.entities import State
from steelyard.coordinator.state import apply, outbox
from steelyard.coordinator.transitions import GroupState
from steelyard.errors import IllegalTransition
from steelyard.testing.run_rig import make_manifest, make_proof, make_settings
from steelyard.testing.state_model import ENDED, NOBODY, WITH_A_WORKER, Bundle, Member, Model
from steelyard.testing.traces import sealed_trace
from steelyard.types import ArtifactReport, Outcome, Purpose, Sampling, Score

ids = st.integers(0, 10_000)


class StateMachine(RuleBasedStateMachine):
    """Sends events to ``apply`` and to the model."""

    @initialize()
    def start(self) -> None:
        self.state, self.model = State(), Model()
        self.at_s, self.num_names = 0.0, 0
        self.rollout_ids, self.attempt_ids, self.group_ids = [NOBODY], [NOBODY], [NOBODY]
        self.must(e.RunStarted(at_s=0.0, run_id="run", seed=0, config_digest="c", rules=make_settings().rules))
        self.publish()
        for size, is_train in ((2, True), (3, True), (1, True), (2, False)):
            self.send_admission(size, 0, 0, is_train, 0)

    # --- sending ----------------------------------------------------------------------------------

    def name(self, kind: str) -> str:
        self.num_names += 1
        return f"{kind}_{self.num_names}"

    def must(self, event: e.AnyEvent) -> None:
        apply(self.state, event)

    def send(self, event: e.AnyEvent, is_legal: bool) -> bool:
        """Whether the event was taken, which must be what the model says."""
        self.at_s = event.at_s
        try:
            apply(self.state, event)
        except IllegalTransition:
            assert not is_legal, f"{event} must be taken"
            self.at_s = self.state.at_s
            return False
        assert is_legal, f"{event} must be refused"
        return True

    def now(self) -> float:
        return self.at_s + 1.0

    def pick(self, likely: list[str], alive: list[str], names: list[str], draw: int) -> str:
        """Mostly one for which the event is legal, else one that lives, else any that ever was."""
        for chosen in ([likely, likely, alive, names][draw % 4], likely, alive):
            if chosen:
                return chosen[draw // 4 % len(chosen)]
        return names[draw % len(names)]

    def rollout_for(self, what: str, draw: int) -> str:
        members = self.model.members
        likely = [name for name, member in members.items() if self.model.may(what, member)]
        return self.pick(likely, list(members), self.rollout_ids, draw)

    def attempt_for(self, what: str, draw: int) -> str:
        likely = [m.attempt for m in self.model.members.values() if m.attempt and self.model.may(what, m)]
        return self.pick(likely, list(self.model.known), self.attempt_ids, draw)

    def group_for(self, what: str, draw: int) -> str:
        likely = [name for name in self.model.groups if self.model.may_close(what, name)]
        return self.pick(likely, list(self.model.groups), self.group_ids, draw)

    # --- groups and versions ----------------------------------------------------------------------

    def publish(self) -> None:
        number = len(self.model.versions)
        manifest = make_manifest(number, number, number - 1 if number else None)
        published = e.VersionPublished(
            at_s=self.at_s,
            version=number,
            step=number,
            parent_version=manifest.parent_version,
            weights_digest=manifest.weights_digest,
            model_config_digest="m",
            tokenizer_digest="t",
            template_digest="t",
            num_bytes=1,
        )
        self.must(published)
        self.must(e.VersionLoaded(at_s=self.at_s, proof=make_proof(manifest)))
        self.must(e.VersionReady(at_s=self.at_s, version=number))
        self.model.versions.append(number)

    @rule(
        size=st.integers(1, 3),
        skip=st.sampled_from([0, 0, 0, 1, -1]),
        priority=st.sampled_from([0, 3, -3, 1000, 1001, -1001]),
        is_train=st.booleans(),
        version=st.sampled_from([0, 0, 0, 99]),
    )
    def admit(self, size: int, skip: int, priority: int, is_train: bool, version: int) -> None:
        self.send_admission(size, skip, priority, is_train, version)

    def send_admission(self, size: int, skip: int, priority: int, is_train: bool, version: int) -> None:
        model, group = self.model, self.name("grp")
        rollouts = [self.name("rol") for _ in range(size)]
        event = e.GroupAdmitted(
            at_s=self.now(),
            group_id=group,
            task_id="task",
            task_index=None,
            stream_position=model.next_position + skip if is_train else None,
            purpose=Purpose.TRAIN if is_train else Purpose.EVALUATION,
            label=None if is_train else "label",
            rollout_ids=tuple(rollouts),
            admitted_version=version,
            bound_version=None if is_train else version,
            sampling=Sampling(),
            max_turns=1,
            priority=priority,
        )
        is_legal = abs(priority) <= 1000 and version in model.versions and (skip == 0 or not is_train)
        if self.send(event, is_legal):
            model.groups[group] = Bundle(is_train, rollouts)
            model.members.update({name: Member(group) for name in rollouts})
            model.next_position += is_train
            self.group_ids.append(group)
            self.rollout_ids += rollouts

    @rule(draw=ids, what=st.sampled_from(["complete", "evaluate", "drop", "park", "restart"]))
    def close(self, draw: int, what: str) -> None:
        self.send_closing(self.group_for(what, draw), what)

    def send_closing(self, name: str, what: str) -> None:
        model, at_s = self.model, self.now()
        fresh = (self.name("rol"), self.name("rol"))
        choices: dict[str, e.AnyEvent] = {
            "complete": e.GroupCompleted(at_s=at_s, group_id=name),
            "evaluate": e.GroupEvaluated(at_s=at_s, group_id=name),
            "drop": e.GroupDropped(at_s=at_s, group_id=name, reason=e.DropReason.CANCELLED, detail="why"),
            "park": e.GroupParked(at_s=at_s, group_id=name, reason=e.RestartReason.ORPHANED),
            "restart": e.GroupRestarted(
                at_s=at_s, group_id=name, reason=e.RestartReason.STALE, rollout_ids=fresh, admitted_version=0
            ),
        }
        if not self.send(choices[what], model.may_close(what, name)):
            return
        model.close(what, name, fresh)
        self.rollout_ids += fresh if what == "restart" else ()

    @rule(draw=ids, skip=st.sampled_from([0, 0, 0, 1]), is_whole=st.sampled_from([True, True, False]))
    def begin_step(self, draw: int, skip: int, is_whole: bool) -> None:
        self.send_step(self.group_for("begin", draw), skip, is_whole)

    def send_step(self, name: str, skip: int, is_whole: bool) -> None:
        model = self.model
        group = model.groups.get(name)
        members = [model.members[m] for m in group.members] if group else []
        samples = [f"{m.attempt}/0" for m in members if m.state == "ACCEPTED"]
        event = e.StepBegun(
            at_s=self.now(),
            step=model.next_step + skip,
            parent_version=model.next_step,
            group_ids=(name,),
            sample_ids=tuple(samples if is_whole else [*samples, "att_of_another/0"]),
            batch_digest="b",
        )
        if self.send(event, skip == 0 and is_whole and model.may_close("begin", name)):
            assert group is not None
            model.trained += model.accepted_tokens(group)
            model.trained_groups += 1
            group.state = "CONSUMED"
            for member in members:
                member.state = "CONSUMED" if member.state == "ACCEPTED" else member.state
            model.next_step += 1
            self.at_s = self.state.at_s
            self.publish()

    @rule(step=st.integers(0, 3))
    def void_a_step_whose_weights_survived(self, step: int) -> None:
        self.send(e.StepVoided(at_s=self.now(), step=step), False)

    # --- rollouts and attempts --------------------------------------------------------------------

    @rule(draw=ids, tokens=st.integers(0, 9), flaw=st.sampled_from([None, None, None, "number", "attempt", "version"]))
    def lease(self, draw: int, tokens: int, flaw: str | None) -> None:
        attempt = self.attempt_ids[draw % len(self.attempt_ids)] if flaw == "attempt" else self.name("att")
        self.send_lease(self.rollout_for("lease", draw), attempt, tokens, flaw)

    def send_lease(self, name: str, attempt: str, tokens: int, flaw: str | None = None) -> None:
        model, member = self.model, self.model.members.get(name)
        group = model.groups[member.group] if member else None
        version = model.versions[-1] if group is None or group.is_train else 0
        number = (member.number if member else 0) + 1
        event = e.Leased(
            at_s=self.now(),
            rollout_id=name,
            attempt_id=attempt,
            attempt_number=number - (flaw == "number"),
            worker_id="wrk",
            policy_version=99 if flaw == "version" else version,
            expires_at_s=1e9,
        )
        is_used = attempt in model.known or attempt in model.over
        is_legal = model.may("lease", member) and flaw not in ("number", "version") and not is_used
        if self.send(event, is_legal):
            assert member is not None
            model.move("lease", member)
            member.attempt, member.number, member.version = attempt, number, version
            member.held, member.is_sealed = tokens, False
            model.known[attempt], model.recorded[attempt] = name, tokens
            self.attempt_ids.append(attempt)

    @rule(draw=ids)
    def run(self, draw: int) -> None:
        self.send_run(self.attempt_for("run", draw))

    def send_run(self, attempt: str) -> None:
        member = self.model.of_attempt(attempt)
        if self.send(e.Running(at_s=self.now(), attempt_id=attempt), self.model.may("run", member)):
            assert member is not None
            self.model.move("run", member)

    @rule(draw=ids, late=st.sampled_from([0, 0, 0, 1]))
    def seal(self, draw: int, late: int) -> None:
        self.send_seal(self.attempt_for("seal", draw), late)

    def send_seal(self, attempt: str, late: int = 0) -> None:
        member = self.model.of_attempt(attempt)
        report = ArtifactReport(
            attempt_id=attempt,
            attempt_number=(member.number if member else 1) - late,
            trace=sealed_trace(attempt, member.held if member else 1),
            artifact_digest=f"artifact of {attempt}",
        )
        is_legal = self.model.may("seal", member) and not late
        if self.send(e.ArtifactReady(at_s=self.now(), report=report), is_legal):
            assert member is not None
            self.model.move("seal", member)
            member.is_sealed = True
            member.tokens += member.held

    @rule(draw=ids, is_other=st.sampled_from([False, False, False, True]))
    def score(self, draw: int, is_other: bool) -> None:
        self.send_score(self.attempt_for("score", draw), is_other)

    def send_score(self, attempt: str, is_other: bool = False) -> None:
        member = self.model.of_attempt(attempt)
        score = Score(job_id="j", attempt_id=attempt, outcome=Outcome.SCORED, value=1.0, verifier_version="v")
        digest = "another" if is_other else f"artifact of {attempt}"
        is_legal = self.model.may("score", member) and not is_other
        if self.send(e.Scored(at_s=self.now(), score=score, artifact_digest=digest), is_legal):
            assert member is not None
            self.model.move("score", member)

    @rule(draw=ids, what=st.sampled_from(["grader_failed", "accept", "reject"]))
    def judge(self, draw: int, what: str) -> None:
        self.send_verdict(self.attempt_for(what, draw), what)

    def send_verdict(self, attempt: str, what: str) -> None:
        member, at_s = self.model.of_attempt(attempt), self.now()
        choices: dict[str, e.AnyEvent] = {
            "grader_failed": e.GraderFailed(
                at_s=at_s, attempt_id=attempt, job_id="j", outcome=Outcome.GRADER_FAILED, reason="grader"
            ),
            "accept": e.Accepted(at_s=at_s, attempt_id=attempt),
            "reject": e.Rejected(at_s=at_s, attempt_id=attempt, reason=e.RejectReason.RATIO),
        }
        if self.send(choices[what], self.model.may(what, member)):
            assert member is not None
            self.model.move(what, member)
            self.model.rejected["ratio"] += member.held if what == "reject" else 0

    @precondition(lambda self: any(group.state == "OPEN" for group in self.model.groups.values()))
    @rule(
        draw=ids,
        until=st.sampled_from(["RUNNING", "ARTIFACT_READY", "SCORED", "ACCEPTED", "ACCEPTED", "ACCEPTED"]),
        verdict=st.sampled_from(["accept", "accept", "reject"]),
        tokens=st.integers(1, 9),
    )
    def carry_on(self, draw: int, until: str, verdict: str, tokens: int) -> None:
        """A whole group, from wherever its members stand: random walks alone seldom come to an end."""
        likely = [group for group in self.model.groups.values() if group.state == "OPEN"]
        self.carry(likely[draw % len(likely)], until, verdict, tokens)

    @rule(draw=ids, verdict=st.sampled_from(["accept", "accept", "reject"]), is_consumed=st.booleans())
    def bring_to_a_step(self, draw: int, verdict: str, is_consumed: bool) -> None:
        """As the trainer needs it."""
        names = [name for name, group in self.model.groups.items() if group.state == "OPEN" and group.is_train]
        if names:
            name = names[draw % len(names)]
            self.carry(self.model.groups[name], "ACCEPTED", verdict, 1 + draw % 9)
            self.send_closing(name, "complete")
            if is_consumed:
                self.send_step(name, 0, True)

    def carry(self, group: Bundle, until: str, verdict: str, tokens: int) -> None:
        for name in group.members:
            member = self.model.members[name]
            if member.state == "INFRA_FAILED":
                self.send_retry(name, 0.0)
            if member.state == "PENDING":
                self.send_lease(name, self.name("att"), tokens)
            attempt = member.attempt or NOBODY
            if member.state == "LEASED":
                self.send_run(attempt)
            if member.state == "RUNNING" and until != "RUNNING":
                self.send_seal(attempt)
            if member.state == "ARTIFACT_READY" and until != "ARTIFACT_READY":
                self.send_score(attempt)
            if member.state == "SCORED" and until != "SCORED":
                self.send_verdict(attempt, verdict)

    @rule(draw=ids, is_counted=st.booleans())
    def fail(self, draw: int, is_counted: bool) -> None:
        self.send_failure(self.attempt_for("fail", draw), is_counted)

    def send_failure(self, attempt: str, is_counted: bool = True) -> None:
        model = self.model
        member = model.of_attempt(attempt)
        is_sealed = member is not None and member.is_sealed
        event = e.InfraFailed(
            at_s=self.now(),
            attempt_id=attempt,
            outcome=Outcome.INFRA_FAILED,
            reason="died",
            lost_tokens=0 if member is None or is_sealed else member.held,
            is_counted=is_counted,
        )
        if self.send(event, model.may("fail", member)):
            assert member is not None
            model.move("fail", member)
            model.lost["died"] += member.held
            member.tokens += 0 if is_sealed else member.held
            member.failures += is_counted
            model.end_attempt(member)

    @rule(draw=ids)
    def expire(self, draw: int) -> None:
        self.send_expiry(self.attempt_for("expire", draw))

    def send_expiry(self, attempt: str) -> None:
        model = self.model
        member = model.of_attempt(attempt)
        event = e.LeaseExpired(at_s=self.now(), attempt_id=attempt, lost_tokens=member.held if member else 0)
        if self.send(event, model.may("expire", member)):
            assert member is not None
            model.move("expire", member)
            model.lost["lease_expired"] += member.held
            member.tokens += member.held
            member.failures += 1
            model.end_attempt(member, "expired")

    @rule(draw=ids, wait_s=st.floats(0.0, 100.0))
    def retry(self, draw: int, wait_s: float) -> None:
        self.send_retry(self.rollout_for("retry", draw), wait_s)

    def send_retry(self, name: str, wait_s: float) -> None:
        member = self.model.members.get(name)
        event = e.RolloutRetried(at_s=self.now(), rollout_id=name, not_before_s=self.now() + wait_s)
        if self.send(event, self.model.may("retry", member)):
            assert member is not None
            self.model.move("retry", member)

    @rule(draw=ids, reason=st.sampled_from([*map(str, e.BudgetReason), "cancelled"]))
    def cancel(self, draw: int, reason: str) -> None:
        self.send_cancellation(self.rollout_for("cancel", draw), reason)

    def send_cancellation(self, name: str, reason: str = "cancelled") -> None:
        model = self.model
        member = model.members.get(name)
        is_held = member is not None and member.state in WITH_A_WORKER
        lost_tokens = member.held if member is not None and is_held else 0
        event = e.RolloutCancelled(at_s=self.now(), rollout_id=name, reason=reason, lost_tokens=lost_tokens)
        if not self.send(event, model.may("cancel", member)):
            return
        assert member is not None
        was = model.move("cancel", member)
        member.tokens += lost_tokens
        model.lost[reason] += lost_tokens
        model.rejected[reason] += member.held if was == "ARTIFACT_READY" else 0
        if is_held:
            model.end_attempt(member)

    @rule()
    def send_all_that_may_not_follow(self) -> None:
        """Every event that the model forbids, for all that lives and for some that does not."""
        model = self.model
        for attempt in [*model.known, *list(model.over)[-3:], NOBODY]:
            self.send_seal(attempt, late=1)
            self.send_score(attempt, is_other=True)
            for what, send in (
                ("run", self.send_run),
                ("seal", self.send_seal),
                ("score", self.send_score),
                ("fail", self.send_failure),
                ("expire", self.send_expiry),
                ("grader_failed", lambda attempt: self.send_verdict(attempt, "grader_failed")),
                ("accept", lambda attempt: self.send_verdict(attempt, "accept")),
                ("reject", lambda attempt: self.send_verdict(attempt, "reject")),
            ):
                if not model.may(what, model.of_attempt(attempt)):
                    send(attempt)
        for name in [*model.members, *self.rollout_ids[-3:], NOBODY]:
            self.send_lease(name, "att_again", 1, "number")
            for what, send in (
                ("lease", lambda name: self.send_lease(name, "att_again", 1)),
                ("retry", lambda name: self.send_retry(name, 0.0)),
                ("cancel", self.send_cancellation),
            ):
                if not model.may(what, model.members.get(name)):
                    send(name)
        for name in [*model.groups, *self.group_ids[-3:], NOBODY]:
            for what in ("complete", "evaluate", "drop", "park", "restart"):
                if not model.may_close(what, name):
                    self.send_closing(name, what)
            if not model.may_close("begin", name):
                self.send_step(name, 0, True)

    @precondition(lambda self: self.at_s > 0)
    @rule(draw=ids)
    def go_back_in_time(self, draw: int) -> None:
        name = self.rollout_for("retry", draw)
        self.send(e.RolloutRetried(at_s=self.at_s - 0.5, rollout_id=name, not_before_s=0.0), False)

    # --- what must stand --------------------------------------------------------------------------

    @invariant()
    def every_rollout_and_group_stands_where_the_model_says(self) -> None:
        if not hasattr(self, "model"):
            return
        state, model = self.state, self.model
        found = {
            name: (r.group.group_id, r.state.value, r.attempt_id, r.attempt_number, r.num_failures, r.num_tokens)
            for name, r in state.rollouts.items()
        }
        assert found == {
            name: (m.group, m.state, m.attempt, m.number, m.failures, m.tokens) for name, m in model.members.items()
        }
        groups = {name: (g.state.value, [r.rollout_id for r in g.rollouts]) for name, g in state.groups.items()}
        assert groups == {name: (g.state, g.members) for name, g in model.groups.items()}
        assert set(state.live_groups) == {name for name, g in model.groups.items() if g.state != "CONSUMED"}
        for name, group in state.groups.items():
            assert group.num_open == sum(model.members[m].state not in ENDED for m in model.groups[name].members)

    @invariant()
    def the_index_says_how_the_groups_stand(self) -> None:
        live = [group for group in self.state.live_groups.values() if group.purpose is Purpose.TRAIN]
        standing = self.state.standing
        by_age = sorted(live, key=lambda group: group.order)
        assert standing.parked() == [group for group in by_age if group.state is GroupState.PARKED]
        assert standing.num_not_complete == sum(group.state is not GroupState.COMPLETE for group in live)
        found = {step: (list(one.open.values()), one.complete_in_order()) for step, one in standing.cohorts()}
        steps = sorted({group.admitted_step for group in live if group.state is not GroupState.PARKED})
        assert list(found) == steps
        for step, (opened, complete) in found.items():
            mine = [group for group in by_age if group.admitted_step == step]
            assert opened == [group for group in mine if group.state is GroupState.OPEN]
            assert complete == [group for group in mine if group.state is GroupState.COMPLETE]

    @invariant()
    def every_attempt_is_live_or_over_as_the_model_says(self) -> None:
        if not hasattr(self, "model"):
            return
        assert {name: r.rollout_id for name, r in self.state.attempts.items()} == self.model.known
        assert self.state.ended_attempts == self.model.over
        held = Counter(m.version for m in self.model.members.values() if m.state in WITH_A_WORKER)
        assert {v: x.num_live for v, x in self.state.versions.items()} == {v: held[v] for v in self.model.versions}

    @invariant()
    def every_prompt_and_token_is_booked_as_the_model_says(self) -> None:
        if not hasattr(self, "model"):
            return
        model = self.model
        found = books(self.state, model.recorded)
        assert found.are_closed, found
        assert (found.prompts.issued, found.prompts.trained) == (model.next_position, model.trained_groups)
        assert found.prompts.dropped == dict(+model.dropped)
        assert (found.tokens.trained, found.tokens.evaluated) == (model.trained, model.evaluated)
        assert (found.tokens.lost, found.tokens.rejected) == (dict(+model.lost), dict(+model.rejected))

    @invariant()
    def the_outbox_offers_exactly_what_can_go_on(self) -> None:
        if not hasattr(self, "model"):
            return
        offered = Counter(type(effect).__name__ for effect in outbox(self.state))
        states = Counter(m.state for m in self.model.members.values())
        assert +offered == +Counter(
            WorkWaits=states["PENDING"],
            AttemptBegan=states["LEASED"] + states["RUNNING"],
            ScoreWaits=states["ARTIFACT_READY"],
        )


TestStateMachine = StateMachine.TestCase
TestStateMachine.settings = settings(
    max_examples=80, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
