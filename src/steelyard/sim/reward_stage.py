"""Scoring on virtual time: a function on CPU slots, or a reward model on the devices of its pool.

A device that dies in the midst of a trajectory leaves it to the next one that is free.
"""

from collections import deque
from collections.abc import Callable
from random import Random

from steelyard.allocation.roofline import Roofline
from steelyard.allocation.serving_cost import ServingCost, StepWork
from steelyard.sim.coordination import SimCoordinator
from steelyard.sim.device_moves import Deaths
from steelyard.sim.kernel import Kernel, Timer
from steelyard.sim.setup import SimSetup
from steelyard.types import ScoreJob

_AFTER_OTHERS = 1
_MAX_JOBS = 1 << 30


class RewardStage:
    """All graders.

    Raises:
        InputError: a reward model does not fit onto a device.
    """

    def __init__(self, setup: SimSetup, kernel: Kernel, coordinator: SimCoordinator) -> None:
        self._setup = setup
        self._kernel = kernel
        self._coordinator = coordinator
        self._cost: ServingCost | None = None
        self._num_slots = setup.reward.num_slots if setup.reward.num_slots is not None else _MAX_JOBS
        model = setup.reward.model
        if model is not None:
            self._cost = ServingCost(model, Roofline(setup.device, setup.corrections), 1, setup.element_bytes)
        self._is_look_planned = False
        self._open: dict[str, tuple[ScoreJob, Timer]] = {}
        self._again: deque[ScoreJob] = deque()
        self._num_leaving = 0
        self._on_gone: Callable[[int], None] | None = None
        self.num_devices = 0
        self.busy_device_s = 0.0

    @property
    def num_waiting(self) -> int:
        """Trajectories that wait for a grader."""
        return self._coordinator.num_scores_waiting + len(self._again)

    @property
    def num_open(self) -> int:
        """Trajectories that are being scored."""
        return len(self._open)

    def devices_by_size(self) -> dict[int, int]:
        """Each device scores alone."""
        return {1: self.num_devices}

    def join(self, num_devices: int, size: int = 1) -> None:
        """More devices."""
        self.num_devices += num_devices
        self.look_soon()

    def leave(self, num_devices: int, size: int, on_gone: Callable[[int], None], *, is_last: bool = False) -> None:
        """So many go, as soon as they have nothing to do."""
        self._num_leaving += num_devices
        self._on_gone = on_gone
        self._let_go()

    def die(self, num_devices: int, rng: Random) -> dict[int, Deaths]:
        """So many die, busy or not; what they scored waits for another. Those that stay die first."""
        busy = list(self._open) if self._cost is not None else []
        for drawn in sorted(rng.sample(range(self.num_devices), num_devices), reverse=True):
            if drawn < len(busy):
                job, timer = self._open.pop(busy[drawn])
                timer.cancel()
                self._again.append(job)
        self.num_devices -= num_devices
        num_of_leaving = max(0, self._num_leaving - self.num_devices)
        self._num_leaving -= num_of_leaving
        self.look_soon()
        return {1: Deaths(num_devices, num_of_leaving)}

    def _let_go(self) -> None:
        idle = self.num_devices - (len(self._open) if self._cost is not None else 0)
        number, on_gone = min(self._num_leaving, idle), self._on_gone
        if number > 0 and on_gone is not None:
            self._num_leaving -= number
            self.num_devices -= number
            on_gone(number)

    def look_soon(self) -> None:
        """Take what waits for a score, once all else of this instant has happened."""
        if not self._is_look_planned:
            self._is_look_planned = True
            self._kernel.after(0.0, self._look, _AFTER_OTHERS)

    def _look(self) -> None:
        self._is_look_planned = False
        self._let_go()
        places = self._num_slots if self._cost is None else self.num_devices - self._num_leaving
        free = places - len(self._open)
        while free > 0 and self._again:
            self._grade(self._again.popleft())
            free -= 1
        if free > 0:
            for job in self._coordinator.lease_scores(free):
                self._grade(job)

    def _grade(self, job: ScoreJob) -> None:
        took_s = self._setup.reward.function_s
        model_s = self._model_s(job, self._cost) if self._cost is not None else 0.0

        def end() -> None:
            del self._open[job.job_id]
            self.busy_device_s += model_s
            self._coordinator.scored(job)
            self.look_soon()

        self._open[job.job_id] = (job, self._kernel.after(took_s + model_s, end))

    def _model_s(self, job: ScoreJob, cost: ServingCost) -> float:
        """One pass over the whole trajectory."""
        rollout = self._coordinator.state.attempts[job.attempt_id]
        group = self._setup.workload.group(int(job.task_id))
        num_tokens = group.trajectories[rollout.member_index].trained_tokens
        pairs = num_tokens * (num_tokens + 1) / 2
        return cost.step_s(StepWork(prefill_tokens=num_tokens, prefill_pairs=pairs, num_prompts=1))
