"""What it costs that weights and devices move: publication, a change of role, a trajectory that changes its replica."""

from steelyard.allocation.architecture import Architecture
from steelyard.allocation.roofline import Roofline
from steelyard.allocation.serving_cost import ServingCost
from steelyard.allocation.training_cost import STATE_BYTES
from steelyard.errors import InputError
from steelyard.types.record import Record

_PROBE_TOKENS = 256


class MovingRates(Record, frozen=True, kw_only=True):
    """Rates that belong to storage and software, not to a kind of device. Found by calibration.

    The defaults are those of a cluster with a parallel file system and PCIe 4; a laptop's disk is ten times slower.

    Attributes:
        storage_bytes_per_s: writing and reading of a shared store, over all who do it at once.
        digest_bytes_per_s: hashing, on one host.
        swap_bytes_per_s: from the memory of a host into that of each of its devices.
        start_s: a device worker takes up a role: processes, communicators, memory; weights apart.
        release_s: it lets go of one.
        write_overhead_s: what a publication takes whatever the size of the weights: files, probe, flushes.
        load_overhead_s: the same of a load.
    """

    storage_bytes_per_s: float = 20e9
    digest_bytes_per_s: float = 10e9
    swap_bytes_per_s: float = 20e9
    start_s: float = 5.0
    release_s: float = 1.0
    write_overhead_s: float = 0.0
    load_overhead_s: float = 0.0

    def __post_init__(self) -> None:
        for field in ("storage_bytes_per_s", "digest_bytes_per_s", "swap_bytes_per_s"):
            if not 0.0 < getattr(self, field) < float("inf"):
                raise InputError(f"rates.{field} must be finite and > 0, got {getattr(self, field)}")
        for field in ("start_s", "release_s", "write_overhead_s", "load_overhead_s"):
            if not 0.0 <= getattr(self, field) < float("inf"):
                raise InputError(f"rates.{field} must be finite and >= 0, got {getattr(self, field)}")


class MovingCost:
    """Times of moves, in seconds."""

    def __init__(
        self, architecture: Architecture, roofline: Roofline, rates: MovingRates, element_bytes: int = 2
    ) -> None:
        self._roofline = roofline
        self._rates = rates
        self._num_parameters = architecture.num_parameters
        self._weight_bytes = float(architecture.num_parameters * element_bytes)

    def write_s(self) -> float:
        """The trainer writes and hashes a version, one beside the other."""
        slowest = min(self._rates.storage_bytes_per_s, self._rates.digest_bytes_per_s)
        return self._rates.write_overhead_s + self._weight_bytes / slowest

    def load_s(self, serving: ServingCost, num_at_once: int = 1) -> float:
        """A replica reads and hashes a version into its hosts' memory, beside its work, while ``num_at_once`` do."""
        port_s = self._roofline.transfer_s(self._weight_bytes / serving.tp)
        store_s = self._weight_bytes * num_at_once / self._rates.storage_bytes_per_s
        slowest_s = max(port_s, store_s, self._weight_bytes / self._rates.digest_bytes_per_s)
        return self._rates.load_overhead_s + slowest_s

    def swap_s(self, serving: ServingCost) -> float:
        """It takes the version into its devices and proves it: for so long it stands still."""
        return self._weight_bytes / serving.tp / self._rates.swap_bytes_per_s + serving.prefill_s(_PROBE_TOKENS)

    def restart_s(self) -> float:
        """A trainer starts again after a device died: processes and communicators, then its checkpoint from the store.

        A checkpoint holds the weights and, in fp32, a copy of them and two moments.
        """
        checkpoint_bytes = self._weight_bytes + STATE_BYTES * self._num_parameters
        return self._rates.start_s + checkpoint_bytes / self._rates.storage_bytes_per_s

    def publish_s(self, serving: ServingCost, num_replicas: int) -> float:
        """From the end of an optimizer step until every replica is READY, all at once."""
        return self.write_s() + self.load_s(serving, max(1, num_replicas)) + self.swap_s(serving)

    def switch_s(self, serving: ServingCost) -> float:
        """A device takes up another role, either one: both load the weights. What it drained before is not in it."""
        return self._rates.release_s + self._rates.start_s + self.load_s(serving) + self.swap_s(serving)
