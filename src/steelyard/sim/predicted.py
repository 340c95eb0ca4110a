"""What the simulator predicts for the pieces of work that a calibration measures."""

from dataclasses import dataclass

from steelyard.allocation.architecture import Architecture
from steelyard.allocation.calibration import Burst, TrainStep, Work
from steelyard.allocation.devices import DeviceKind
from steelyard.allocation.engine_limits import EngineLimits
from steelyard.allocation.roofline import Corrections, Roofline
from steelyard.allocation.serving_cost import ServingCost
from steelyard.allocation.training_cost import TrainBatch, TrainingCost, TrainLayout
from steelyard.sim.kernel import Kernel
from steelyard.sim.replica import SimCall, SimReplica


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A :data:`steelyard.allocation.calibration.Predict` for one model on one device."""

    model: Architecture
    element_bytes: int
    max_running: int
    limits: EngineLimits
    micro_batch_tokens: int

    def __call__(self, corrections: Corrections, device: DeviceKind, work: Work) -> float:
        """Seconds that ``work`` takes."""
        roofline = Roofline(device, corrections)
        if isinstance(work, TrainStep):
            return self._train_s(roofline, work)
        return self._burst_s(roofline, work)

    def _burst_s(self, roofline: Roofline, work: Burst) -> float:
        kernel = Kernel()
        replica = SimReplica(
            "replica",
            kernel,
            ServingCost(self.model, roofline, 1, self.element_bytes),
            max_running=self.max_running,
            chunk_tokens=self.limits.chunk_tokens,
            kv_tokens_limit=self.limits.kv_tokens,
            block_tokens=self.limits.block_tokens,
            range_tokens=self.limits.range_tokens,
        )
        for index in range(work.num_calls):
            prompt_tokens, new_tokens = work.prompt_tokens, work.new_tokens
            call = SimCall(attempt_id=str(index), prompt_tokens=prompt_tokens, new_tokens=new_tokens, on_done=_nothing)
            replica.submit(call)
        kernel.run()
        return kernel.now_s()

    def _train_s(self, roofline: Roofline, work: TrainStep) -> float:
        layout = TrainLayout(micro_batch_tokens=max(self.micro_batch_tokens, work.row_tokens), recompute=False)
        cost = TrainingCost(self.model, roofline, layout, self.element_bytes)
        num_tokens = work.num_rows * work.row_tokens
        pairs = num_tokens * (work.row_tokens + 1) / 2
        return cost.step_s(TrainBatch(num_tokens=num_tokens, pairs=pairs, longest_tokens=work.row_tokens))


def _nothing() -> None:
    """Only the time of the last one is asked for."""
