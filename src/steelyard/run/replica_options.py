"""Options of a replica process. Imports no torch, so that control can write them."""

from steelyard.run.children import ChildOptions


class ReplicaOptions(ChildOptions, frozen=True, kw_only=True):
    """Sizes of one local engine; see ``steelyard.inference.local_engine.EngineSettings``."""

    max_running: int
    row_tokens: int
    kv_tokens: int
    prefill_chunk_tokens: int
    max_versions: int
    probe_tolerance: float
