"""Options of the trainer process. Imports no torch, so that control can write them."""

from steelyard.run.children import ChildOptions
from steelyard.trainer.records import TrainerSettings


class TrainerOptions(ChildOptions, frozen=True, kw_only=True):
    """Start from ``model_dir``, or from ``checkpoint`` where there is one."""

    settings: TrainerSettings
    model_dir: str
    weights_dir: str
    probe_tolerance: float
    weights_dtype: str = "float32"
    max_shard_bytes: int = 4 << 30
    checkpoint: str | None = None
    checkpoint_digest: str | None = None
