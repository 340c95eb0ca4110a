"""Admission and placement of requests over replicas: the router without its I/O.

::

    submit --> queue (fair between flows) --dispatch--> reservation on a replica --finish--> room for others
                 `--- withdraw (deadline, cancelled)

A request is in exactly one place at a time: in the queue, or on one replica. The sum of what is reserved on a replica
never exceeds its KV, but for a single request on an otherwise idle one.

A decision costs the same for few replicas and requests and for many. It looks closely at the home of the conversation
and at the first few of the replicas that are alike, see :mod:`steelyard.inference.replica_index`. A request that waits
for its home is looked at again when its home has changed; of those that wait for any replica, the first.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from steelyard.inference.fair_queue import FairQueue, Waiting
from steelyard.inference.homes import Home, Homes
from steelyard.inference.placement import Candidate, Need, choose, done_in_s, has_room, keep_s, pays
from steelyard.inference.projection import OutputProjection, Pace
from steelyard.inference.replica_index import Alike, Kind, ReplicaIndex
from steelyard.inference.replica_state import ReplicaState
from steelyard.types import FinishReason, GenerateRequest, GenerateResult

_RATE_WINDOW_S = 10.0
_FIRST_GUESS_S = 1.0

NUM_LOOKED_AT = 8
"""See :class:`Dispatcher`. The least loaded of d chosen at random is nearly
as good as the least loaded of all, ever less is gained by each more (Mitzenmacher, IEEE TPDS 12, 2001), and these are
not chosen at random."""

_AnyLane = tuple[int, bool, int | None]
"""Where requests wait for any replica, by what they may be sampled with; those that were tried wait each alone."""


@dataclass(eq=False)
class Ticket:
    """One request on its way through the router.

    ``tried``: replicas that failed it. ``unserved_since_s``: since when all replicas that hold its version are dead.
    """

    request: GenerateRequest
    flow: str
    arrived_at_s: float
    tried: set[str] = field(default_factory=set)
    need: Need = field(default_factory=lambda: Need(kv_tokens=0, output_tokens=0))
    entry: Waiting["Ticket"] | None = None
    unserved_since_s: float | None = None
    is_waiting: bool = False


@dataclass(frozen=True)
class Placed:
    """The request has its KV reserved on a replica. ``moved_from``: a replica that could have gone on serving it."""

    ticket: Ticket
    replica_id: str
    moved_from: str | None = None


@dataclass(frozen=True)
class Unservable:
    """No replica can serve the request, and none is expected to."""

    ticket: Ticket
    reason: str


Decision = Placed | Unservable


class Dispatcher:
    """Which request goes where, and which wait.

    Args:
        fleet: the pace of all of them together.
        projection_quantile: see :class:`~steelyard.inference.projection.OutputProjection`.
        recovery_wait_s: how long a request may wait while all replicas that hold its version are dead, in seconds.
        num_looked_at: replicas, of those that are alike, that a decision looks at closely.
    """

    def __init__(
        self,
        fleet: Pace,
        *,
        projection_quantile: float,
        recovery_wait_s: float,
        num_looked_at: int = NUM_LOOKED_AT,
    ) -> None:
        self._fleet = fleet
        self._num_looked_at = num_looked_at
        self._quantile = projection_quantile
        self._recovery_wait_s = recovery_wait_s
        self._queue: FairQueue[Ticket] = FairQueue()
        self._any_lanes: dict[_AnyLane, None] = {}
        self._projections: dict[str, OutputProjection] = {}
        self.homes = Homes(self._note)
        self._index = ReplicaIndex(self.homes.kept_tokens)
        self._changed: dict[str, None] = {}
        self._freed_tokens = 0.0
        self._freed_at_s = -math.inf

    @property
    def replicas(self) -> Mapping[str, ReplicaState]:
        """By id, dead ones included."""
        return self._index.states

    def add_replica(self, state: ReplicaState) -> None:
        """Take a replica on."""
        self._index.add(state)

    def remove_replica(self, replica_id: str) -> None:
        """Send nothing there any more; whoever was at home there starts anew elsewhere."""
        self.homes.drop_replica(replica_id)
        self._index.remove(replica_id)

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return len(self._queue)

    def waiting_by_flow(self) -> dict[str, int]:
        """Requests in the queue, by flow."""
        return self._queue.waiting_by_flow()

    def set_flow_weight(self, flow: str, weight: float) -> None:
        """See :meth:`steelyard.inference.fair_queue.FairQueue.set_weight`."""
        self._queue.set_weight(flow, weight)

    def submit(self, ticket: Ticket) -> None:
        """Queue a request; one that is tried again takes its old place."""
        request = ticket.request
        output = self._projection(ticket.flow).tokens(request.sampling.max_tokens)
        ticket.need = Need(kv_tokens=len(request.prompt_token_ids) + output, output_tokens=output)
        number = None if ticket.entry is None else ticket.entry.number
        ticket.entry = self._queue.push(
            ticket.flow,
            ticket,
            ticket.need.kv_tokens,
            has_begun=self.homes.of(request) is not None,
            number=number,
            lane=self._any_lane(ticket, number),
        )
        ticket.is_waiting = True

    def withdraw(self, ticket: Ticket) -> None:
        """Take a request out of the queue, if it is there."""
        if ticket.is_waiting and ticket.entry is not None:
            self._queue.drop(ticket.entry)
            ticket.is_waiting = False

    def dispatch(self, now_s: float) -> list[Decision]:
        """Place what can be placed, in order. What must wait keeps its replicas closed to all behind it.

        Else a large request would be passed for ever by small ones.
        """
        self._settle()
        changed, self._changed = self._changed, {}
        self._any_lanes = {lane: None for lane in self._any_lanes if self._queue.has_waiting(lane)}
        homes = [home_id for home_id in changed if self._queue.has_waiting(home_id)]
        lanes = dict[str | _AnyLane, None].fromkeys([*self._any_lanes, *homes])
        decided: list[Decision] = []
        full: set[Kind] = set()
        while (entry := self._queue.first(lanes)) is not None:
            found = self._decide(entry, full, now_s)
            if isinstance(found, Placed | Unservable):
                self._leave(entry, found)
                decided.append(found)
            elif found == entry.lane:
                del lanes[found]
                if entry.item.unserved_since_s is not None:
                    decided += self._give_up(found, now_s)
            else:
                entry.item.entry = self._queue.move(entry, found)
                if isinstance(found, tuple):
                    self._any_lanes[found] = lanes[found] = None
        return decided

    def reserve_second(self, ticket: Ticket, first_id: str, now_s: float) -> str | None:
        """A second replica for a request that is served already, where one has room now; its KV is reserved there."""
        self._settle()
        able = [alike for alike in self._index.able(ticket.request, ticket.tried) if not alike.is_draining]
        out = {first_id, *ticket.tried}
        near = self._index.first_of(able, self._num_looked_at, out.__contains__)
        candidate = choose(ticket.need, None, self._roomy(ticket, near, now_s))
        if candidate is None:
            return None
        self._reserve(ticket, candidate, now_s)
        return candidate.replica_id

    def can_retry(self, ticket: Ticket) -> bool:
        """Whether a live replica is left that has not failed the request."""
        self._settle()
        return bool(self._index.able(ticket.request, ticket.tried))

    def finish(self, ticket: Ticket, replica_id: str, result: GenerateResult | None, now_s: float) -> None:
        """A placed request has ended on a replica; None where it ended without an answer. What it needed is learnt."""
        request, state = ticket.request, self.replicas.get(replica_id)
        mean_open = state.free(request.request_id) if state is not None and state.serves(request.request_id) else 1.0
        self._note_freed(ticket.need.kv_tokens, now_s)
        is_whole = result is not None and result.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        num_prompt, num_sampled = len(request.prompt_token_ids), 0 if result is None else len(result.token_ids)
        self.homes.end(request, replica_id, num_prompt + num_sampled if is_whole else 0, now_s)
        if result is not None and is_whole:
            self._projection(ticket.flow).note(request.sampling.max_tokens, num_sampled)
            if state is not None:
                state.pace.note(result, num_prompt, mean_open, now_s)
            if ticket.entry is not None:
                self._queue.correct(ticket.entry, num_prompt + num_sampled)

    def is_drained(self, replica_id: str) -> bool:
        """Whether nothing is open there, and whoever was served there can go on elsewhere."""
        return not self.replicas[replica_id].num_open and not self.stuck_attempts(replica_id)

    def stuck_attempts(self, replica_id: str) -> tuple[str, ...]:
        """Attempts at home there that no other live replica could serve."""
        self._settle()
        stuck = {
            home.attempt_id: None
            for home in self.homes.at(replica_id)
            if not self._index.takes_new(home.policy_version, follows_updates=home.follows_updates, but=replica_id)
        }
        return tuple(stuck)

    def wait_estimate_s(self, now_s: float) -> float:
        """How long a request that comes now is likely to wait: what waits before it over what was freed of late."""
        if not len(self._queue):
            return 0.0
        rate = self._freed_tokens * math.exp(-(now_s - self._freed_at_s) / _RATE_WINDOW_S) / _RATE_WINDOW_S
        return self._queue.cost_tokens / rate if rate > 1.0 else _FIRST_GUESS_S

    def _settle(self) -> None:
        for replica_id in self._index.settle():
            self._changed[replica_id] = None

    def _note(self, replica_id: str) -> None:
        self._index.note(replica_id)

    def _any_lane(self, ticket: Ticket, number: int | None) -> _AnyLane:
        request = ticket.request
        lane = request.policy_version, request.follows_updates, number if ticket.tried else None
        self._any_lanes[lane] = None
        return lane

    def _leave(self, entry: Waiting[Ticket], decision: Decision) -> None:
        """The request leaves the queue."""
        if isinstance(decision, Placed):
            self._queue.take(entry)
        else:
            self._queue.drop(entry)
        entry.item.is_waiting = False

    def _give_up(self, lane: str | _AnyLane, now_s: float) -> list[Decision]:
        """Those of a lane that no replica can serve, and that have waited long enough for one to recover."""
        waiting = [(entry, self._without_replica(entry.item, now_s)) for entry in self._queue.waiting_in(lane)]
        given_up = [(entry, decision) for entry, decision in waiting if decision is not None]
        for entry, decision in given_up:
            self._leave(entry, decision)
        return [decision for _, decision in given_up]

    def _decide(self, entry: Waiting[Ticket], full: set[Kind], now_s: float) -> Decision | str | _AnyLane:
        """What becomes of a request; else where it waits."""
        self._settle()
        ticket = entry.item
        able = self._index.able(ticket.request, ticket.tried)
        if not able:
            unservable = self._without_replica(ticket, now_s)
            return self._any_lane(ticket, entry.number) if unservable is None else unservable
        ticket.unserved_since_s = None
        home = self.homes.of(ticket.request)
        home_id = None
        if home is not None and home.replica_id not in ticket.tried:
            kind = self._index.kind(home.replica_id)
            home_id = home.replica_id if any(alike.kind == kind for alike in able) else None
        chosen = self._choose(entry, able, home_id, full, now_s)
        if not isinstance(chosen, Candidate):
            return chosen
        # A new sequence of a known attempt has nothing to leave behind.
        leaves_kv = home_id is not None and self.homes.own(ticket.request, home_id) is not None
        self._reserve(ticket, chosen, now_s)
        self.homes.start(ticket.request, chosen.replica_id)
        return Placed(ticket, chosen.replica_id, home_id if leaves_kv and chosen.replica_id != home_id else None)

    def _choose(
        self, entry: Waiting[Ticket], able: list[Alike], home_id: str | None, full: set[Kind], now_s: float
    ) -> Candidate | str | _AnyLane:
        """The replica that takes the request now; else what it waits for, which is closed to all behind it.

        None but the home is looked at where the home is better than any other could be.
        """
        ticket = entry.item
        open_to_it = [alike for alike in able if alike.kind not in full]
        if not open_to_it:
            # All are closed, the home among them: it waits with those for which they are kept.
            return self._any_lane(ticket, entry.number)
        home_has_room = False
        if home_id is not None:
            home = self.replicas[home_id]
            is_closed = self._index.kind(home_id) in full or self._is_awaited(home_id, entry)
            home_has_room = not is_closed and self._has_room_at_home(ticket, home, now_s)
            if home_has_room:
                at_home = self._home_candidate(ticket, home, now_s, has_room=True)
                if self._is_best(ticket, at_home):
                    return at_home
        roomy = self._roomy(ticket, self._others(entry, open_to_it, home_id), now_s)
        if home_id is None:
            chosen = choose(ticket.need, None, roomy)
        elif roomy or home_has_room:
            at_home = self._home_candidate(ticket, self.replicas[home_id], now_s, has_room=home_has_room)
            chosen = choose(ticket.need, home_id, [at_home, *roomy])
        else:
            chosen = None
        if chosen is not None:
            return chosen
        # Where others have room that it does not want it waits for its home, else for all that are full.
        if home_id is not None and roomy:
            return home_id
        full.update(alike.kind for alike in able)
        return self._any_lane(ticket, entry.number)

    def _others(self, entry: Waiting[Ticket], able: list[Alike], home_id: str | None) -> list[ReplicaState]:
        """The first few with most room, but the home and those that tried it or for which others wait before it."""
        tried, place, first_place = entry.item.tried, entry.place, self._queue.first_place

        def is_out(replica_id: str) -> bool:
            if replica_id == home_id or replica_id in tried:
                return True
            first = first_place(replica_id)
            return first is not None and first < place

        return self._index.first_of(able, self._num_looked_at, is_out)

    def _is_awaited(self, replica_id: str, entry: Waiting[Ticket]) -> bool:
        """Whether somebody waits for just this replica who goes before."""
        first = self._queue.first_place(replica_id)
        return first is not None and first < entry.place

    def _is_best(self, ticket: Ticket, at_home: Candidate) -> bool:
        """Whether no other replica could answer so much sooner that a move would pay, however fast and idle it were."""
        need, fleet = ticket.need, self._fleet
        least_s = (
            len(ticket.request.prompt_token_ids) * fleet.least_prefill_s + need.output_tokens * fleet.least_token_s
        )
        return not pays(least_s, done_in_s(need, at_home))

    def _without_replica(self, ticket: Ticket, now_s: float) -> Unservable | None:
        holders = [one for one in self.replicas.values() if one.may_come_to_sample(ticket.request)]
        if ticket.unserved_since_s is None:
            ticket.unserved_since_s = now_s
        if holders and not ticket.tried and now_s - ticket.unserved_since_s < self._recovery_wait_s:
            return None
        version = f"version {ticket.request.policy_version}"
        known = "; ".join(state.describe() for state in self.replicas.values()) or "there is none"
        return Unservable(
            ticket, f"request {ticket.request.request_id}: a live replica must hold {version}, but {known}"
        )

    def _has_room_at_home(self, ticket: Ticket, state: ReplicaState, now_s: float) -> bool:
        own = self.homes.own(ticket.request, state.replica_id)
        return self._has_room(ticket, state, own, now_s)

    def _home_candidate(self, ticket: Ticket, state: ReplicaState, now_s: float, *, has_room: bool) -> Candidate:
        """The home of the conversation, whether it has room or not."""
        own = self.homes.own(ticket.request, state.replica_id)
        room_in_s = 0.0
        if not has_room:
            kept = self._protected_tokens(ticket, state, own, now_s)
            room_in_s = state.room_in_s(ticket.need.kv_tokens, kept, now_s)
        num_lacking = len(ticket.request.prompt_token_ids) - (0 if own is None else own.kept_tokens)
        return self._candidate(state, max(0, num_lacking), now_s, has_room=has_room, room_in_s=room_in_s)

    def _roomy(self, ticket: Ticket, states: Iterable[ReplicaState], now_s: float) -> list[Candidate]:
        """Those of some replicas, none of them the home, that have room."""
        num_tokens = len(ticket.request.prompt_token_ids)
        return [
            self._candidate(state, num_tokens, now_s) for state in states if self._has_room(ticket, state, None, now_s)
        ]

    def _candidate(
        self, state: ReplicaState, num_lacking: int, now_s: float, *, has_room: bool = True, room_in_s: float = 0.0
    ) -> Candidate:
        prefill_s, token_s = state.pace.estimate(num_lacking, state.num_open + 1, now_s)
        return Candidate(
            replica_id=state.replica_id,
            weight=state.weight,
            has_room=has_room,
            projected_tokens=state.projected_tokens,
            prefill_s=prefill_s,
            token_s=token_s,
            room_in_s=room_in_s,
        )

    def _has_room(self, ticket: Ticket, state: ReplicaState, own: Home | None, now_s: float) -> bool:
        need, capacity = ticket.need, state.capacity_tokens
        # Most are told apart without a look at what is kept for whom.
        if capacity is None or not state.num_open:
            return True
        used = state.projected_tokens + need.kv_tokens
        if used > capacity:
            return False
        if used + self.homes.kept_tokens(state.replica_id) <= capacity:
            return True
        return has_room(
            need,
            capacity_tokens=capacity,
            projected_tokens=state.projected_tokens,
            kept_tokens=self._protected_tokens(ticket, state, own, now_s),
            num_open=state.num_open,
        )

    def _protected_tokens(self, ticket: Ticket, state: ReplicaState, own: Home | None, now_s: float) -> int:
        """KV that is kept free for conversations between two calls, without the one that asks; see ``keep_s``."""
        kept = self.homes.kept_on(state.replica_id)
        is_own_kept = own is not None and own.idle_since_s is not None
        all_kept = kept.total - own.kept_tokens if own is not None and is_own_kept else kept.total
        used = state.projected_tokens + ticket.need.kv_tokens
        if all_kept <= 0 or state.capacity_tokens is None or not used <= state.capacity_tokens < used + all_kept:
            return all_kept
        rate = keep_s(state.pace.prefill_s(1, now_s), state.num_open)
        worth = kept.worth_keeping(rate, now_s)
        return worth - kept.worth_keeping_of(ticket.request.sequence_key, rate, now_s) if is_own_kept else worth

    def _reserve(self, ticket: Ticket, chosen: Candidate, now_s: float) -> None:
        expected_s = chosen.prefill_s + ticket.need.output_tokens * chosen.token_s
        state = self.replicas[chosen.replica_id]
        state.reserve(ticket.request.request_id, ticket.need.kv_tokens, now_s + expected_s)

    def _projection(self, flow: str) -> OutputProjection:
        found = self._projections.get(flow)
        if found is None:
            found = self._projections[flow] = OutputProjection(self._quantile)
        return found

    def _note_freed(self, kv_tokens: int, now_s: float) -> None:
        self._freed_tokens *= math.exp(-max(0.0, now_s - self._freed_at_s) / _RATE_WINDOW_S)
        self._freed_tokens += kv_tokens
        self._freed_at_s = now_s
