"""What a planner must know of a cluster and of a run's rules, beside what the run tells it."""

from steelyard.allocation.architecture import Architecture
from steelyard.allocation.devices import DeviceKind
from steelyard.allocation.engine_limits import EngineLimits
from steelyard.allocation.moving_cost import MovingRates
from steelyard.allocation.roofline import Corrections
from steelyard.errors import InputError
from steelyard.types.record import Record


class ClusterModel(Record, frozen=True, kw_only=True):
    """Hardware, model and rules. How many devices there are, and what no plan may leave, is in a snapshot's limits.

    Attributes:
        groups_per_batch: groups that an optimizer step consumes, of ``group_size`` trajectories each.
        max_policy_lag: bound of the staleness, in steps.
        max_running: sequences in the batch of one replica.
        max_live: attempts that are under way at once; None: no limit.
        tool_slots: tools that can run at once; None: no limit.
        start_s: from the lease of an attempt to its first model call; ``end_s`` from its last one to its artifact.
        reward_function_s: seconds of scoring on a CPU slot, of which there are ``reward_slots`` (None: enough).
        reward_model: scores on devices of the reward pool, by one forward pass; None: none does.
        recompute_kv: KV is computed again when weights change under running sequences; else it is kept.
        element_bytes: of weights and KV.
        longest_context_tokens: that a rule allows a trajectory; a replica must hold it. 0: as long as the longest seen.
    """

    device: DeviceKind
    architecture: Architecture
    groups_per_batch: int
    group_size: int
    max_policy_lag: int
    corrections: Corrections = Corrections()
    rates: MovingRates = MovingRates()
    engine: EngineLimits = EngineLimits()
    max_running: int = 256
    max_live: int | None = None
    tool_slots: int | None = None
    start_s: float = 0.0
    end_s: float = 0.0
    reward_function_s: float = 0.0
    reward_slots: int | None = None
    reward_model: Architecture | None = None
    recompute_kv: bool = True
    element_bytes: int = 2
    longest_context_tokens: int = 0

    def __post_init__(self) -> None:
        for field, least in (
            ("groups_per_batch", 1),
            ("group_size", 1),
            ("max_policy_lag", 0),
            ("max_running", 1),
            ("element_bytes", 1),
        ):
            if getattr(self, field) < least:
                raise InputError(f"{field} must be >= {least}, got {getattr(self, field)}")
        for field in ("max_live", "tool_slots", "reward_slots"):
            value = getattr(self, field)
            if value is not None and value < 1:
                raise InputError(f"{field} must be >= 1, or null for no limit, got {value}")
        for field in ("start_s", "end_s", "reward_function_s"):
            if not 0.0 <= getattr(self, field) < float("inf"):
                raise InputError(f"{field} must be finite and >= 0, got {getattr(self, field)}")

    @property
    def batch_trajectories(self) -> int:
        """Trajectories of a training batch."""
        return self.groups_per_batch * self.group_size
