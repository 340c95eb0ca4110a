"""Scoring on virtual time: a function on CPU slots, or a reward model on the devices of its pool."""

from steelyard.allocation.roofline import Roofline
from steelyard.allocation.serving_cost import ServingCost, StepWork
from steelyard.errors import InputError
from steelyard.sim.coordination import SimCoordinator
from steelyard.sim.kernel import Kernel
from steelyard.sim.setup import SimSetup
from steelyard.types import ScoreJob

_AFTER_OTHERS = 1
_MAX_JOBS = 1 << 30


class RewardStage:
    """All graders.

    Raises:
        InputError: a reward model has no devices, or does not fit onto them.
    """

    def __init__(self, setup: SimSetup, kernel: Kernel, coordinator: SimCoordinator, num_devices: int) -> None:
        self._setup = setup
        self._kernel = kernel
        self._coordinator = coordinator
        self._cost: ServingCost | None = None
        self._free = setup.reward.num_slots if setup.reward.num_slots is not None else _MAX_JOBS
        model = setup.reward.model
        if model is not None:
            if num_devices < 1:
                raise InputError(
                    f"{setup.name}: reward must have at least 1 device for {model.name}, got {num_devices}"
                )
            self._cost = ServingCost(model, Roofline(setup.device, setup.corrections), 1, setup.element_bytes)
            self._free = num_devices
        self._is_look_planned = False
        self._trajectory_of: dict[str, tuple[int, int]] = {}
        self.busy_device_s = 0.0

    @property
    def num_waiting(self) -> int:
        """Trajectories that wait for a grader."""
        return self._coordinator.num_scores_waiting

    def look_soon(self) -> None:
        """Take what waits for a score, once all else of this instant has happened."""
        if not self._is_look_planned:
            self._is_look_planned = True
            self._kernel.after(0.0, self._look, _AFTER_OTHERS)

    def _look(self) -> None:
        self._is_look_planned = False
        if self._free == 0:
            return
        for job in self._coordinator.lease_scores(self._free):
            self._free -= 1
            self._grade(job)

    def _grade(self, job: ScoreJob) -> None:
        took_s = self._setup.reward.function_s
        if self._cost is not None:
            model_s = self._model_s(job, self._cost)
            self.busy_device_s += model_s
            took_s += model_s

        def end() -> None:
            self._free += 1
            self._coordinator.scored(job)
            self.look_soon()

        self._kernel.after(took_s, end)

    def _model_s(self, job: ScoreJob, cost: ServingCost) -> float:
        """One pass over the whole trajectory."""
        rollout = self._coordinator.state.attempts[job.attempt_id]
        group = self._setup.workload.group(int(job.task_id))
        num_tokens = group.trajectories[rollout.member_index].trained_tokens
        pairs = num_tokens * (num_tokens + 1) / 2
        return cost.step_s(StepWork(prefill_tokens=num_tokens, prefill_pairs=pairs, num_prompts=1))
