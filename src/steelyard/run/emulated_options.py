"""Options of the process that holds all emulated engines. Imports no torch."""

from pathlib import Path

from steelyard.config import EmulatedConfig
from steelyard.run.children import ChildOptions


class EmulatedOptions(ChildOptions, frozen=True, kw_only=True):
    """``replica_names`` in the order of their devices; the rest as in ``steelyard.inference.emulated_core``."""

    replica_names: tuple[str, ...]
    emulated: EmulatedConfig
    max_running: int
    kv_tokens: int
    prefill_chunk_tokens: int
    max_versions: int
    probe_tolerance: float

    def socket_of(self, replica_name: str) -> Path:
        """The socket of one engine."""
        return Path(self.socket_path).with_suffix(f".{self.replica_names.index(replica_name)}")
