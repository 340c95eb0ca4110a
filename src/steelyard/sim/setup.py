"""What is simulated: devices, model, work and rules, as plain records."""

from steelyard.allocation.architecture import Architecture
from steelyard.allocation.cluster_model import ClusterModel
from steelyard.allocation.devices import DeviceKind
from steelyard.allocation.engine_limits import EngineLimits
from steelyard.allocation.moving_cost import MovingRates
from steelyard.allocation.roofline import Corrections
from steelyard.allocation.workload import GroupWork, Workload
from steelyard.errors import InputError
from steelyard.sim.faults import Faults
from steelyard.types.record import Record


class RewardWork(Record, frozen=True, kw_only=True):
    """How trajectories are scored.

    By a function on CPUs: ``function_s`` seconds in one of ``num_slots`` (None: as many as are asked for). By a model
    on devices of the reward pool: one forward pass of ``model`` over the trajectory.
    """

    function_s: float = 0.0
    num_slots: int | None = None
    model: Architecture | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.function_s < float("inf"):
            raise InputError(f"reward.function_s must be finite and >= 0, got {self.function_s}")
        if self.num_slots is not None and self.num_slots < 1:
            raise InputError(f"reward.num_slots must be >= 1, or null for no limit, got {self.num_slots}")
        if self.num_slots is not None and self.model is not None:
            raise InputError(
                f"reward.num_slots must be null where a model scores, on the devices of its pool, got {self.num_slots}"
            )


class SimSetup(Record, frozen=True, kw_only=True):
    """One simulated run.

    Attributes:
        num_devices: devices of one kind, whatever their role.
        num_steps: optimizer steps to do.
        groups_per_batch: groups that a step consumes; each as large as the workload has it.
        max_policy_lag: bound of the staleness, in steps.
        tool_slots: tools that can run at once; None: no limit.
        start_s: from the lease of an attempt to its first model call (a sandbox starts); ``end_s`` from its last one to
            its sealed artifact. It is under way meanwhile.
        max_live: attempts that are under way at once, tools included; None: no limit.
        max_running: sequences in the batch of one replica.
        element_bytes: of weights and KV.
        max_tokens: what one model call may sample at most; admission to replicas starts from it.
        recompute_kv: KV is computed again when weights change under running sequences; else it is kept.
        engine: what the engine of a replica allows itself beside that.
        faults: what goes wrong.
        checkpoint_every: steps between two checkpoints of the trainer, from which it starts again.
    """

    name: str
    device: DeviceKind
    num_devices: int
    model: Architecture
    corrections: Corrections
    workload: Workload
    num_steps: int
    groups_per_batch: int
    max_policy_lag: int
    rates: MovingRates = MovingRates()
    reward: RewardWork = RewardWork()
    tool_slots: int | None = None
    start_s: float = 0.0
    end_s: float = 0.0
    max_live: int | None = None
    max_running: int = 256
    element_bytes: int = 2
    max_tokens: int = 32_768
    recompute_kv: bool = True
    engine: EngineLimits = EngineLimits()
    faults: Faults = Faults()
    checkpoint_every: int = 10

    def __post_init__(self) -> None:
        least = 3 if self.reward.model is not None else 2
        for field, low in (
            ("num_devices", least),
            ("num_steps", 1),
            ("groups_per_batch", 1),
            ("max_policy_lag", 0),
            ("max_running", 1),
            ("max_tokens", 1),
            ("checkpoint_every", 1),
            ("element_bytes", 1),
        ):
            if getattr(self, field) < low:
                raise InputError(f"{field} must be >= {low}, got {getattr(self, field)}")
        for field in ("start_s", "end_s"):
            if not 0.0 <= getattr(self, field) < float("inf"):
                raise InputError(f"{field} must be finite and >= 0, got {getattr(self, field)}")
        for field in ("tool_slots", "max_live"):
            value = getattr(self, field)
            if value is not None and value < 1:
                raise InputError(f"{field} must be >= 1, or null for no limit, got {value}")
        sizes = {len(group.trajectories) for group in self.workload.groups}
        if len(sizes) != 1:
            raise InputError(
                f"workload {self.workload.name} must have groups of one size, got {min(sizes)} to {max(sizes)}: "
                f"regroup it"
            )

    @property
    def group_size(self) -> int:
        """Rollouts of a group."""
        return len(self.workload.groups[0].trajectories)

    def admitted_groups(self) -> tuple[GroupWork, ...]:
        """The groups that a run without drops trains on, in the order in which they are admitted."""
        return tuple(self.workload.group(position) for position in range(self.num_steps * self.groups_per_batch))


def cluster_model(setup: SimSetup) -> ClusterModel:
    """What a planner may know of a setup beforehand: everything but the work; of that, the longest context that its
    rules allow, which every replica must hold."""
    return ClusterModel(
        device=setup.device,
        architecture=setup.model,
        groups_per_batch=setup.groups_per_batch,
        group_size=setup.group_size,
        max_policy_lag=setup.max_policy_lag,
        corrections=setup.corrections,
        rates=setup.rates,
        engine=setup.engine,
        max_running=setup.max_running,
        max_live=setup.max_live,
        tool_slots=setup.tool_slots,
        start_s=setup.start_s,
        end_s=setup.end_s,
        reward_function_s=setup.reward.function_s,
        reward_slots=setup.reward.num_slots,
        reward_model=setup.reward.model,
        recompute_kv=setup.recompute_kv,
        element_bytes=setup.element_bytes,
        longest_context_tokens=max(
            one.longest_context_tokens for group in setup.workload.groups for one in group.trajectories
        ),
    )
