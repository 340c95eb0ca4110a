"""What a configuration can say of vLLM, and what is refused before a start."""

import pytest

from steelyard import config_file
from steelyard.errors import ConfigError


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["inference.vllm.start_deadline_s=0"], "inference.vllm.start_deadline_s must be a finite number > 0, got 0"),
        (["inference.vllm.kv_cache_bytes=1"], "inference.vllm.kv_cache_bytes must be >= 16777216, got 1"),
        (["inference.vllm.url=somewhere"], "inference.vllm.url must be null or look like http://127.0.0.1:8000, got"),
        (["inference.vllm.url=http://me:secret@host"], "inference.vllm.url must hold no credentials, got a URL with @"),
        (["inference.vllm.pyton=x"], "the nearest is inference.vllm.python"),
        (["inference.vllm.extra_args=[--port=80]"], "inference.vllm.extra_args must not hold --port=80: Steelyard"),
        (["inference.vllm.extra_args=[--tensor-parallel-size]"], "inference.vllm.extra_args must not hold --tensor"),
        (["inference.engine=vllm", "rollout.top_p=0.9"], "rollout.top_p must be 1 with inference.engine vllm, got 0.9"),
        (["inference.engine=vllm", "rollout.temperature=0.001"], "rollout.temperature must be >= 0.01 with inf"),
        (
            ["inference.engine=vllm", "inference.vllm.url=http://h:1", "resources.rollout_gpus=2"],
            "resources.rollout_gpus must be 1 where inference.vllm.url gives the one server, got 2",
        ),
    ],
)  # fmt: skip
def test_what_vllm_cannot_do_is_an_error_that_names_the_field(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        config_file.load(None, overrides)
    assert message in str(refused.value) and "secret" not in str(refused.value)


def test_arguments_that_decide_over_neither_weights_nor_sampling_nor_access_are_the_users() -> None:
    config = config_file.load(
        None, ["inference.engine=vllm", "inference.vllm.extra_args=[--max-num-batched-tokens, '512']"]
    )
    assert config.inference.vllm.extra_args == ("--max-num-batched-tokens", "512")
