"""Decisions by way of sorted replicas and lanes, against a plain look at all replicas and all requests."""

from collections.abc import Callable
from dataclasses import dataclass, field

import hypothesis.strategies as st
from hypothesis import settings as hypothesis_settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from steelyard.inference.dispatcher import Dispatcher, Placed, Ticket
from steelyard.inference.homes import Homes
from steelyard.inference.placement import Candidate, Need, choose, has_room, keep_s
from steelyard.inference.projection import OutputProjection, Pace
from steelyard.inference.replica_index import ReplicaIndex
from steelyard.inference.replica_state import ReplicaState
from steelyard.testing.versions import request_for
from steelyard.types import FinishReason, GenerateRequest, GenerateResult, VersionSpan

NAMES = tuple(f"rep{index}" for index in range(5))
CAPACITIES = (2000, 2000, 2000, 5000, None)
RECOVERY_WAIT_S = 5.0
QUANTILE = 0.9
Decided = tuple[str, str | None, str | None]


def new_state(name: str, fleet: Pace) -> ReplicaState:
    state = ReplicaState(name, fleet, lambda: None)
    state.capacity_tokens = CAPACITIES[NAMES.index(name)]
    state.versions = {0}
    return state


@dataclass(eq=False)
class Asked:
    """One request in the plain look. ``waits_for``: its home; None, any replica."""

    request: GenerateRequest
    flow: str
    need: Need
    place: tuple[int, int]
    waits_for: str | None = None
    unserved_since_s: float | None = None


@dataclass
class PlainDispatcher:
    """The rules of the dispatcher, followed by looking at everything each time."""

    num_looked_at: int
    fleet: Pace = field(default_factory=Pace)
    states: dict[str, ReplicaState] = field(default_factory=dict)
    waiting: list[Asked] = field(default_factory=list)
    tags: dict[str, float] = field(default_factory=dict)
    virtual: float = 0.0
    changed: set[str] = field(default_factory=set)
    num_asked: int = 0

    def __post_init__(self) -> None:
        self.homes = Homes(self.changed.add)
        self.projections: dict[str, OutputProjection] = {}

    def add_replica(self, state: ReplicaState) -> None:
        self.states[state.replica_id] = state
        state.watch(self.changed.add)
        self.changed.add(state.replica_id)

    def remove_replica(self, name: str) -> None:
        self.homes.drop_replica(name)
        del self.states[name]
        self.changed.add(name)

    def projection(self, flow: str) -> OutputProjection:
        return self.projections.setdefault(flow, OutputProjection(QUANTILE))

    def submit(self, request: GenerateRequest, flow: str) -> Asked:
        self.num_asked += 1
        output = self.projection(flow).tokens(request.sampling.max_tokens)
        need = Need(kv_tokens=len(request.prompt_token_ids) + output, output_tokens=output)
        if not any(one.flow == flow for one in self.waiting):
            self.tags[flow] = max(self.tags.get(flow, self.virtual), self.virtual)
        asked = Asked(request, flow, need, (int(self.homes.of(request) is None), self.num_asked))
        self.waiting.append(asked)
        return asked

    def dispatch(self, now_s: float) -> list[Decided]:
        """Of all that may be looked at now, one after the other in order; what waits for the same stands behind."""
        changed, decided = set(self.changed), list[Decided]()
        self.changed.clear()
        blocked, full = set[object](), set[str]()
        while True:
            open_ones = [
                one
                for one in self.waiting
                if (one.waits_for is None or one.waits_for in changed) and lane_of(one) not in blocked
            ]
            if not open_ones:
                return decided
            asked = min(open_ones, key=lambda one: (self.tags[one.flow], one.flow, one.place))
            before = lane_of(asked)
            found = self.decide(asked, full, now_s)
            if found is not None:
                self.waiting.remove(asked)
                decided.append(found)
                if found[1] is not None:
                    self.virtual = max(self.virtual, self.tags[asked.flow])
                    self.tags[asked.flow] += asked.need.kv_tokens
            elif lane_of(asked) == before:
                blocked.add(before)
                decided += self.give_up(before, now_s) if asked.unserved_since_s is not None else []

    def give_up(self, lane: object, now_s: float) -> list[Decided]:
        mine = [one for one in self.waiting if lane_of(one) == lane]
        flows = list(dict.fromkeys(one.flow for one in sorted(self.waiting, key=lambda one: one.place)))
        ended = [one for one in mine if self.unserved(one, now_s)]
        ended.sort(key=lambda one: (flows.index(one.flow), one.place))
        for one in ended:
            self.waiting.remove(one)
        return [(one.request.request_id, None, None) for one in ended]

    def unserved(self, asked: Asked, now_s: float) -> bool:
        if asked.unserved_since_s is None:
            asked.unserved_since_s = now_s
        is_held = any(state.can_sample(asked.request) for state in self.states.values())
        return not is_held or now_s - asked.unserved_since_s >= RECOVERY_WAIT_S

    def decide(self, asked: Asked, full: set[str], now_s: float) -> Decided | None:
        able = [state for state in self.states.values() if state.weight > 0.0 and state.can_sample(asked.request)]
        able = [state for state in able if not state.is_draining] or able
        if not able:
            asked.waits_for = None
            return (asked.request.request_id, None, None) if self.unserved(asked, now_s) else None
        asked.unserved_since_s = None
        home = self.homes.of(asked.request)
        home_id = home.replica_id if home is not None and self.states.get(home.replica_id) in able else None

        def is_out(name: str) -> bool:
            ahead = [one for one in self.waiting if one.waits_for == name and one.place < asked.place]
            return name in full or bool(ahead)

        looks = [self.look(asked, state, is_out(state.replica_id), now_s) for state in self.near(able, home_id, is_out)]
        roomy = [one for one in looks if one.has_room]
        at_home = [self.look(asked, self.states[home_id], is_out(home_id), now_s)] if home_id is not None else []
        chosen = choose(asked.need, home_id, at_home + roomy)
        if chosen is None:
            asked.waits_for = home_id if roomy else None
            full.update(() if asked.waits_for is not None else (state.replica_id for state in able))
            return None
        leaves = home_id is not None and self.homes.own(asked.request, home_id) is not None
        ends_at_s = now_s + chosen.prefill_s + asked.need.output_tokens * chosen.token_s
        self.states[chosen.replica_id].reserve(asked.request.request_id, asked.need.kv_tokens, ends_at_s)
        self.homes.start(asked.request, chosen.replica_id)
        return (
            asked.request.request_id,
            chosen.replica_id,
            home_id if leaves and chosen.replica_id != home_id else None,
        )

    def near(self, able: list[ReplicaState], home_id: str | None, is_out: Callable[[str], bool]) -> list[ReplicaState]:
        """The first few with most room, of each sort."""
        found = list[ReplicaState]()
        kinds = {kind_of(state) for state in able}
        for kind in kinds:
            alike = [
                state
                for state in able
                if kind_of(state) == kind and state.replica_id != home_id and not is_out(state.replica_id)
            ]
            alike.sort(key=self.key)
            found += alike[: self.num_looked_at]
        return found

    def key(self, state: ReplicaState) -> tuple[float, float, str]:
        if state.capacity_tokens is None:
            free = float("inf")
        elif state.num_open == 0:
            free = state.capacity_tokens
        else:
            free = state.capacity_tokens - state.projected_tokens - self.homes.kept_tokens(state.replica_id)
        return -free * state.weight, state.projected_tokens / state.weight, state.replica_id

    def look(self, asked: Asked, state: ReplicaState, is_closed: bool, now_s: float) -> Candidate:
        need, own = asked.need, self.homes.own(asked.request, state.replica_id)
        reprefill_s = state.pace.prefill_s(1, now_s)
        others = [one for one in self.homes.at(state.replica_id) if one.idle_since_s is not None and one is not own]
        kept = sum(one.kept_tokens for one in others)
        used = state.projected_tokens + need.kv_tokens
        if kept > 0 and state.capacity_tokens is not None and used <= state.capacity_tokens < used + kept:
            kept = sum(
                one.kept_tokens
                for one in others
                if now_s - (one.idle_since_s or 0.0) < one.kept_tokens * keep_s(reprefill_s, state.num_open)
            )
        roomy = not is_closed and has_room(
            need,
            capacity_tokens=state.capacity_tokens,
            projected_tokens=state.projected_tokens,
            kept_tokens=kept,
            num_open=state.num_open,
        )
        lacking = len(asked.request.prompt_token_ids) - (own.kept_tokens if own is not None else 0)
        return Candidate(
            replica_id=state.replica_id,
            weight=state.weight,
            has_room=roomy,
            projected_tokens=state.projected_tokens,
            prefill_s=state.pace.prefill_s(max(0, lacking), now_s),
            token_s=state.pace.token_s(state.num_open + 1, now_s),
            room_in_s=0.0 if roomy else state.room_in_s(need.kv_tokens, kept, now_s),
        )

    def finish(self, asked: Asked, replica_id: str, result: GenerateResult, now_s: float) -> None:
        request, state = asked.request, self.states.get(replica_id)
        is_there = state is not None and state.serves(request.request_id)
        mean_open = state.free(request.request_id) if state is not None and is_there else 1.0
        is_whole = result.finish_reason is FinishReason.STOP
        num_prompt, num_sampled = len(request.prompt_token_ids), len(result.token_ids)
        self.homes.end(request, replica_id, num_prompt + num_sampled if is_whole else 0, now_s)
        if is_whole:
            self.projection(asked.flow).note(request.sampling.max_tokens, num_sampled)
            if state is not None:
                state.pace.note(result, num_prompt, mean_open, now_s)
            true_cost = num_prompt + num_sampled - asked.need.kv_tokens
            self.tags[asked.flow] = max(0.0, self.tags[asked.flow] + true_cost)


def lane_of(asked: Asked) -> object:
    request = asked.request
    return asked.waits_for or (request.policy_version, request.follows_updates)


def kind_of(state: ReplicaState) -> object:
    size = None if state.capacity_tokens is None else state.capacity_tokens.bit_length()
    return frozenset(state.versions), size, state.is_draining


class BothMachine(RuleBasedStateMachine):
    """The same happens to the dispatcher and to the plain one; they must decide alike."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.num_asked = 0
        self.placed: dict[str, tuple[Ticket, Asked, str]] = {}
        self.waiting: dict[str, tuple[Ticket, Asked]] = {}
        self.fleet = Pace()

    @initialize(num_looked_at=st.sampled_from([1, 2, 8]))
    def start(self, num_looked_at: int) -> None:
        self.quick = Dispatcher(
            self.fleet,
            projection_quantile=QUANTILE,
            recovery_wait_s=RECOVERY_WAIT_S,
            num_looked_at=num_looked_at,
        )
        self.plain = PlainDispatcher(num_looked_at)
        for name in NAMES:
            self.quick.add_replica(new_state(name, self.fleet))
            self.plain.add_replica(new_state(name, self.plain.fleet))

    def look(self) -> None:
        quick: list[Decided] = [
            (
                one.ticket.request.request_id,
                one.replica_id if isinstance(one, Placed) else None,
                one.moved_from if isinstance(one, Placed) else None,
            )
            for one in self.quick.dispatch(self.now_s)
        ]
        plain = self.plain.dispatch(self.now_s)
        assert sorted(map(str, quick)) == sorted(map(str, plain))
        for request_id, replica_id, _ in quick:
            ticket, asked = self.waiting.pop(request_id)
            if replica_id is not None:
                self.placed[request_id] = ticket, asked, replica_id

    def on_both(self, name: str, act: Callable[[ReplicaState], None]) -> None:
        for states in (self.quick.replicas, self.plain.states):
            if name in states:
                act(states[name])
        self.look()

    @rule(
        flow=st.sampled_from("ab"),
        attempt=st.integers(0, 5),
        num_prompt=st.integers(1, 1900),
        max_tokens=st.integers(1, 60),
        version=st.sampled_from([0, 0, 0, 0, 0, 1]),
        follows=st.booleans(),
    )
    def ask(self, flow: str, attempt: int, num_prompt: int, max_tokens: int, version: int, follows: bool) -> None:
        self.num_asked += 1
        key = f"att{attempt}"
        request = request_for(
            f"req{self.num_asked}", range(num_prompt), key=key, max_tokens=max_tokens, version=version, follows=follows
        )
        ticket = Ticket(request, flow, self.now_s)
        self.quick.submit(ticket)
        self.waiting[request.request_id] = ticket, self.plain.submit(request, flow)
        self.look()

    @precondition(lambda self: self.placed)
    @rule(data=st.data(), num_tokens=st.integers(1, 60), passes_s=st.floats(0, 1), stops=st.booleans())
    def answer(self, data: st.DataObject, num_tokens: int, passes_s: float, stops: bool) -> None:
        self.now_s += passes_s
        ticket, asked, replica_id = self.placed.pop(data.draw(st.sampled_from(sorted(self.placed))))
        num_tokens = min(num_tokens, asked.request.sampling.max_tokens)
        result = GenerateResult(
            request_id=asked.request.request_id, token_ids=(1,) * num_tokens, logprobs=(-1.0,) * num_tokens,
            kept_logmass=(0.0,) * num_tokens, version_spans=(VersionSpan(start=0, version=0),),
            finish_reason=FinishReason.STOP if stops else FinishReason.ENGINE_ERROR, replica_id=replica_id,
            load_id="load", prefill_s=0.1, decode_s=0.1 * num_tokens,
        )  # fmt: skip
        self.quick.finish(ticket, replica_id, result, self.now_s)
        self.plain.finish(asked, replica_id, result, self.now_s)
        self.look()

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        ticket, asked = self.waiting.pop(data.draw(st.sampled_from(sorted(self.waiting))))
        self.quick.withdraw(ticket)
        self.plain.waiting.remove(asked)

    @rule(attempt=st.integers(0, 5))
    def release(self, attempt: int) -> None:
        self.quick.homes.release(f"att{attempt}")
        self.plain.homes.release(f"att{attempt}")
        self.look()

    @rule(name=st.sampled_from(NAMES), works=st.booleans())
    def outcome(self, name: str, works: bool) -> None:
        self.on_both(name, lambda state: state.worked() if works else state.failed("gone"))

    @rule(name=st.sampled_from(NAMES), drains=st.booleans())
    def drain(self, name: str, drains: bool) -> None:
        self.on_both(name, lambda state: state.now_drains(drains))

    @rule(name=st.sampled_from(NAMES), versions=st.sampled_from([(0,), (0,), (1,), (0, 1)]))
    def update(self, name: str, versions: tuple[int, ...]) -> None:
        self.on_both(name, lambda state: state.now_holds(set(versions)))

    @rule(name=st.sampled_from(NAMES))
    def start_anew(self, name: str) -> None:
        if name in self.plain.states:
            self.quick.remove_replica(name)
            self.plain.remove_replica(name)
        else:
            self.quick.add_replica(new_state(name, self.fleet))
            self.plain.add_replica(new_state(name, self.plain.fleet))
        self.look()

    @rule(passes_s=st.floats(0, 10))
    def pass_time(self, passes_s: float) -> None:
        self.now_s += passes_s
        self.look()

    @invariant()
    def both_know_the_same_of_what_waits_and_where_is_room(self) -> None:
        assert self.quick.num_waiting == len(self.plain.waiting) == len(self.waiting)
        quick = {name: (one.num_open, one.projected_tokens) for name, one in self.quick.replicas.items()}
        assert quick == {name: (one.num_open, one.projected_tokens) for name, one in self.plain.states.items()}


BothMachine.TestCase.settings = hypothesis_settings(max_examples=60, stateful_step_count=50, deadline=None)
TestDispatcherAgainstAPlainLook = BothMachine.TestCase


def test_a_decision_looks_at_few_replicas_however_many_there_are() -> None:
    index, fleet = ReplicaIndex(lambda _: 0), Pace()
    for number in range(1000):
        state = ReplicaState(f"rep{number:04d}", fleet, lambda: None)
        state.capacity_tokens, state.versions = 1000, {0}
        index.add(state)
        if number not in (77, 500):
            state.reserve("busy", 100 + number, 1.0)
    index.settle()
    request = request_for("req", range(3))
    asked = list[str]()

    def is_out(name: str) -> bool:
        asked.append(name)
        return name == "rep0500"

    first = index.first_of(index.able(request), 3, is_out)
    assert [state.replica_id for state in first] == ["rep0077", "rep0000", "rep0001"]
    assert len(asked) == 4
