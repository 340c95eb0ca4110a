"""Attempts on virtual time: leased, sampled turn by turn on the replicas that the real router picks, with tools
between.

Consumes leases; waits for replicas, tools and versions; unblocked by their events; produces sealed attempts.
"""

from collections import deque
from collections.abc import Callable, Sized
from dataclasses import dataclass
from random import Random
from typing import cast

from steelyard.allocation.serving_cost import ServingCost
from steelyard.allocation.work_sketch import LiveWork, WorkSketch, WorkSketcher, facts_of
from steelyard.allocation.workload import TrajectoryWork
from steelyard.inference.dispatcher import Dispatcher, Placed, Ticket
from steelyard.inference.projection import Pace
from steelyard.inference.replica_state import ReplicaState
from steelyard.sim.coordination import SimCoordinator
from steelyard.sim.device_moves import Deaths
from steelyard.sim.kernel import Kernel
from steelyard.sim.replica import ReplicaTotals, SimCall, SimReplica
from steelyard.sim.setup import SimSetup
from steelyard.types import FinishReason, GenerateRequest, GenerateResult, Lease, Sampling

_FLOW = "sim"
_QUANTILE = 0.9
_AFTER_OTHERS = 1
"""Priority of what looks at the whole: once all else of the instant has happened."""


@dataclass(eq=False, slots=True)
class _Attempt:
    lease: Lease
    trajectory: TrajectoryWork
    contexts: tuple[int, ...]
    turn: int = 0
    segment: int = 0
    oldest: int = 0
    newest: int = 0
    num_tokens: int = 0


@dataclass(eq=False, slots=True)
class _Served:
    """A replica with what the router knows of it. ``on_gone``: called once it is drained; None while it stays.

    ``is_last``: no other stays, and none takes over what it still has: it goes when its open calls have ended.
    """

    replica: SimReplica
    state: ReplicaState
    version: int
    on_gone: Callable[[int], None] | None = None
    is_last: bool = False


class RolloutStage:
    """All replicas, and the attempts that run on them.

    Args:
        cost_of: the cost of a replica by its tensor-parallel size.
        newest: the newest version that a new replica of a size has had the time to load.
        on_joined: called when new replicas are there, with their size.
    """

    def __init__(
        self,
        setup: SimSetup,
        kernel: Kernel,
        coordinator: SimCoordinator,
        cost_of: Callable[[int], ServingCost],
        newest: Callable[[int], int],
        on_joined: Callable[[int], None],
    ) -> None:
        self._setup = setup
        self._cost_of = cost_of
        self._newest, self._on_joined = newest, on_joined
        self._kernel = kernel
        self._coordinator = coordinator
        self._fleet = Pace()
        self._served: dict[str, _Served] = {}
        self._dispatcher = Dispatcher(self._fleet, projection_quantile=_QUANTILE, recovery_wait_s=float("inf"))
        self._default_sampling = Sampling(max_tokens=setup.max_tokens)
        self._waiting_attempts: dict[str, _Attempt] = {}
        self._tool_waits: deque[_Attempt] = deque()
        self._free_tools = setup.tool_slots
        self._is_dispatch_planned = self._is_leasing_planned = False
        self._num_started = self._num_in_tools = 0
        self._sketcher = WorkSketcher()
        self._past = ReplicaTotals()
        self.num_live = 0

    @property
    def num_devices(self) -> int:
        """Devices of all replicas, those that drain included."""
        return sum(served.replica.cost.tp for served in self._served.values())

    @property
    def num_waiting(self) -> int:
        """Calls that wait for a place on a replica."""
        return self._dispatcher.num_waiting + sum(served.replica.num_waiting for served in self._served.values())

    def devices_by_size(self) -> dict[int, int]:
        """Devices of all replicas, by the size of the replica."""
        found = dict[int, int]()
        for served in self._served.values():
            tp = served.replica.cost.tp
            found[tp] = found.get(tp, 0) + tp
        return found

    def work(self) -> WorkSketch:
        """What has ended and what is under way, as a policy sees it."""
        num_open = sum(served.state.num_open for served in self._served.values())
        live = LiveWork(
            num_generating=num_open, num_in_tools=self._num_in_tools, num_waiting=self._dispatcher.num_waiting
        )
        return self._sketcher.sketch(live)

    def totals(self) -> ReplicaTotals:
        """Sums over all replicas that are or were; ``busy_s`` in device-seconds."""
        total = ReplicaTotals()
        _add(total, self._past, 1)
        for served in self._served.values():
            _add(total, served.replica.totals, served.replica.cost.tp)
        return total

    # --- replicas -------------------------------------------------------------------------------------

    def join(self, num_devices: int, size: int) -> None:
        """More devices, in replicas of ``size`` that hold the newest version proven, from now on."""
        for _ in range(num_devices // size):
            self._add_replica(self._cost_of(size), self._newest(size))
        self._on_joined(size)
        self._end_drained()
        self.dispatch_soon()

    def _add_replica(self, cost: ServingCost, version: int) -> None:
        self._num_started += 1
        name = f"r{self._num_started:05d}"
        engine = self._setup.engine
        replica = SimReplica(
            name,
            self._kernel,
            cost,
            max_running=self._setup.max_running,
            chunk_tokens=engine.chunk_tokens,
            kv_tokens_limit=engine.kv_tokens,
            block_tokens=engine.block_tokens,
            range_tokens=engine.range_tokens,
        )
        state = ReplicaState(name, self._fleet, self.dispatch_soon)
        state.capacity_tokens = replica.kv_capacity_tokens
        self._dispatcher.add_replica(state)
        self._served[name] = _Served(replica, state, version)
        self._coordinator.replica_started(name)
        self._coordinator.loaded(name, version)
        state.now_holds({version})

    def leave(self, num_devices: int, size: int, on_gone: Callable[[int], None], *, is_last: bool = False) -> None:
        """The least loaded replicas of ``size`` drain: their open calls end, their attempts move at their tools'
        return."""
        staying = [one for one in self._served.values() if one.on_gone is None and one.replica.cost.tp == size]
        staying.sort(key=lambda served: (served.state.num_open, served.replica.name))
        for served in staying[: num_devices // size]:
            served.on_gone = on_gone
            served.state.now_drains(True)
            self._end_if_drained(served)
        if is_last:
            self._close()

    def _close(self) -> None:
        """Nobody stays: who is leaving ends its open calls and begins none, for no other could take its attempts."""
        leaving = [served for served in self._served.values() if served.on_gone is not None]
        for served in leaving:
            served.is_last = True
        for served in leaving:
            self._end_if_drained(served)

    def die(self, num_devices: int, rng: Random) -> dict[int, Deaths]:
        """So many devices die, and replicas with them: open calls are lost with their attempts. Any replica is hit as
        likely as any other."""
        smallest = min((served.replica.cost.tp for served in self._served.values()), default=1)
        most = min(len(self._served), -(-num_devices // smallest))
        deaths, num_gone = dict[int, Deaths](), 0
        for name in rng.sample(list(self._served), most):
            if num_gone >= num_devices:
                break
            served = self._served[name]
            tp, is_leaving = served.replica.cost.tp, served.on_gone is not None
            before = deaths.get(tp, Deaths(0, 0))
            deaths[tp] = Deaths(before.num_gone + tp, before.num_of_leaving + tp * is_leaving)
            num_gone += tp
            self._fail(served)
        return deaths

    def _fail(self, served: _Served) -> None:
        calls = served.replica.evict()
        self._remove(served, "failed")
        for call in calls:
            if call.on_lost is not None:
                call.on_lost(call.num_sampled)

    def update(self, version: int, size: int, pause_s: float, on_first: Callable[[], None]) -> None:
        """Have every replica of ``size`` go over to ``version`` in place. ``on_first``: called when the first has."""
        told: list[str] = []

        def updated(served: _Served) -> None:
            if served.replica.name not in self._served or served.version >= version:
                return
            self._coordinator.loaded(served.replica.name, version, replaced=served.version)
            served.version = version
            served.state.now_holds({version})
            self._end_drained()
            if not told:
                told.append(served.replica.name)
                on_first()

        behind = [one for one in self._served.values() if one.version < version and one.replica.cost.tp == size]
        for served in behind:
            served.replica.update(pause_s, lambda served=served: updated(served), recompute=self._setup.recompute_kv)  # type: ignore[misc]

    # --- attempts -------------------------------------------------------------------------------------

    def lease_soon(self) -> None:
        """Take what can be leased, once all else of this instant has happened."""
        if not self._is_leasing_planned:
            self._is_leasing_planned = True
            self._kernel.after(0.0, self._lease, _AFTER_OTHERS)

    def dispatch_soon(self) -> None:
        """Place what waits, once all else of this instant has happened."""
        if not self._is_dispatch_planned and self._dispatcher.num_waiting:
            self._is_dispatch_planned = True
            self._kernel.after(0.0, self._dispatch, _AFTER_OTHERS)

    def _lease(self) -> None:
        self._is_leasing_planned = False
        most = self._setup.max_live
        for lease in self._coordinator.lease(1 << 30 if most is None else max(0, most - self.num_live)):
            group = self._setup.workload.group(int(lease.task_id))
            trajectory = group.trajectories[lease.member_index]
            self.num_live += 1
            self._begin(_Attempt(lease, trajectory, trajectory.contexts(), oldest=lease.policy_version))

    def _begin(self, attempt: _Attempt) -> None:
        if self._setup.start_s == 0.0:
            self._call(attempt)
        else:
            self._kernel.after(self._setup.start_s, lambda: self._go_on(attempt))

    def _go_on(self, attempt: _Attempt) -> None:
        """The next call, if the attempt is still the rollout's own."""
        if self._coordinator.is_alive(attempt.lease):
            self._call(attempt)
        else:
            self._end(attempt)

    def _call(self, attempt: _Attempt) -> None:
        """The attempt's next model call joins the router's queue."""
        index = attempt.turn
        turn = attempt.trajectory.turns[index]
        attempt.segment += turn.resets_context
        request = GenerateRequest(
            request_id=f"{attempt.lease.attempt_id}.{index}",
            attempt_id=attempt.lease.attempt_id,
            sequence_key=f"{attempt.lease.attempt_id}.{attempt.segment}",
            policy_version=attempt.lease.policy_version,
            prompt_token_ids=_tokens(attempt.contexts[index]),
            sampling=self._sampling(turn.generated_tokens),
            stop_token_ids=(),
            deadline_at_s=float("inf"),
            follows_updates=True,
        )
        ticket = Ticket(request, _FLOW, self._kernel.now_s())
        self._waiting_attempts[request.request_id] = attempt
        self._dispatcher.submit(ticket)
        self.dispatch_soon()

    def _sampling(self, num_tokens: int) -> Sampling:
        """What may be sampled: as much as is set, and never less than the work has."""
        if num_tokens <= self._default_sampling.max_tokens:
            return self._default_sampling
        return Sampling(max_tokens=num_tokens)

    def _dispatch(self) -> None:
        self._is_dispatch_planned = False
        if all(served.is_last for served in self._served.values()):
            # Whoever asks has to wait for the first replica: all have died, or go, and others are on their way.
            return
        for decision in self._dispatcher.dispatch(self._kernel.now_s()):
            attempt = self._waiting_attempts.pop(decision.ticket.request.request_id)
            if isinstance(decision, Placed):
                self._serve(attempt, decision)
            else:
                self._lose(attempt, decision.reason)

    def _serve(self, attempt: _Attempt, placed: Placed) -> None:
        served, ticket = self._served[placed.replica_id], placed.ticket
        turn, version, started_s = attempt.trajectory.turns[attempt.turn], served.version, self._kernel.now_s()
        cached = served.replica.kept_tokens(attempt.lease.attempt_id)
        if placed.moved_from in self._served:
            self._served[placed.moved_from].replica.release(attempt.lease.attempt_id)

        def done() -> None:
            result = self._result(ticket, served, turn.generated_tokens, cached, started_s)
            self._dispatcher.finish(ticket, placed.replica_id, result, self._kernel.now_s())
            # It names its place in the queue, which names it: only a search of the whole heap would free the two.
            ticket.entry = None
            attempt.num_tokens += turn.generated_tokens
            attempt.oldest = attempt.oldest if attempt.turn else version
            attempt.newest = max(attempt.newest, served.version)
            self._after_turn(attempt)
            self._end_if_drained(served)
            self.dispatch_soon()

        def lost(num_sampled: int) -> None:
            self._dispatcher.finish(ticket, placed.replica_id, None, self._kernel.now_s())
            attempt.num_tokens += num_sampled
            self._lose(attempt, "replica_failed")

        call = SimCall(
            attempt_id=attempt.lease.attempt_id,
            prompt_tokens=attempt.contexts[attempt.turn],
            new_tokens=turn.generated_tokens,
            on_done=done,
            on_lost=lost,
        )
        served.replica.submit(call)

    def _result(
        self, ticket: Ticket, served: _Served, num_tokens: int, num_cached: int, started_s: float
    ) -> GenerateResult:
        """What the router learns from: how many tokens in which time. Prompt and reply are told apart by the cost
        model."""
        request, cost = ticket.request, served.replica.cost
        num_prompt = len(request.prompt_token_ids)
        reused = min(num_cached, num_prompt - 1)
        took_s = self._kernel.now_s() - started_s
        prefill_s = min(took_s, cost.prefill_s(num_prompt - reused, reused))
        return GenerateResult(
            request_id=request.request_id,
            token_ids=_tokens(num_tokens),
            logprobs=(),
            kept_logmass=(),
            version_spans=(),
            finish_reason=FinishReason.STOP,
            replica_id=served.replica.name,
            load_id="",
            num_cached_tokens=reused,
            prefill_s=prefill_s,
            decode_s=took_s - prefill_s,
        )

    def _after_turn(self, attempt: _Attempt) -> None:
        if attempt.turn + 1 == len(attempt.trajectory.turns):
            if self._setup.end_s == 0.0:
                self._seal(attempt)
            else:
                self._kernel.after(self._setup.end_s, lambda: self._seal(attempt))
        elif self._free_tools == 0:
            self._tool_waits.append(attempt)
        else:
            self._use_tool(attempt)

    def _seal(self, attempt: _Attempt) -> None:
        self._end(attempt)
        if self._coordinator.is_alive(attempt.lease):
            self._sketcher.add(facts_of(attempt.trajectory), attempt.lease.group_id, self._coordinator.state.next_step)
            newest = max(attempt.oldest, attempt.newest)
            self._coordinator.sampled(attempt.lease, attempt.turn + 1, attempt.num_tokens, attempt.oldest, newest)

    def _use_tool(self, attempt: _Attempt) -> None:
        self._num_in_tools += 1
        if self._free_tools is not None:
            self._free_tools -= 1

        def returned() -> None:
            self._num_in_tools -= 1
            if self._free_tools is not None:
                self._free_tools += 1
                if self._tool_waits:
                    self._use_tool(self._tool_waits.popleft())
            attempt.turn += 1
            self._go_on(attempt)

        tool_s, faults = attempt.trajectory.turns[attempt.turn].tool_s, self._setup.faults
        self._kernel.at(faults.tool_ends_s(self._kernel.now_s(), tool_s) + self._setup.engine.call_s, returned)

    def _lose(self, attempt: _Attempt, reason: str) -> None:
        self._end(attempt)
        if self._coordinator.is_alive(attempt.lease):
            self._coordinator.lost(attempt.lease, reason, attempt.num_tokens)

    def _end(self, attempt: _Attempt) -> None:
        """The attempt needs no replica any more."""
        self.num_live -= 1
        if self._setup.max_live is not None:
            self.lease_soon()
        for name in self._dispatcher.homes.release(attempt.lease.attempt_id):
            served = self._served.get(name)
            if served is not None:
                served.replica.release(attempt.lease.attempt_id)
                self._end_if_drained(served)

    def _end_drained(self) -> None:
        """Others hold a version now that only a draining replica had: whoever it kept can go on there."""
        for served in [one for one in self._served.values() if one.on_gone is not None]:
            self._end_if_drained(served)

    def _end_if_drained(self, served: _Served) -> None:
        name, on_gone = served.replica.name, served.on_gone
        if on_gone is None or name not in self._served or served.state.num_open:
            return
        if not served.is_last and not self._dispatcher.is_drained(name):
            return
        self._remove(served, "retired")
        on_gone(served.replica.cost.tp)

    def _remove(self, served: _Served, why: str) -> None:
        name = served.replica.name
        _add(self._past, served.replica.totals, served.replica.cost.tp)
        self._dispatcher.remove_replica(name)
        del self._served[name]
        self._coordinator.replica_down(name, why)
        self.dispatch_soon()


def _tokens(number: int) -> tuple[int, ...]:
    """Stands for so many tokens where only their number is asked for."""
    counted: Sized = range(number)
    return cast("tuple[int, ...]", counted)


def _add(total: ReplicaTotals, one: ReplicaTotals, num_devices: int) -> None:
    total.prefill_tokens += one.prefill_tokens
    total.decode_tokens += one.decode_tokens
    total.cached_tokens += one.cached_tokens
    total.recomputed_tokens += one.recomputed_tokens
    total.num_put_back += one.num_put_back
    total.busy_s += one.busy_s * num_devices
