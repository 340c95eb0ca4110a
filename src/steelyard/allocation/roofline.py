"""How long one device, or one group of them, computes: work over rates, and what measurements say beside it.

The time of a piece of work is that of its slower side (Williams, Waterman, Patterson: Roofline, CACM 52(4), 2009)::

    compute = flops / peak        memory = bytes / bandwidth
    time    = max(compute, memory) + (1 - overlap) * min(compute, memory) + communication + launches

each term times its measured correction, which is never below 1: nothing is faster than its roofline.
"""

from steelyard.allocation.devices import DeviceKind
from steelyard.errors import InputError
from steelyard.types.record import Record


class Corrections(Record, frozen=True, kw_only=True):
    """By how much slower than the roofline each kind of work is; 1 is the roofline itself. Found by calibration.

    The defaults are what well-kept engines reach (about 0.6 of peak FLOPs in prefill, 0.5 in training, 0.8 of memory
    and of link bandwidth); they are guesses until `steelyard calibrate` has measured.

    Attributes:
        launch: of the fixed cost of an engine's step; ``train_launch`` of a pass of training.
        overlap: share of the faster side of compute and memory that hides behind the slower one.
    """

    prefill_compute: float = 1.65
    decode_compute: float = 1.65
    train_compute: float = 2.0
    memory: float = 1.25
    communication: float = 1.25
    launch: float = 1.0
    train_launch: float = 1.0
    overlap: float = 1.0

    def __post_init__(self) -> None:
        for field in ("prefill_compute", "decode_compute", "train_compute", "memory", "communication"):
            if not 1.0 <= getattr(self, field) < float("inf"):
                raise InputError(
                    f"corrections.{field} must be >= 1 (the roofline) and finite, got {getattr(self, field)}"
                )
        for field in ("launch", "train_launch"):
            if not 0.0 <= getattr(self, field) < float("inf"):
                raise InputError(f"corrections.{field} must be finite and >= 0, got {getattr(self, field)}")
        if not 0.0 <= self.overlap <= 1.0:
            raise InputError(f"corrections.overlap must be between 0 and 1, got {self.overlap}")


IDEAL = Corrections(prefill_compute=1, decode_compute=1, train_compute=1, memory=1, communication=1)
"""The roofline itself: no engine is faster. The proven bound uses it."""


class Roofline:
    """Times on one kind of device."""

    def __init__(self, device: DeviceKind, corrections: Corrections) -> None:
        self.device = device
        self.corrections = corrections

    def work_s(self, flops: float, num_bytes: float, compute_correction: float) -> float:
        """Arithmetic and memory traffic of one device, overlapped."""
        compute_s, memory_s = self.compute_s(flops, compute_correction), self.memory_s(num_bytes)
        hidden = self.corrections.overlap
        return max(compute_s, memory_s) + (1.0 - hidden) * min(compute_s, memory_s)

    def compute_s(self, flops: float, compute_correction: float) -> float:
        """Arithmetic of one device alone."""
        return flops / self.device.peak_flops_per_s * compute_correction

    def memory_s(self, num_bytes: float) -> float:
        """Memory traffic of one device alone."""
        return num_bytes / self.device.memory_bytes_per_s * self.corrections.memory

    def launches_s(self, num_layers: int) -> float:
        """Fixed cost of an engine's step through ``num_layers`` layers."""
        return num_layers * self.device.launch_s * self.corrections.launch

    def train_launches_s(self, num_layers: int) -> float:
        """Fixed cost of one pass of training through ``num_layers`` layers."""
        return num_layers * self.device.launch_s * self.corrections.train_launch

    def all_reduce_s(self, num_bytes: float, num_devices: int) -> float:
        """A ring over ``num_devices``: each sends and receives ``2 (n - 1) / n`` of the bytes (Patarasu, Yuan 2009)."""
        return self._ring_s(2.0, num_bytes, num_devices)

    def all_gather_s(self, num_bytes: float, num_devices: int) -> float:
        """Half of an all-reduce; a reduce-scatter takes as long. ``num_bytes`` is the whole, gathered."""
        return self._ring_s(1.0, num_bytes, num_devices)

    def all_to_all_s(self, num_bytes: float, num_devices: int) -> float:
        """Each device sends all but its own part of its ``num_bytes``."""
        return self._ring_s(1.0, num_bytes, num_devices)

    def transfer_s(self, num_bytes: float) -> float:
        """From one node to another, over one device's port."""
        return num_bytes / self.device.network_bytes_per_s * self.corrections.communication

    def _ring_s(self, passes: float, num_bytes: float, num_devices: int) -> float:
        if num_devices <= 1:
            return 0.0
        inside = num_devices <= self.device.devices_per_node
        rate = self.device.link_bytes_per_s if inside else self.device.network_bytes_per_s
        moved = passes * (num_devices - 1) / num_devices * num_bytes
        return (self.device.link_latency_s + moved / rate) * self.corrections.communication
