"""A device and a decoder whose simulated runs take milliseconds, with memory of any size."""

from steelyard.allocation.architecture import Architecture
from steelyard.allocation.devices import DeviceKind

TOY_MODEL = Architecture(
    name="small",
    num_layers=8,
    hidden_size=512,
    intermediate_size=1024,
    num_heads=8,
    num_kv_heads=2,
    head_dim=64,
    vocab_size=1000,
)


def toy_device(memory_bytes: float = 1e9) -> DeviceKind:
    """A device with so much memory, all of it for a model."""
    return DeviceKind(
        name="toy",
        peak_flops_per_s=1e12,
        memory_bytes_per_s=1e11,
        memory_bytes=memory_bytes,
        link_bytes_per_s=1e10,
        network_bytes_per_s=1e9,
        devices_per_node=8,
        link_latency_s=1e-5,
        launch_s=1e-5,
        usable_frac=1.0,
    )


def toy_device_for(kv_tokens: int) -> DeviceKind:
    """One with room for the toy model and the KV of so many tokens, in two bytes an element."""
    kv_bytes = 2 * TOY_MODEL.kv_elements_per_token
    return toy_device(2.0 * TOY_MODEL.num_parameters + kv_bytes * (kv_tokens + 0.5))
