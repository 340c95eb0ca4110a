"""The router without its I/O, under any order of events."""

from dataclasses import dataclass, field

import hypothesis.strategies as st
import msgspec
from hypothesis import settings as hypothesis_settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from steelyard.inference.dispatcher import Dispatcher, Placed, Ticket, Unservable
from steelyard.inference.projection import Pace
from steelyard.inference.replica_state import ReplicaState
from steelyard.testing.versions import request_for
from steelyard.types import FinishReason, GenerateRequest, GenerateResult, VersionSpan

CAPACITY = 200
NAMES = ("rep0", "rep1", "rep2")


def answer(request: GenerateRequest, replica_id: str, num_tokens: int, reason: FinishReason) -> GenerateResult:
    return GenerateResult(
        request_id=request.request_id, token_ids=(1,) * num_tokens, logprobs=(-1.0,) * num_tokens,
        kept_logmass=(0.0,) * num_tokens, version_spans=(VersionSpan(start=0, version=0),), finish_reason=reason,
        replica_id=replica_id, load_id="load", prefill_s=0.1, decode_s=0.1 * num_tokens,
    )  # fmt: skip


@dataclass
class World:
    """Replicas and a dispatcher, with what became of every request."""

    now_s: float = 0.0
    states: dict[str, ReplicaState] = field(default_factory=dict)
    placed: dict[str, tuple[Ticket, str]] = field(default_factory=dict)
    waiting: dict[str, Ticket] = field(default_factory=dict)
    ended: dict[str, int] = field(default_factory=dict)
    num_asked: int = 0

    def __post_init__(self) -> None:
        fleet = Pace()
        self.dispatcher = Dispatcher(fleet, projection_quantile=0.9, recovery_wait_s=5.0)
        for name in NAMES:
            state = ReplicaState(name, fleet, lambda: None)
            state.capacity_tokens = CAPACITY
            state.versions = {0}
            self.states[name] = state
            self.dispatcher.add_replica(state)

    def ask(self, flow: str, attempt: int, num_prompt: int, max_tokens: int) -> Ticket:
        """A new request, queued."""
        self.num_asked += 1
        key = f"att{attempt}"
        request = request_for(f"req{self.num_asked}", range(num_prompt), key=key, max_tokens=max_tokens)
        ticket = Ticket(request, flow, self.now_s)
        self.waiting[request.request_id] = ticket
        self.dispatcher.submit(ticket)
        return ticket

    def look(self) -> None:
        """Dispatch, and note what was decided."""
        for decision in self.dispatcher.dispatch(self.now_s):
            request_id = decision.ticket.request.request_id
            del self.waiting[request_id]
            if isinstance(decision, Unservable):
                self.note_end(request_id)
            else:
                self.placed[request_id] = (decision.ticket, decision.replica_id)

    def note_end(self, request_id: str) -> None:
        self.ended[request_id] = self.ended.get(request_id, 0) + 1

    def end(self, request_id: str, num_tokens: int, reason: FinishReason) -> None:
        """A placed request is answered."""
        ticket, replica_id = self.placed.pop(request_id)
        num_tokens = min(num_tokens, ticket.request.sampling.max_tokens)
        result = answer(ticket.request, replica_id, num_tokens, reason)
        self.dispatcher.finish(ticket, replica_id, result, self.now_s)
        self.note_end(request_id)


class DispatcherMachine(RuleBasedStateMachine):
    """Requests come, end, fail and are withdrawn; replicas die, come back and drain."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()

    @rule(
        flow=st.sampled_from("ab"),
        attempt=st.integers(0, 12),
        num_prompt=st.integers(1, 150),
        max_tokens=st.integers(1, 120),
    )
    def ask(self, flow: str, attempt: int, num_prompt: int, max_tokens: int) -> None:
        self.world.ask(flow, attempt, num_prompt, max_tokens)
        self.world.look()

    @precondition(lambda self: self.world.placed)
    @rule(data=st.data(), num_tokens=st.integers(1, 120), passes_s=st.floats(0, 3))
    def answer(self, data: st.DataObject, num_tokens: int, passes_s: float) -> None:
        self.world.now_s += passes_s
        request_id = data.draw(st.sampled_from(sorted(self.world.placed)))
        reason = data.draw(st.sampled_from([FinishReason.STOP, FinishReason.CANCELLED, FinishReason.ENGINE_ERROR]))
        self.world.end(request_id, num_tokens, reason)
        self.world.look()

    @precondition(lambda self: self.world.waiting)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.world.waiting)))
        self.world.dispatcher.withdraw(self.world.waiting.pop(request_id))
        self.world.note_end(request_id)

    @rule(attempt=st.integers(0, 12))
    def release(self, attempt: int) -> None:
        self.world.dispatcher.homes.release(f"att{attempt}")
        self.world.look()

    @rule(name=st.sampled_from(NAMES), works=st.booleans())
    def outcome(self, name: str, works: bool) -> None:
        state = self.world.states[name]
        state.worked() if works else state.failed("gone")
        self.world.look()

    @rule(name=st.sampled_from(NAMES), drains=st.booleans())
    def drain(self, name: str, drains: bool) -> None:
        self.world.states[name].now_drains(drains)
        self.world.look()

    @rule(passes_s=st.floats(0, 10))
    def pass_time(self, passes_s: float) -> None:
        self.world.now_s += passes_s
        self.world.look()

    @invariant()
    def reservations_never_exceed_the_kv_but_for_a_single_request(self) -> None:
        for name, state in self.world.states.items():
            mine = [ticket.need.kv_tokens for ticket, at in self.world.placed.values() if at == name]
            assert (state.projected_tokens, state.num_open) == (sum(mine), len(mine))
            assert sum(mine) <= CAPACITY or len(mine) == 1

    @invariant()
    def every_request_is_in_exactly_one_place(self) -> None:
        places = [*self.world.waiting, *self.world.placed, *self.world.ended]
        assert len(places) == len(set(places)) == self.world.num_asked
        assert all(times == 1 for times in self.world.ended.values())
        assert self.world.dispatcher.num_waiting == len(self.world.waiting)

    def teardown(self) -> None:
        """Nobody starves: with replicas that live, and answers that come, every request ends."""
        world = self.world
        for state in world.states.values():
            state.now_drains(False)
            for _ in range(4):
                state.worked()
        for _ in range(2 * world.num_asked + 2):
            world.now_s += 100.0
            world.look()
            for request_id in sorted(world.placed):
                world.end(request_id, 5, FinishReason.STOP)
        assert not world.waiting and not world.placed
        assert all(state.num_open == state.projected_tokens == 0 for state in world.states.values())


DispatcherMachine.TestCase.settings = hypothesis_settings(max_examples=60, stateful_step_count=40, deadline=None)
TestDispatcher = DispatcherMachine.TestCase


def test_a_large_request_is_not_passed_for_ever_by_small_ones() -> None:
    world = World()
    for name in NAMES[1:]:
        world.dispatcher.remove_replica(name)
    world.ask("", 0, 50, 50)
    world.look()
    large = world.ask("", 1, 100, 90)
    for index in range(20):
        world.ask("", 2 + index, 10, 10)
        world.look()
        assert len(world.placed) == 1, "small ones wait behind it though they would fit"
    world.end("req1", 50, FinishReason.STOP)
    world.look()
    assert large.request.request_id in world.placed


def test_kv_between_two_calls_is_kept_free_until_that_has_cost_as_much_as_computing_it_again() -> None:
    world = World()
    for name in NAMES[1:]:
        world.dispatcher.remove_replica(name)
    world.ask("", 0, 90, 10)
    world.look()
    other = world.ask("", 1, 40, 40)
    world.look()
    world.end("req1", 10, FinishReason.STOP)
    assert world.states["rep0"].num_open == 1
    kept_s = world.states["rep0"].pace.prefill_s(100, world.now_s)
    world.ask("", 2, 40, 40)
    world.look()
    assert "req3" in world.waiting, "80 open, 100 kept, 80 asked of 200"
    world.now_s += 0.9 * kept_s
    world.look()
    assert "req3" in world.waiting
    world.now_s += 0.2 * kept_s
    world.look()
    assert "req3" in world.placed
    assert other.need.kv_tokens == 80


def test_a_conversation_that_comes_back_finds_its_kv_and_goes_before_new_ones() -> None:
    world = World()
    for name in NAMES[1:]:
        world.dispatcher.remove_replica(name)
    world.ask("", 0, 90, 10)
    world.look()
    world.ask("", 1, 90, 10)
    world.look()
    world.ask("", 2, 90, 10)
    world.end("req1", 10, FinishReason.STOP)
    world.ask("", 0, 100, 100)
    world.end("req2", 10, FinishReason.STOP)
    world.look()
    assert "req4" in world.placed and "req3" in world.waiting


def test_a_move_is_told_from_a_conversation_whose_home_died() -> None:
    world = World()
    world.ask("", 0, 20, 20)
    world.look()
    _, home = world.placed["req1"]
    world.end("req1", 5, FinishReason.STOP)
    for _ in range(4):
        world.states[home].failed("gone")
    world.ask("", 0, 30, 20)
    (decision,) = world.dispatcher.dispatch(world.now_s)
    assert isinstance(decision, Placed) and decision.replica_id != home and decision.moved_from is None


def test_who_waits_for_its_home_closes_it_to_those_behind_and_nothing_else_and_is_served_once_it_has_changed() -> None:
    world = World()
    states = {name: world.states[name] for name in NAMES[:2]}
    world.dispatcher.remove_replica(NAMES[2])
    for state in states.values():
        state.now_fits(10_000)
    # Both are well known to be fast at sampling and slow at prompts: 10 ms a prompt token, 1 ms a sampled one.
    for state in states.values():
        for _ in range(200):
            request = request_for("known", range(100))
            known = answer(request, state.replica_id, 100, FinishReason.STOP)
            known = msgspec.structs.replace(known, prefill_s=1.0, decode_s=0.1)
            state.pace.note(known, 100, 1.0, world.now_s)
    talk = world.ask("", 0, 6000, 10)
    world.look()
    home = world.placed[talk.request.request_id][1]
    other = next(name for name in states if name != home)
    world.end(talk.request.request_id, 10, FinishReason.STOP)
    states[home].reserve("blocker", 9000, world.now_s + 1.0)
    world.now_s += 500.0
    again = world.ask("", 0, 6020, 10)
    world.look()
    assert again.request.request_id in world.waiting, "a minute of prompts elsewhere is worse than a second here"
    states[home].free("blocker")
    states[home].reserve("smaller blocker", 5000, world.now_s + 1.0)
    fresh = world.ask("", 1, 3000, 10)
    world.look()
    assert world.placed[fresh.request.request_id][1] == other, "its home is closed to those behind it, others are not"
    states[home].free("smaller blocker")
    world.look()
    assert world.placed[again.request.request_id][1] == home
