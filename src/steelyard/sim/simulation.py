"""One simulated run: the stages put together, a policy that moves devices between them, and what came of it."""

import traceback
from collections import deque
from collections.abc import Callable
from random import Random

from msgspec.structs import replace

from steelyard.allocation.moving_cost import MovingCost
from steelyard.allocation.roofline import Roofline
from steelyard.allocation.serving_cost import ServingCost
from steelyard.allocation.snapshot import Limits, Plan, Policy, Role, Snapshot, Split, StageTimes, checked
from steelyard.coordinator.books import TokenBook, token_book
from steelyard.coordinator.entities import State
from steelyard.coordinator.transitions import GroupState, RolloutState
from steelyard.errors import InputError, RunError, SteelyardError
from steelyard.sim.bound import Bound, lower_bound
from steelyard.sim.coordination import SimCoordinator
from steelyard.sim.device_moves import DeviceMoves, Stage, Unit
from steelyard.sim.fit import check_fit, check_serving
from steelyard.sim.kernel import Kernel
from steelyard.sim.reward_stage import RewardStage
from steelyard.sim.rollout_stage import RolloutStage
from steelyard.sim.setup import SimSetup
from steelyard.sim.timeline import Sample, Timeline
from steelyard.sim.train_stage import StepRecord, TrainStage
from steelyard.types.record import Record

_WINDOW_STEPS = 5
"""Steps over which the stages' times are measured."""


class Decision(Record, frozen=True, kw_only=True):
    """What a policy wanted after an optimizer step. ``line`` is as it is logged, live and here; ``reason`` beside it.

    ``is_due`` False: nothing was to be decided then.
    """

    step: int
    at_s: float
    line: str
    reason: str
    is_change: bool
    is_due: bool


class SimResult(Record, frozen=True, kw_only=True):
    """What came of a run.

    Attributes:
        makespan_s: from the start to the end of the last step.
        bound: that no run is faster.
        steps: every optimizer step.
        decisions: what the policy wanted after each step.
        faults: devices that died and returned, one line each.
        timeline: the devices, queues and sums over the time.
        tokens: what became of every sampled token; ``recorded`` is what the replicas counted.
        idle_frac: share of each role's device-seconds in which nothing was computed; of devices on their way under
        ``moving``. num_events: of the kernel; ``num_transitions`` of the coordinator.
    """

    name: str
    makespan_s: float
    bound: Bound
    steps: tuple[StepRecord, ...]
    decisions: tuple[Decision, ...]
    faults: tuple[str, ...]
    timeline: tuple[Sample, ...]
    num_trajectories: int
    generated_tokens: int
    tokens: TokenBook
    recomputed_tokens: int
    idle_frac: dict[str, float]
    mean_lag: float
    num_events: int
    num_transitions: int

    @property
    def bound_share(self) -> float:
        """The share of the proven upper bound on throughput that was reached: at most 1."""
        return self.bound.makespan_s / self.makespan_s

    @property
    def trajectories_per_s(self) -> float:
        """Trained trajectories."""
        return self.num_trajectories / self.makespan_s


class Simulation:
    """One run, ready to go.

    Args:
        split: devices by role at the start.
        limits: what no plan may leave.
        policy: asked after every step.
        seed: of ids and failures; the work is drawn already.
        bound: of the setup and limits, where it is known already.

    Raises:
        InputError: the split cannot be.
    """

    def __init__(
        self,
        setup: SimSetup,
        split: Split,
        limits: Limits,
        policy: Policy,
        policy_name: str,
        seed: int = 0,
        bound: Bound | None = None,
    ) -> None:
        check_fit(setup, split, limits)
        self._setup, self._policy, self._policy_name = setup, policy, policy_name
        self.kernel = Kernel()
        roofline = Roofline(setup.device, setup.corrections)
        self._serving = {size.tp: self._serving_cost(size.tp) for size in split.sizes}
        self._moving = MovingCost(setup.model, roofline, setup.rates, setup.element_bytes)
        self._first_tp = split.sizes[0].tp
        self._written = self._first_version = 0
        self._newest_loaded: dict[int, int] = {}
        self._coordinator = SimCoordinator(setup, self.kernel, seed, self._on_work, self._on_batch)
        self._rollout = RolloutStage(
            setup, self.kernel, self._coordinator, self._serving_of, self._newest_of, self._on_replicas
        )
        self._train = TrainStage(
            setup, self.kernel, self._coordinator, limits.min_train, self._on_step, self._on_version
        )
        self._reward = RewardStage(setup, self.kernel, self._coordinator)
        self._stages: dict[Role, Stage] = {
            Role.ROLLOUT: self._rollout,
            Role.TRAIN: self._train,
            Role.REWARD: self._reward,
        }
        self._decisions, self._fault_lines = list[Decision](), list[str]()
        self._moves = DeviceMoves(
            self.kernel, setup.num_devices, split, limits, self._stages, self._switch_s, self._fault_lines.append
        )
        self._faults_rng = Random(seed)
        self._bound = bound if bound is not None else lower_bound(setup, limits)
        self._window: deque[tuple[float, float, float]] = deque(maxlen=_WINDOW_STEPS + 1)
        self._timeline = Timeline()

    @property
    def coordinator_state(self) -> State:
        """The real coordinator's state: its books say what became of every prompt."""
        return self._coordinator.state

    @property
    def num_devices_known(self) -> int:
        """Devices in a role, on their way to one, without one, or dead: always all."""
        return self._moves.num_known

    def run(self, on_sample: Callable[[Sample], None] | None = None) -> SimResult:
        """Run until all steps are done.

        Args:
            on_sample: for a display; called a few hundred times in a long run.

        Raises:
            RunError: nothing can happen any more and steps are left; names what is open.
        """
        self._start()
        done, kernel, timeline = self._setup.num_steps, self.kernel, self._timeline
        while len(self._train.steps) < done:
            if kernel.now_s() >= timeline.due_at_s:
                sample = self._sample()
                timeline.add(sample)
                if on_sample is not None:
                    on_sample(sample)
            if not kernel.step():
                raise RunError(self._describe_stall())
        timeline.add(self._sample())
        return self._result()

    def _start(self) -> None:
        self._written = self._first_version = self._coordinator.publish()
        for unit, number in self._moves.units.items():
            self._stages[unit.role].join(number, unit.size)
        self._window.append((0.0, 0.0, 0.0))
        self._moves.plan_faults(self._setup.faults, self._faults_rng)

    # --- what stages are told -------------------------------------------------------------------------

    def _on_work(self) -> None:
        self._rollout.lease_soon()
        self._reward.look_soon()

    def _on_batch(self) -> None:
        self._train.look_soon()

    def _on_version(self, version: int) -> None:
        """It is written: all replicas load it, at once."""
        self._written = version
        num_replicas = max(1, self._moves.split.num_replicas)
        for tp, serving in self._serving.items():
            alone_s = self._moving.load_s(serving) + self._moving.swap_s(serving)
            self.kernel.after(alone_s, lambda tp=tp: self._load_on_arrival(version, tp))  # type: ignore[misc]
            loaded_s = self._moving.load_s(serving, num_replicas)
            self.kernel.after(loaded_s, lambda tp=tp: self._update(version, tp))  # type: ignore[misc]

    def _load_on_arrival(self, version: int, tp: int) -> None:
        """Replicas that come from now on have had the time to load it on their way."""
        self._newest_loaded[tp] = version

    def _update(self, version: int, tp: int) -> None:
        self._rollout.update(version, tp, self._moving.swap_s(self._serving[tp]), self._train.look_soon)

    def _on_replicas(self, tp: int) -> None:
        """Some have come, and may have begun to load before the newest version was written."""
        version = self._written
        if version > self._newest_of(tp):
            self.kernel.after(self._moving.load_s(self._serving[tp]), lambda: self._update(version, tp))

    def _newest_of(self, tp: int) -> int:
        """The newest version that a replica that comes now has had the time to load."""
        return self._newest_loaded.get(tp, self._first_version)

    def _serving_of(self, tp: int) -> ServingCost:
        return self._serving[tp]

    def _switch_s(self, unit: Unit) -> float:
        """What it takes a device to get there. A replica of another size is a new one: it loads its part anew."""
        return self._moving.switch_s(self._serving[unit.size if unit.role is Role.ROLLOUT else self._first_tp])

    def _serving_cost(self, tp: int) -> ServingCost:
        roofline = Roofline(self._setup.device, self._setup.corrections)
        return ServingCost(self._setup.model, roofline, tp, self._setup.element_bytes)

    def _on_step(self, record: StepRecord) -> None:
        totals = self._rollout.totals()
        self._window.append((totals.busy_s, self._train.busy_device_s, self._reward.busy_device_s))
        self._moves.step_done()
        self._decide(self.snapshot())

    def _decide(self, snapshot: Snapshot) -> None:
        if snapshot.limits.broken_by(snapshot.split) is not None:
            # The dead have left a role below its minimum, and no other can help: there is nothing to decide.
            return
        plan = checked(self._policy_name, self._ask(snapshot), snapshot)
        plan = self._with_known_sizes(plan, snapshot)
        if plan.split != snapshot.split and snapshot.is_moving:
            # One move at a time, as live: devices on their way cannot be given away again.
            plan = Plan(split=snapshot.split, reason=f"a move is under way, {plan.split} has to wait")
        is_change = plan.split != snapshot.split
        self._decisions.append(
            Decision(
                step=snapshot.step,
                at_s=snapshot.at_s,
                line=plan.log_line(snapshot),
                reason=plan.reason,
                is_change=is_change,
                is_due=plan.is_due or is_change,
            )
        )
        if is_change:
            self._moves.carry_out(plan.split)

    def _with_known_sizes(self, plan: Plan, snapshot: Snapshot) -> Plan:
        """The plan, its sizes of replicas made known; where the work does not fit into one the last plan stays.

        A size that is new is taken to have loaded what the first one has: whoever takes it up loads on the way.
        """
        for size in plan.split.sizes:
            if size.tp in self._serving:
                continue
            try:
                check_serving(self._setup, size.tp)
            except InputError as error:
                return Plan(split=snapshot.split, reason=f"refused: {error}")
            self._serving[size.tp] = self._serving_cost(size.tp)
            self._newest_loaded[size.tp] = self._newest_of(self._first_tp)
        return plan

    def _ask(self, snapshot: Snapshot) -> Plan:
        try:
            plan: object = self._policy.decide(snapshot)
        except SteelyardError:
            raise
        except Exception as error:
            # Policies of other packages may raise anything: whose fault it is must be said, not shown as ours.
            place = traceback.extract_tb(error.__traceback__)[-1]
            raise RunError(
                f"policy {self._policy_name} at step {snapshot.step} must return a plan, but raised "
                f"{type(error).__name__}: {error} ({place.filename}, line {place.lineno})"
            ) from error
        if not isinstance(plan, Plan):
            raise InputError(
                f"policy {self._policy_name} at step {snapshot.step} must return a steelyard Plan, got {plan!r}"
            )
        return plan

    def _sample(self) -> Sample:
        totals = self._rollout.totals()
        groups = self._coordinator.state.live_groups.values()
        return Sample(
            at_s=self.kernel.now_s(),
            step=len(self._train.steps),
            rollout=self._rollout.num_devices,
            train=self._train.num_devices,
            reward=self._reward.num_devices,
            moving=self._moves.num_moving,
            num_live=self._rollout.num_live,
            rollout_queue=self._rollout.num_waiting,
            train_backlog=sum(group.num_accepted for group in groups if group.state is GroupState.COMPLETE),
            reward_queue=self._reward.num_waiting,
            rollout_busy_s=totals.busy_s,
            reward_busy_s=self._reward.busy_device_s,
            generated_tokens=totals.decode_tokens,
        )

    def snapshot(self) -> Snapshot:
        """What a policy sees now."""
        waiting = done = unscored = 0
        for group in self._coordinator.state.live_groups.values():
            waiting += sum(rollout.state is RolloutState.PENDING for rollout in group.rollouts)
            unscored += sum(rollout.state is RolloutState.ARTIFACT_READY for rollout in group.rollouts)
            done += group.num_accepted if group.state is GroupState.COMPLETE else 0
        plan, _ = self._coordinator.batch()
        return Snapshot(
            at_s=self.kernel.now_s(),
            step=len(self._train.steps),
            split=self._moves.split,
            limits=self._moves.limits,
            rollout_queue=waiting + self._rollout.num_waiting,
            # What waits for its batch's slowest group does not wait for the trainer.
            train_backlog=done if plan is not None else 0,
            reward_queue=unscored - self._reward.num_open,
            times=self._stage_times(),
            switch_s=self._moving.switch_s(self._serving[self._first_tp]),
            is_moving=self._moves.is_moving,
            work=self._rollout.work(),
        )

    def _stage_times(self) -> StageTimes:
        """Busy device-seconds of the last steps, over the devices that the stages have now."""
        steps = len(self._window) - 1
        if steps < 1:
            return StageTimes()
        rollout, train, reward = (
            (last - first) / steps for first, last in zip(self._window[0], self._window[-1], strict=True)
        )
        split = self._moves.split
        return StageTimes(
            rollout_s=rollout / split.rollout if split.rollout else None,
            train_s=train / split.train if split.train else None,
            reward_s=reward / split.reward if split.reward else None,
        )

    # --- the end --------------------------------------------------------------------------------------

    def _result(self) -> SimResult:
        totals, steps = self._rollout.totals(), tuple(self._train.steps)
        busy = {
            Role.ROLLOUT: totals.busy_s,
            Role.TRAIN: self._train.busy_device_s,
            Role.REWARD: self._reward.busy_device_s,
        }
        return SimResult(
            name=self._setup.name,
            makespan_s=self.kernel.now_s(),
            bound=self._bound,
            steps=steps,
            decisions=tuple(self._decisions),
            faults=tuple(self._fault_lines),
            timeline=self._timeline.samples,
            num_trajectories=len(steps) * self._setup.groups_per_batch * self._setup.group_size,
            generated_tokens=totals.decode_tokens,
            tokens=replace(token_book(self._coordinator.state, {}), recorded=totals.decode_tokens),
            recomputed_tokens=totals.recomputed_tokens,
            idle_frac=self._moves.idle_fracs(busy),
            mean_lag=sum(step.max_lag for step in steps) / len(steps),
            num_events=self.kernel.num_events,
            num_transitions=self._coordinator.state.num_events,
        )

    def _describe_stall(self) -> str:
        return (
            f"simulation {self._setup.name} must do {self._setup.num_steps} steps, but after {len(self._train.steps)} "
            f"nothing can happen any more: {self._rollout.num_live} attempts are live, {self._rollout.num_waiting} "
            f"calls wait, the devices are {self._moves.split}"
        )
