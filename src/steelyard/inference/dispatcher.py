"""Admission and placement of requests over replicas: the router without its I/O.

::

    submit --> queue (fair between flows) --dispatch--> reservation on a replica --finish--> room for others
                 `--- withdraw (deadline, cancelled)

A request is in exactly one place at a time: in the queue, or on one replica. The sum of what is reserved on a replica
never exceeds its KV, but for a single request on an otherwise idle one.
"""

import math
from collections.abc import Collection, Iterable, Set
from dataclasses import dataclass, field

from steelyard.inference.fair_queue import FairQueue, Waiting
from steelyard.inference.homes import Home, Homes
from steelyard.inference.placement import Candidate, Need, choose, fits, keep_s
from steelyard.inference.projection import OutputProjection
from steelyard.inference.replica_state import ReplicaState
from steelyard.types import FinishReason, GenerateRequest, GenerateResult

_RATE_WINDOW_S = 10.0
_FIRST_GUESS_S = 1.0


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
        replicas: by id; the caller adds and removes.
        projection_quantile: see :class:`~steelyard.inference.projection.OutputProjection`.
        recovery_wait_s: how long a request may wait while all replicas that hold its version are dead, in seconds.
    """

    def __init__(
        self, replicas: dict[str, ReplicaState], *, projection_quantile: float, recovery_wait_s: float
    ) -> None:
        self._replicas = replicas
        self._quantile = projection_quantile
        self._recovery_wait_s = recovery_wait_s
        self._queue: FairQueue[Ticket] = FairQueue()
        self._projections: dict[str, OutputProjection] = {}
        self.homes = Homes()
        self._freed_tokens = 0.0
        self._freed_at_s = -math.inf

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
        has_begun = self.homes.of(request) is not None
        ticket.entry = self._queue.push(ticket.flow, ticket, ticket.need.kv_tokens, has_begun=has_begun, number=number)
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
        decided: list[Decision] = []
        closed: set[str] = set()
        num_live = sum(state.weight > 0.0 for state in self._replicas.values())
        for entry in self._queue.in_order():
            decision = self._decide(entry.item, closed, now_s)
            if decision is not None:
                decided.append(decision)
            elif num_live and len(closed) >= num_live:
                break
        for one in decided:
            entry_of = one.ticket.entry
            assert entry_of is not None
            if isinstance(one, Placed):
                self._queue.take(entry_of)
            else:
                self._queue.drop(entry_of)
            one.ticket.is_waiting = False
        return decided

    def reserve_second(self, ticket: Ticket, first_id: str, now_s: float) -> str | None:
        """A second replica for a request that is served already, where one has room now; its KV is reserved there."""
        able = [one for one in self._able(ticket) if one.replica_id != first_id and not one.is_draining]
        candidate = choose(ticket.need, None, [self._candidate(ticket, state, frozenset(), now_s) for state in able])
        if candidate is None:
            return None
        self._reserve(ticket, candidate, now_s)
        return candidate.replica_id

    def can_retry(self, ticket: Ticket) -> bool:
        """Whether a live replica is left that has not failed the request."""
        return any(state.replica_id not in ticket.tried for state in self._able(ticket))

    def finish(self, ticket: Ticket, replica_id: str, result: GenerateResult | None, now_s: float) -> None:
        """A placed request has ended on a replica; None where it ended without an answer. What it needed is learnt."""
        request, state = ticket.request, self._replicas.get(replica_id)
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
        return not self._replicas[replica_id].num_open and not self.stuck_attempts(replica_id)

    def stuck_attempts(self, replica_id: str) -> tuple[str, ...]:
        """Attempts at home there that no other live replica could serve."""
        others = [one for one in self._replicas.values() if one.replica_id != replica_id and _takes_new(one)]
        stuck = {
            home.attempt_id: None
            for home in self.homes.at(replica_id)
            if not any(one.holds(home.policy_version, follows_updates=home.follows_updates) for one in others)
        }
        return tuple(stuck)

    def wait_estimate_s(self, now_s: float) -> float:
        """How long a request that comes now is likely to wait: what waits before it over what was freed of late."""
        if not len(self._queue):
            return 0.0
        rate = self._freed_tokens * math.exp(-(now_s - self._freed_at_s) / _RATE_WINDOW_S) / _RATE_WINDOW_S
        return self._queue.cost_tokens / rate if rate > 1.0 else _FIRST_GUESS_S

    def _decide(self, ticket: Ticket, closed: set[str], now_s: float) -> Decision | None:
        able = self._able(ticket)
        if not able:
            return self._without_replica(ticket, now_s)
        ticket.unserved_since_s = None
        home = self.homes.of(ticket.request)
        home_id = home.replica_id if home is not None else None
        candidates = [self._candidate(ticket, state, closed, now_s) for state in able]
        chosen = choose(ticket.need, home_id, candidates)
        if chosen is None:
            closed.update(self._awaited(ticket.need, home_id, candidates))
            return None
        self._reserve(ticket, chosen, now_s)
        self.homes.start(ticket.request, chosen.replica_id)
        could_stay = any(state.replica_id == home_id for state in able)
        moved_from = home_id if could_stay and chosen.replica_id != home_id else None
        return Placed(ticket, chosen.replica_id, moved_from)

    @staticmethod
    def _awaited(need: Need, home_id: str | None, candidates: Collection[Candidate]) -> Iterable[str]:
        """Whom a request waits for: its home where others have room that it does not want, else all that are full."""
        full = [one.replica_id for one in candidates if not fits(need, one)]
        return [home_id] if home_id in full and len(full) < len(candidates) else full

    def _without_replica(self, ticket: Ticket, now_s: float) -> Unservable | None:
        holders = [one for one in self._replicas.values() if one.can_sample(ticket.request)]
        if ticket.unserved_since_s is None:
            ticket.unserved_since_s = now_s
        if holders and not ticket.tried and now_s - ticket.unserved_since_s < self._recovery_wait_s:
            return None
        version = f"version {ticket.request.policy_version}"
        known = "; ".join(state.describe() for state in self._replicas.values()) or "there is none"
        return Unservable(
            ticket, f"request {ticket.request.request_id}: a live replica must hold {version}, but {known}"
        )

    def _able(self, ticket: Ticket) -> list[ReplicaState]:
        """Live replicas that may sample it; those that drain only where no other may: it was bound before the drain."""
        live = [
            state
            for state in self._replicas.values()
            if state.weight > 0.0 and state.replica_id not in ticket.tried and state.can_sample(ticket.request)
        ]
        return [state for state in live if not state.is_draining] or live

    def _candidate(self, ticket: Ticket, state: ReplicaState, closed: Set[str], now_s: float) -> Candidate:
        own = self.homes.own(ticket.request, state.replica_id)
        num_cached = 0 if own is None else own.kept_tokens
        kept = self._protected_tokens(ticket.need, state, own, now_s)
        return Candidate(
            replica_id=state.replica_id,
            weight=state.weight,
            capacity_tokens=state.capacity_tokens,
            projected_tokens=state.projected_tokens,
            kept_tokens=kept,
            num_open=state.num_open,
            prefill_s=state.pace.prefill_s(max(0, len(ticket.request.prompt_token_ids) - num_cached), now_s),
            token_s=state.pace.token_s(state.num_open + 1, now_s),
            room_in_s=state.room_in_s(ticket.need.kv_tokens, kept, now_s),
            is_closed=state.replica_id in closed,
        )

    def _protected_tokens(self, need: Need, state: ReplicaState, own: Home | None, now_s: float) -> int:
        """KV that is kept free for conversations between two calls, without the one that asks; see ``keep_s``."""
        all_kept = self.homes.kept_tokens(state.replica_id)
        if own is not None and own.idle_since_s is not None:
            all_kept -= own.kept_tokens
        used = state.projected_tokens + need.kv_tokens
        if all_kept <= 0 or state.capacity_tokens is None or not used <= state.capacity_tokens < used + all_kept:
            return all_kept
        return sum(
            home.kept_tokens
            for home in self.homes.at(state.replica_id)
            if home is not own
            and home.idle_since_s is not None
            and now_s - home.idle_since_s < keep_s(state.pace.prefill_s(home.kept_tokens, now_s), state.num_open)
        )

    def _reserve(self, ticket: Ticket, chosen: Candidate, now_s: float) -> None:
        expected_s = chosen.prefill_s + ticket.need.output_tokens * chosen.token_s
        state = self._replicas[chosen.replica_id]
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


def _takes_new(state: ReplicaState) -> bool:
    return state.weight > 0.0 and not state.is_draining
