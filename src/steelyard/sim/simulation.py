"""One simulated run: the stages put together, a policy that moves devices between them, and what came of it."""

import traceback
from collections import deque
from collections.abc import Callable

from steelyard.allocation.moving_cost import MovingCost
from steelyard.allocation.roofline import Roofline
from steelyard.allocation.serving_cost import ServingCost
from steelyard.allocation.snapshot import Limits, Plan, Policy, Role, Snapshot, Split, StageTimes, checked
from steelyard.coordinator.entities import State
from steelyard.coordinator.transitions import GroupState, RolloutState
from steelyard.errors import InputError, RunError, SteelyardError
from steelyard.sim.bound import Bound, lower_bound
from steelyard.sim.coordination import SimCoordinator
from steelyard.sim.kernel import Kernel
from steelyard.sim.reward_stage import RewardStage
from steelyard.sim.rollout_stage import RolloutStage
from steelyard.sim.setup import SimSetup
from steelyard.sim.timeline import Sample, Timeline
from steelyard.sim.train_stage import StepRecord, TrainLayouts, TrainStage
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
        timeline: the devices, queues and sums over the time.
        idle_frac: share of each role's device-seconds in which nothing was computed; of devices on their way under
        ``moving``. num_events: of the kernel; ``num_transitions`` of the coordinator.
    """

    name: str
    makespan_s: float
    bound: Bound
    steps: tuple[StepRecord, ...]
    decisions: tuple[Decision, ...]
    timeline: tuple[Sample, ...]
    num_trajectories: int
    generated_tokens: int
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
        seed: of ids; the work is drawn already.

    Raises:
        InputError: the split cannot be.
    """

    def __init__(
        self, setup: SimSetup, split: Split, limits: Limits, policy: Policy, policy_name: str, seed: int = 0
    ) -> None:
        broken = limits.broken_by(split)
        if broken is not None or split.total > setup.num_devices:
            raise InputError(f"{setup.name}: {broken or f'a split must use at most {setup.num_devices} devices'}")
        least = TrainLayouts(setup).least_devices(limits.min_train)
        if least > limits.min_train:
            raise InputError(
                f"{setup.name}: limits.min_train must be >= {least}, with which training fits, got {limits.min_train}"
            )
        self._setup, self._limits, self._policy, self._policy_name = setup, limits, policy, policy_name
        self.kernel = Kernel()
        self._split = split
        roofline = Roofline(setup.device, setup.corrections)
        self._serving = ServingCost(setup.model, roofline, split.rollout_tp, setup.element_bytes)
        self._moving = MovingCost(setup.model, roofline, setup.rates, setup.element_bytes)
        self._coordinator = SimCoordinator(setup, self.kernel, seed, self._on_work, self._on_batch)
        self._rollout = RolloutStage(setup, self.kernel, self._coordinator)
        self._train = TrainStage(setup, self.kernel, self._coordinator, self._on_step, self._on_version)
        self._reward = RewardStage(setup, self.kernel, self._coordinator, split.reward)
        self._num_leaving = self._num_moving = self._written = 0
        self._moving_s = self._role_s_at = 0.0
        self._role_s = dict.fromkeys(Role, 0.0)
        self._window: deque[tuple[float, float, float]] = deque(maxlen=_WINDOW_STEPS + 1)
        self._decisions: list[Decision] = []
        self._timeline = Timeline()

    @property
    def coordinator_state(self) -> State:
        """The real coordinator's state: its books say what became of every prompt."""
        return self._coordinator.state

    @property
    def num_devices_known(self) -> int:
        """Devices in a role or on their way to one: always all that the split began with."""
        return self._in_roles() + self._num_moving

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
        self._account_roles()
        timeline.add(self._sample())
        return self._result()

    def _start(self) -> None:
        version = self._coordinator.publish()
        for _ in range(self._split.rollout // self._split.rollout_tp):
            self._rollout.add_replica(self._serving, version)
        self._train.change_devices(self._split.train)
        self._window.append((0.0, 0.0, 0.0))

    # --- what stages are told -------------------------------------------------------------------------

    def _on_work(self) -> None:
        self._rollout.lease_soon()
        self._reward.look_soon()

    def _on_batch(self) -> None:
        self._train.look_soon()

    def _on_version(self, version: int) -> None:
        # Replicas that are on their way will load it when they come: nobody may be there now.
        self._written = version
        num_replicas = max(1, self._split.rollout // self._split.rollout_tp)
        swap_s = self._moving.swap_s(self._serving)
        self.kernel.after(
            self._moving.load_s(self._serving, num_replicas),
            lambda: self._rollout.update(version, swap_s, self._train.look_soon),
        )

    def _on_step(self, record: StepRecord) -> None:
        totals = self._rollout.totals()
        self._window.append((totals.busy_s, self._train.busy_device_s, self._reward.busy_device_s))
        snapshot = self.snapshot()
        plan = checked(self._policy_name, self._decide(snapshot), snapshot)
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
            self._carry_out(plan)

    def _decide(self, snapshot: Snapshot) -> Plan:
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
            reward=self._split.reward,
            moving=self._num_moving,
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
        waiting = done = 0
        for group in self._coordinator.state.live_groups.values():
            waiting += sum(rollout.state is RolloutState.PENDING for rollout in group.rollouts)
            done += group.num_accepted if group.state is GroupState.COMPLETE else 0
        plan, _ = self._coordinator.batch()
        return Snapshot(
            at_s=self.kernel.now_s(),
            step=len(self._train.steps),
            split=self._split,
            limits=self._limits,
            rollout_queue=waiting + self._rollout.num_waiting,
            # What waits for its batch's slowest group does not wait for the trainer.
            train_backlog=done if plan is not None else 0,
            reward_queue=self._reward.num_waiting,
            times=self._stage_times(),
            switch_s=self._moving.switch_s(self._serving),
            is_moving=self._num_leaving + self._num_moving > 0,
        )

    def _stage_times(self) -> StageTimes:
        """Busy device-seconds of the last steps, over the devices that the stages have now."""
        steps = len(self._window) - 1
        if steps < 1:
            return StageTimes()
        rollout, train, reward = (
            (last - first) / steps for first, last in zip(self._window[0], self._window[-1], strict=True)
        )
        split = self._split
        return StageTimes(
            rollout_s=rollout / split.rollout if split.rollout else None,
            train_s=train / split.train if split.train else None,
            reward_s=reward / split.reward if split.reward else None,
        )

    # --- devices that move ----------------------------------------------------------------------------

    def _carry_out(self, plan: Plan) -> None:
        """Move devices between rollout and training: drained first, on their way for what a switch takes."""
        self._account_roles()
        change = plan.split.rollout - self._split.rollout
        if plan.split.reward != self._split.reward or plan.split.rollout_tp != self._split.rollout_tp:
            raise InputError(
                f"policy {self._policy_name}: only rollout and training exchange devices in a simulation yet"
            )
        self._split = plan.split
        tp = self._split.rollout_tp
        if change > 0:
            self._num_leaving += 1
            self._train.at_boundary(lambda: self._to_rollout(change // tp))
        else:
            names = self._rollout.least_loaded(-change // tp)
            self._num_leaving += len(names)
            for name in names:
                self._rollout.retire(name, self._to_train)

    def _to_rollout(self, num_replicas: int) -> None:
        tp = self._split.rollout_tp
        self._account_roles()
        self._num_leaving -= 1
        self._train.change_devices(-num_replicas * tp)
        self._num_moving += num_replicas * tp

        def arrive() -> None:
            self._account_roles()
            self._num_moving -= num_replicas * tp
            for _ in range(num_replicas):
                self._rollout.add_replica(self._serving, self._written)
            self._rollout.dispatch_soon()

        self.kernel.after(self._moving.switch_s(self._serving), arrive)

    def _to_train(self) -> None:
        """A retired replica's devices arrive at the trainer."""

        def arrive() -> None:
            self._account_roles()
            self._num_moving -= self._split.rollout_tp
            self._train.change_devices(self._split.rollout_tp)

        self._account_roles()
        self._num_leaving -= 1
        self._num_moving += self._split.rollout_tp
        self.kernel.after(self._moving.switch_s(self._serving), arrive)

    def _account_roles(self) -> None:
        """Device-seconds by role up to now."""
        elapsed_s = self.kernel.now_s() - self._role_s_at
        self._role_s_at = self.kernel.now_s()
        self._role_s[Role.ROLLOUT] += self._rollout.num_devices * elapsed_s
        self._role_s[Role.TRAIN] += self._train.num_devices * elapsed_s
        self._role_s[Role.REWARD] += self._split.reward * elapsed_s
        self._moving_s += (self._setup.num_devices - self._in_roles()) * elapsed_s

    def _in_roles(self) -> int:
        return self._rollout.num_devices + self._train.num_devices + self._split.reward

    # --- the end --------------------------------------------------------------------------------------

    def _result(self) -> SimResult:
        totals, steps = self._rollout.totals(), tuple(self._train.steps)
        busy = {
            Role.ROLLOUT: totals.busy_s,
            Role.TRAIN: self._train.busy_device_s,
            Role.REWARD: self._reward.busy_device_s,
        }
        idle = {str(role): max(0.0, 1.0 - busy[role] / held_s) for role, held_s in self._role_s.items() if held_s > 0.0}
        all_s = self._setup.num_devices * self.kernel.now_s()
        idle["moving"] = self._moving_s / all_s if all_s else 0.0
        return SimResult(
            name=self._setup.name,
            makespan_s=self.kernel.now_s(),
            bound=lower_bound(self._setup),
            steps=steps,
            decisions=tuple(self._decisions),
            timeline=self._timeline.samples,
            num_trajectories=len(steps) * self._setup.groups_per_batch * self._setup.group_size,
            generated_tokens=totals.decode_tokens,
            recomputed_tokens=totals.recomputed_tokens,
            idle_frac=idle,
            mean_lag=sum(step.max_lag for step in steps) / len(steps),
            num_events=self.kernel.num_events,
            num_transitions=self._coordinator.state.num_events,
        )

    def _describe_stall(self) -> str:
        return (
            f"simulation {self._setup.name} must do {self._setup.num_steps} steps, but after {len(self._train.steps)} "
            f"nothing can happen any more: {self._rollout.num_live} attempts are live, {self._rollout.num_waiting} "
            f"calls wait, the devices are {self._split}"
        )
