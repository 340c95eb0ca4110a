"""Kinds of devices, with the constants that a roofline needs, their units and where they come from.

Bandwidths are in bytes per second and for one direction. Links are quoted by vendors in other units: a port of a
network in bits per second, NVLink as the sum of both directions. The functions below are the only places that convert.
"""

from collections.abc import Mapping
from types import MappingProxyType

from steelyard.errors import InputError
from steelyard.types.record import Record

_BITS_PER_BYTE = 8


class DeviceKind(Record, frozen=True, kw_only=True):
    """What one device can do at best.

    Attributes:
        peak_flops_per_s: dense matrix products in the dtype of serving and training (bf16; fp32 on a CPU).
        memory_bytes_per_s: reading device memory.
        memory_bytes: device memory; ``usable_frac`` of it is for weights, KV, gradients and activations.
        link_bytes_per_s: between two devices of one node, one direction.
        network_bytes_per_s: between two nodes, one direction, for each device.
        devices_per_node: how many devices the fast link joins.
        link_latency_s: fixed cost of one collective operation inside a node.
        launch_s: fixed cost of one forward pass for each layer (launches, scheduling).
    """

    name: str
    peak_flops_per_s: float
    memory_bytes_per_s: float
    memory_bytes: float
    link_bytes_per_s: float
    network_bytes_per_s: float
    devices_per_node: int
    link_latency_s: float
    launch_s: float
    usable_frac: float = 0.9

    @property
    def usable_bytes(self) -> float:
        """Memory for what a model needs."""
        return self.memory_bytes * self.usable_frac


def bytes_per_s(bits_per_s: float) -> float:
    """A network's rate in bytes, from bits."""
    return bits_per_s / _BITS_PER_BYTE


def one_way(both_ways_bytes_per_s: float) -> float:
    """One direction of a link that is quoted as the sum of both."""
    return both_ways_bytes_per_s / 2


def _nvidia(
    name: str, tflops: float, memory_tb_per_s: float, memory_gb: float, nvlink_gb_per_s: float, port_gbit_per_s: float
) -> DeviceKind:
    return DeviceKind(
        name=name,
        peak_flops_per_s=tflops * 1e12,
        memory_bytes_per_s=memory_tb_per_s * 1e12,
        memory_bytes=memory_gb * 1e9,
        link_bytes_per_s=one_way(nvlink_gb_per_s * 1e9),
        network_bytes_per_s=bytes_per_s(port_gbit_per_s * 1e9),
        devices_per_node=8,
        link_latency_s=8e-6,
        launch_s=1.2e-5,
    )


# Dense bf16 without sparsity, memory and NVLink from NVIDIA's data sheets (A100 80GB SXM; A800 80GB SXM; H100 SXM;
# H200 SXM; HGX B200, an eighth of the board). Ports: DGX A100 (200 Gbit/s a GPU), DGX H100, H200 and B200 (400 Gbit/s
# a GPU).
_A100 = _nvidia("A100", 312, 2.039, 80, 600, 200)
_A800 = _nvidia("A800", 312, 2.039, 80, 400, 200)
_H100 = _nvidia("H100", 989.4, 3.35, 80, 900, 400)
_H200 = _nvidia("H200", 989.4, 4.8, 141, 900, 400)
_B200 = _nvidia("B200", 2250, 7.7, 180, 1800, 400)

# One core of a server CPU, fp32: two 256-bit fused multiply-adds a cycle at 2.5 GHz; an eighth of an eight-channel
# DDR4-3200 socket with 64 cores is less than what one core can draw alone, so its own limit stands here. Calibrate
# before use.
_CPU = DeviceKind(
    name="CPU",
    peak_flops_per_s=80e9,
    memory_bytes_per_s=12e9,
    memory_bytes=8e9,
    link_bytes_per_s=6e9,
    network_bytes_per_s=bytes_per_s(10e9),
    devices_per_node=64,
    link_latency_s=2e-5,
    launch_s=2e-4,
)

DEVICE_KINDS: Mapping[str, DeviceKind] = MappingProxyType(
    {kind.name: kind for kind in (_A100, _A800, _H100, _H200, _B200, _CPU)}
)
"""All kinds that are known by name."""


def device_kind(name: str) -> DeviceKind:
    """The kind of that name, in any case.

    Raises:
        InputError: there is none; names those there are.
    """
    for known, kind in DEVICE_KINDS.items():
        if known.lower() == name.lower():
            return kind
    raise InputError(f"device kind must be one of {', '.join(DEVICE_KINDS)}, got {name!r}")
