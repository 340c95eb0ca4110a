"""Options of a replica process that drives a vLLM server. Imports no torch."""

from steelyard.run.children import ChildOptions


class VllmReplicaOptions(ChildOptions, frozen=True, kw_only=True):
    """``url`` None: a server is started with ``python`` and logs to ``log_path``.

    The rest as in ``steelyard.inference.vllm_server.ServerSettings`` and
    ``steelyard.inference.vllm_engine.VllmSettings``.
    """

    python: str
    url: str | None
    model_dir: str
    dtype: str
    log_path: str
    max_model_len: int
    max_running: int
    kv_cache_bytes: int
    extra_args: tuple[str, ...]
    probe_tolerance: float
    start_deadline_s: float
    load_deadline_s: float
    stop_deadline_s: float
