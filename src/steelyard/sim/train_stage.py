"""The trainer on virtual time: takes a batch when the coordinator has one, computes, publishes.

Consumes batches; waits for groups that are due; unblocked by their completion; produces versions.

A device that dies ends the step under way: the rest starts again from the last checkpoint, computes the steps since
then from their batches, which takes as long as it took, and then the same batch.
"""

from collections.abc import Callable
from functools import lru_cache
from itertools import product
from random import Random

from steelyard.allocation.moving_cost import MovingCost
from steelyard.allocation.roofline import Roofline
from steelyard.allocation.training_cost import TrainBatch, TrainingCost, TrainLayout
from steelyard.coordinator.records import BatchPlan
from steelyard.errors import InputError
from steelyard.sim.bound import train_batch
from steelyard.sim.coordination import SimCoordinator
from steelyard.sim.device_moves import Deaths
from steelyard.sim.kernel import Kernel, Timer
from steelyard.sim.setup import SimSetup
from steelyard.types.record import Record

_SIZES = (1, 2, 4, 8, 16)
_AFTER_OTHERS = 2


class StepRecord(Record, frozen=True, kw_only=True):
    """One optimizer step: when it was wanted, began and ended, with how many devices, on how stale a batch."""

    step: int
    wanted_at_s: float
    began_at_s: float
    ended_at_s: float
    num_devices: int
    num_tokens: int
    max_lag: int


class TrainStage:
    """One trainer.

    Args:
        min_devices: with fewer, no step begins.
        on_step: called with each step's end, before its version is published.
        on_version: called when a version is written, to have replicas load it.
    """

    def __init__(
        self,
        setup: SimSetup,
        kernel: Kernel,
        coordinator: SimCoordinator,
        min_devices: int,
        on_step: Callable[[StepRecord], None],
        on_version: Callable[[int], None],
    ) -> None:
        self._setup = setup
        self._kernel = kernel
        self._coordinator = coordinator
        self._min_devices = max(1, min_devices)
        self._on_step = on_step
        self._on_version = on_version
        roofline = Roofline(setup.device, setup.corrections)
        moving = MovingCost(setup.model, roofline, setup.rates, setup.element_bytes)
        self._write_s, self._restart_s = moving.write_s(), moving.restart_s()
        self._layouts = TrainLayouts(setup)
        self._is_look_planned = False
        self._wanted_at_s = self._restarted_at_s = self._unsaved_s = 0.0
        self._num_devices = self._num_leaving = 0
        self._on_gone: Callable[[int], None] | None = None
        self._consumed: tuple[BatchPlan, TrainBatch] | None = None
        self._end: Timer | None = None
        self._began_s = 0.0
        self.steps: list[StepRecord] = []
        self.busy_device_s = 0.0
        self.num_restarts = 0

    @property
    def num_devices(self) -> int:
        """Devices that the next step will use."""
        return self._num_devices

    def devices_by_size(self) -> dict[int, int]:
        """Each device comes and goes alone."""
        return {1: self._num_devices}

    def join(self, num_devices: int, size: int = 1) -> None:
        """More devices, from the next step on."""
        self._num_devices += num_devices
        self.look_soon()

    def leave(self, num_devices: int, size: int, on_gone: Callable[[int], None], *, is_last: bool = False) -> None:
        """So many go once no step is under way."""
        self._num_leaving += num_devices
        self._on_gone = on_gone
        if self._end is None:
            self._let_go()

    def die(self, num_devices: int, rng: Random) -> dict[int, Deaths]:
        """So many die: the step under way is lost."""
        self._num_devices -= num_devices
        num_of_leaving = max(0, self._num_leaving - self._num_devices)
        self._num_leaving -= num_of_leaving
        self.num_restarts += 1
        self._restarted_at_s = self._kernel.now_s() + self._restart_s + self._unsaved_s
        if self._end is not None:
            self._end.cancel()
            self._end = None
            self._kernel.after(0.0, self._let_go)
        self._kernel.at(self._restarted_at_s, self.look_soon)
        return {1: Deaths(num_devices, num_of_leaving)}

    def _let_go(self) -> None:
        number, on_gone = self._num_leaving, self._on_gone
        if number and on_gone is not None:
            self._num_leaving = 0
            self._num_devices -= number
            on_gone(number)

    def look_soon(self) -> None:
        """See whether a batch is there, once all else of this instant has happened."""
        if not self._is_look_planned:
            self._is_look_planned = True
            self._kernel.after(0.0, self._look, _AFTER_OTHERS)

    def _look(self) -> None:
        self._is_look_planned = False
        if self._end is not None or self._num_devices < self._min_devices or len(self.steps) == self._setup.num_steps:
            return
        if self._kernel.now_s() < self._restarted_at_s:
            return
        if self._consumed is None:
            plan, again_s = self._coordinator.batch()
            if plan is None:
                if again_s is not None and again_s > self._kernel.now_s():
                    self._kernel.at(again_s, self.look_soon)
                return
            groups = tuple(self._setup.workload.group(self._position(group)) for group in plan.group_ids)
            self._coordinator.begin_step(plan)
            self._consumed, self._began_s = (plan, train_batch(groups)), self._kernel.now_s()
        self._compute(*self._consumed)

    def _compute(self, plan: BatchPlan, batch: TrainBatch) -> None:
        num_devices = self._num_devices
        step_s = self._layouts.best(num_devices, batch).step_s(batch)

        def end() -> None:
            self._end = self._consumed = None
            self.busy_device_s += step_s * num_devices
            is_saved = (plan.step + 1) % self._setup.checkpoint_every == 0
            self._unsaved_s = 0.0 if is_saved else self._unsaved_s + step_s
            record = StepRecord(
                step=plan.step,
                wanted_at_s=self._wanted_at_s,
                began_at_s=self._began_s,
                ended_at_s=self._kernel.now_s(),
                num_devices=num_devices,
                num_tokens=batch.num_tokens,
                max_lag=plan.max_lag,
            )
            self._wanted_at_s = self._kernel.now_s()
            self.steps.append(record)
            self._publish()
            self._let_go()
            self._on_step(record)
            self.look_soon()

        self._end = self._kernel.after(step_s, end)

    def _position(self, group_id: str) -> int:
        return int(self._coordinator.state.groups[group_id].task_id)

    def _publish(self) -> None:
        version = self._coordinator.publish()
        self._kernel.after(self._write_s, lambda: self._on_version(version))


class TrainLayouts:
    """The fastest layout for each number of devices, by the cost model; fewer devices are used where that is faster."""

    def __init__(self, setup: SimSetup) -> None:
        self._setup = setup
        self._roofline = Roofline(setup.device, setup.corrections)
        self._best = lru_cache(maxsize=4096)(self._search)

    def best(self, num_devices: int, batch: TrainBatch) -> TrainingCost:
        """The layout for a batch like ``batch``.

        Raises:
            InputError: nothing fits into so many devices.
        """
        # Batches of one run differ little; the choice is made for their size to within a quarter.
        size = 1 << max(0, batch.num_tokens.bit_length() - 3)
        longest = 1 << max(10, (batch.longest_tokens - 1).bit_length())
        rounded = max(1, batch.num_tokens // size) * size
        return self._best(num_devices, rounded, round(batch.pairs / batch.num_tokens), longest)

    def least_devices(self, at_least: int) -> int:
        """The least number of devices, from ``at_least`` on, into which the work's longest trajectory fits.

        Raises:
            InputError: not even all of them suffice.
        """
        batch = train_batch(self._setup.workload.groups)
        for num_devices in range(at_least, self._setup.num_devices):
            try:
                self.best(num_devices, batch)
            except InputError:
                continue
            return num_devices
        self.best(self._setup.num_devices, batch)
        return self._setup.num_devices

    def _search(self, num_devices: int, num_tokens: int, pairs_per_token: int, longest: int) -> TrainingCost:
        batch = TrainBatch(num_tokens=num_tokens, pairs=num_tokens * pairs_per_token, longest_tokens=1)
        found: TrainingCost | None = None
        reason = "no layout divides them"
        for layout in self._layouts(num_devices, longest):
            try:
                cost = TrainingCost(self._setup.model, self._roofline, layout, self._setup.element_bytes)
            except InputError as error:
                reason = str(error)
                continue
            if found is None or cost.step_s(batch) < found.step_s(batch):
                found = cost
        if found is None:
            raise InputError(f"{self._setup.name}: training must fit into {num_devices} devices: {reason}")
        return found

    def _layouts(self, num_devices: int, longest: int) -> list[TrainLayout]:
        experts = _SIZES if self._setup.model.experts is not None else (1,)
        found = list[TrainLayout]()
        for used, tp, pp, cp in product(range(num_devices, max(0, num_devices - 8), -1), _SIZES, _SIZES, (1, 2, 4)):
            if used % (tp * pp * cp):
                continue
            dp = used // (tp * pp * cp)
            micro = max(longest, 4096)
            found += [
                TrainLayout(tp=tp, pp=pp, dp=dp, cp=cp, ep=ep, micro_batch_tokens=micro, recompute=recompute)
                for ep in experts
                if dp % ep == 0
                for recompute in (True, False)
            ]
        return found
