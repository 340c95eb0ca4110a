"""What is read of vLLM's metrics."""

from steelyard.inference.vllm_metrics import EngineMetrics, parse_metrics

TEXT = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
vllm:num_requests_running{engine="0",model_name="policy"} 3.0
vllm:num_requests_running{engine="1",model_name="policy"} 1.0
vllm:num_requests_waiting{engine="0",model_name="policy"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="policy",reason="capacity"} 2.0
vllm:kv_cache_usage_perc{engine="0",model_name="policy"} 0.25
vllm:prompt_tokens_by_source_total{engine="0",model_name="policy",source="local_compute"} 1216.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="policy",source="local_cache_hit"} 64.0
vllm:generation_tokens_total{engine="0",model_name="policy"} 22.0
vllm:generation_tokens_created{engine="0",model_name="policy"} 1.79e+09
vllm:cache_config_info{block_size="32",engine="0",note="a \\"b\\", c",num_gpu_blocks="100"} 1.0
python_info{version="3.11"} 1.0
"""


def test_figures_are_summed_over_engines_and_told_apart_by_their_source() -> None:
    assert parse_metrics(TEXT) == EngineMetrics(
        num_running=4,
        num_waiting=2,
        kv_in_use_frac=0.25,
        kv_tokens_capacity=3200,
        prefill_tokens=1216,
        decode_tokens=22,
        cached_tokens=64,
    )


def test_what_the_server_does_not_give_is_zero() -> None:
    assert parse_metrics("") == EngineMetrics()
