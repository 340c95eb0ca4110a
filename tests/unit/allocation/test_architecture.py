"""Sizes of decoders from their config.json: against published counts, and for absurd input."""

from typing import Any

import pytest

from steelyard.allocation.architecture import read_architecture
from steelyard.errors import InputError
from steelyard.sim.scenario import known_model

QWEN2_7B: dict[str, Any] = {
    "hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28, "num_hidden_layers": 28,
    "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False,
}  # fmt: skip
QWEN3_30B_A3B: dict[str, Any] = {
    "hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 32, "num_hidden_layers": 48,
    "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936, "num_experts": 128, "num_experts_per_tok": 8,
    "moe_intermediate_size": 768, "decoder_sparse_step": 1, "mlp_only_layers": [], "tie_word_embeddings": False,
}  # fmt: skip
MIXTRAL_8X7B: dict[str, Any] = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "total", "active"),
    [(QWEN2_7B, 7.62e9, 7.62e9), (QWEN3_30B_A3B, 30.5e9, 3.3e9), (MIXTRAL_8X7B, 46.7e9, 12.9e9)],
)
def test_counts_are_those_that_the_models_makers_give(config: dict[str, Any], total: float, active: float) -> None:
    architecture = read_architecture(config)
    assert architecture.num_parameters == pytest.approx(total, rel=0.01)
    embeddings = 2 * architecture.head_parameters
    assert architecture.active_parameters + embeddings == pytest.approx(active, rel=0.03)


def test_the_head_dimension_is_taken_as_given_and_not_derived() -> None:
    assert read_architecture(QWEN3_30B_A3B).head_dim == 128
    assert read_architecture(QWEN3_30B_A3B).kv_elements_per_token == 2 * 48 * 4 * 128
    assert read_architecture(QWEN2_7B).head_dim == 128


def test_a_multimodal_config_is_read_by_its_text_part() -> None:
    assert read_architecture({"text_config": QWEN2_7B, "vision_config": {}}) == read_architecture(QWEN2_7B)


def test_first_layers_may_be_dense() -> None:
    config = {**QWEN3_30B_A3B, "mlp_only_layers": [0, 1]}
    experts = read_architecture(config).experts
    assert experts is not None
    assert experts.num_layers == 46


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, "hidden_size must be a whole number >= 1, got None"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a whole number >= 1, got 0"),
        ({"vocab_size": "many"}, "vocab_size must be a whole number >= 1, got 'many'"),
        ({"num_key_value_heads": 5}, "num_attention_heads must be a multiple of num_key_value_heads = 5, got 28"),
        ({"kv_lora_rank": 512}, "attention must be grouped-query, got latent attention"),
        ({"num_experts": 4, "num_experts_per_tok": 8}, "num_experts_per_tok must be at most num_experts = 4, got 8"),
    ],
)
def test_an_absurd_config_is_refused_by_its_field(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_architecture({**QWEN2_7B, **change}, "config.json")


@pytest.mark.parametrize(
    ("name", "fitting"),
    [
        ("qwen2.5-7b", [1, 2, 4]),  # 28 heads and 4 of keys and values: 7 and 14 divide the heads only
        ("qwen2.5-14b", [1, 2, 4, 8]),  # 40 and 8: not 5
        ("qwen3-30b-a3b", [1, 2, 4, 8]),  # 32 and 4: each key/value head on two devices at 8
    ],
)
def test_a_layer_splits_only_into_what_divides_all_its_parts(name: str, fitting: list[int]) -> None:
    model = known_model(name)
    assert [tp for tp in range(1, 9) if model.splits_into(tp)] == fitting
