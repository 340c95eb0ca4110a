"""What we read of vLLM's ``/metrics`` (the text format of Prometheus)."""

import re
from dataclasses import dataclass

_LINE = re.compile(r"^(?P<name>vllm:[a-z_]+)\{(?P<labels>.*)\} (?P<value>\S+)$")
_LABEL = re.compile(r'([a-z_]+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, kw_only=True)
class EngineMetrics:
    """A server at one instant. Token counters only grow; ``prefill_tokens`` are those that were computed."""

    num_running: int = 0
    num_waiting: int = 0
    kv_in_use_frac: float = 0.0
    kv_tokens_capacity: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    cached_tokens: int = 0


def parse_metrics(text: str) -> EngineMetrics:
    """Read the figures that we show; what the server does not give is 0. Several engines of a server are summed."""
    totals: dict[str, float] = {}
    capacity = 0
    for line in text.splitlines():
        match = _LINE.match(line)
        if match is None:
            continue
        labels = dict(_LABEL.findall(match["labels"]))
        name = match["name"]
        if name == "vllm:cache_config_info":
            capacity += _whole(labels.get("num_gpu_blocks")) * _whole(labels.get("block_size"))
        key = f"{name}/{labels['source']}" if "source" in labels else name
        totals[key] = totals.get(key, 0.0) + float(match["value"])

    def whole(key: str) -> int:
        return int(totals.get(key, 0.0))

    return EngineMetrics(
        num_running=whole("vllm:num_requests_running"),
        num_waiting=whole("vllm:num_requests_waiting"),
        kv_in_use_frac=totals.get("vllm:kv_cache_usage_perc", 0.0),
        kv_tokens_capacity=capacity,
        prefill_tokens=whole("vllm:prompt_tokens_by_source_total/local_compute"),
        decode_tokens=whole("vllm:generation_tokens_total"),
        cached_tokens=whole("vllm:prompt_tokens_by_source_total/local_cache_hit"),
    )


def _whole(text: str | None) -> int:
    return int(text) if text is not None and text.isdigit() else 0
