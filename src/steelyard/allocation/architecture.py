"""What a decoder is made of, as far as time and memory depend on it; read from a Hugging Face ``config.json``."""

from collections.abc import Mapping
from typing import Any

from steelyard.errors import InputError
from steelyard.types.record import Record

_LATENT_ATTENTION = ("kv_lora_rank", "q_lora_rank")


class Experts(Record, frozen=True, kw_only=True):
    """A mixture of experts in the place of the feed-forward part of ``num_layers`` layers.

    Each token goes through ``num_per_token`` of ``num_experts``, of width ``intermediate_size`` each, and through a
    shared part of width ``shared_size`` (0: none).
    """

    num_layers: int
    num_experts: int
    num_per_token: int
    intermediate_size: int
    shared_size: int = 0


class Architecture(Record, frozen=True, kw_only=True):
    """A decoder with grouped-query attention and gated feed-forward parts.

    Sizes are in elements. ``head_dim`` is as given, not ``hidden_size / num_heads``. Biases and norms are left out of
    the counts: below one part in a thousand.
    """

    name: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    is_tied: bool = False
    experts: Experts | None = None

    def splits_into(self, tp: int) -> bool:
        """Whether ``tp`` devices can each take an equal share of every layer.

        As vLLM and Megatron ask for it: whole heads; whole key/value heads, or each of them on equally many devices;
        equal parts of the feed-forward matrices.
        """
        kv_heads = self.num_kv_heads
        widths = [self.intermediate_size] if self.dense_layers else []
        if self.experts is not None:
            widths += [self.experts.intermediate_size, self.experts.shared_size]
        return (
            self.num_heads % tp == 0
            and (kv_heads % tp == 0 or tp % kv_heads == 0)
            and all(width % tp == 0 for width in widths)
        )

    @property
    def attention_parameters(self) -> int:
        """Of one layer: queries, keys, values, output."""
        return self.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)

    @property
    def dense_layers(self) -> int:
        """Layers with an ordinary feed-forward part."""
        return self.num_layers - (self.experts.num_layers if self.experts else 0)

    @property
    def expert_parameters(self) -> int:
        """Of one expert of one layer; 0 for a dense model."""
        return 3 * self.hidden_size * self.experts.intermediate_size if self.experts else 0

    @property
    def base_parameters(self) -> int:
        """Every matrix that each token meets, experts and embeddings apart: attention, dense and shared parts,
        routers."""
        total = self.num_layers * self.attention_parameters
        total += self.dense_layers * 3 * self.hidden_size * self.intermediate_size
        if self.experts is not None:
            shared = 3 * self.hidden_size * self.experts.shared_size
            total += self.experts.num_layers * (shared + self.hidden_size * self.experts.num_experts)
        return total

    @property
    def head_parameters(self) -> int:
        """The output matrix, read for every sampled token."""
        return self.vocab_size * self.hidden_size

    @property
    def num_parameters(self) -> int:
        """All of them, as stored."""
        embeddings = self.head_parameters * (1 if self.is_tied else 2)
        experts = self.experts.num_layers * self.experts.num_experts * self.expert_parameters if self.experts else 0
        return self.base_parameters + experts + embeddings

    @property
    def active_parameters(self) -> int:
        """Those that multiply each token, the output matrix apart."""
        experts = self.experts.num_layers * self.experts.num_per_token * self.expert_parameters if self.experts else 0
        return self.base_parameters + experts

    @property
    def kv_elements_per_token(self) -> int:
        """Keys and values of one token in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim

    def attention_flops(self, pairs: float) -> float:
        """Scores and weighted sums: two products of ``head_dim`` for each pair of tokens, head and layer."""
        return 4.0 * pairs * self.num_layers * self.num_heads * self.head_dim

    def touched_experts_frac(self, num_tokens: float) -> float:
        """Expected share of the experts that ``num_tokens`` go through, if the router spreads them evenly."""
        if self.experts is None:
            return 0.0
        chosen = self.experts.num_per_token / self.experts.num_experts
        return float(1.0 - (1.0 - chosen) ** num_tokens)


def read_architecture(config: Mapping[str, Any], name: str = "config.json") -> Architecture:
    """The architecture that a parsed ``config.json`` describes (Llama, Mistral, Mixtral, Qwen and their kin).

    Args:
        config: the JSON object; that of a multimodal model holds the decoder's under ``text_config``.
        name: for messages, and of the result.

    Raises:
        InputError: names the key that is missing or absurd, or says that attention is of a kind that is not modelled.
    """
    config = config.get("text_config", config)
    latent = [key for key in _LATENT_ATTENTION if config.get(key)]
    if latent:
        raise InputError(f"{name}: attention must be grouped-query, got latent attention ({latent[0]})")
    hidden_size, num_heads = _size(config, name, "hidden_size"), _size(config, name, "num_attention_heads")
    architecture = Architecture(
        name=name,
        num_layers=_size(config, name, "num_hidden_layers"),
        hidden_size=hidden_size,
        intermediate_size=_size(config, name, "intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=_size(config, name, "num_key_value_heads", num_heads),
        head_dim=_size(config, name, "head_dim", max(1, hidden_size // num_heads)),
        vocab_size=_size(config, name, "vocab_size"),
        is_tied=bool(config.get("tie_word_embeddings", False)),
        experts=_experts(config, name),
    )
    if architecture.num_heads % architecture.num_kv_heads:
        raise InputError(
            f"{name}: num_attention_heads must be a multiple of num_key_value_heads = {architecture.num_kv_heads}, "
            f"got {architecture.num_heads}"
        )
    return architecture


def check_tp(architecture: Architecture, tp: int, devices_per_node: int) -> None:
    """Whether ``tp`` devices of one node can share the layers.

    Raises:
        InputError: they cannot; says what would.
    """
    fitting = [size for size in range(1, devices_per_node + 1) if architecture.splits_into(size)]
    if tp not in fitting:
        raise InputError(
            f"tp must divide the {architecture.num_heads} heads, the {architecture.num_kv_heads} key/value heads (or "
            f"be a multiple of them) and the feed-forward width of {architecture.name}, and be at most "
            f"{devices_per_node}, the devices of a node, got {tp}; {', '.join(map(str, fitting))} would fit"
        )


def _experts(config: Mapping[str, Any], name: str) -> Experts | None:
    count_key = next((key for key in ("num_local_experts", "num_experts", "n_routed_experts") if config.get(key)), None)
    if count_key is None:
        return None
    num_layers, step = _size(config, name, "num_hidden_layers"), _size(config, name, "decoder_sparse_step", 1)
    dense = set(config.get("mlp_only_layers") or ()) | set(range(config.get("first_k_dense_replace") or 0))
    sparse = [layer for layer in range(num_layers) if (layer + 1) % step == 0 and layer not in dense]
    experts = Experts(
        num_layers=len(sparse),
        num_experts=_size(config, name, count_key),
        num_per_token=_size(config, name, "num_experts_per_tok"),
        intermediate_size=_size(config, name, "moe_intermediate_size", _size(config, name, "intermediate_size")),
        shared_size=config.get("shared_expert_intermediate_size") or 0,
    )
    if experts.num_per_token > experts.num_experts:
        raise InputError(
            f"{name}: num_experts_per_tok must be at most {count_key} = {experts.num_experts}, "
            f"got {experts.num_per_token}"
        )
    return experts if sparse else None


def _size(config: Mapping[str, Any], name: str, key: str, default: int | None = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(f"{name}: {key} must be a whole number >= 1, got {value!r}")
    return value
