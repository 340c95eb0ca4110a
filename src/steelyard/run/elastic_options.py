"""Options of a process that helps a trainer. Imports no torch, so that control can write them."""

from steelyard.run.children import ChildOptions


class ElasticOptions(ChildOptions, frozen=True, kw_only=True):
    """``model_dir``: any directory of the policy's architecture. ``num_threads`` of torch: those of the trainer."""

    model_dir: str
    num_threads: int = 1
