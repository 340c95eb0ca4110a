"""Random-weight policies with a tokenizer that fits: a Hugging Face directory in a blink, or in a second."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers

from steelyard.testing.tokenizer import write_tokenizer
from steelyard.trainer.quick_policy import new_quick_module
from steelyard.trainer.quick_recipe import QuickPolicyRecipe

_EMBEDDING_SCALE = 4.0
"""Random weights then give log-probabilities that differ from token to token, and so from version to version, by
far more than rounding."""


def tiny_recipe(seed: int = 0) -> QuickPolicyRecipe:
    """Two layers of width 64 with grouped-query attention and tied embeddings: about 0.13M parameters at 512 tokens."""
    return QuickPolicyRecipe(
        hidden_size=64, intermediate_size=160, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, seed=seed
    )


def tiny_module(seed: int = 0, vocab_size: int = 512) -> torch.nn.Module:
    """The module alone, in eval mode; the vocabulary is rounded up to a multiple of 16."""
    module = new_quick_module(tiny_recipe(seed), vocab_size)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "embed_tokens" in name:
                parameter.mul_(_EMBEDDING_SCALE)
    return module


def write_tiny_model(directory: Path, seed: int = 0, vocab_size: int = 512) -> Path:
    """Write config, safetensors, tokenizer and chat template into ``directory``; returns it."""
    directory.mkdir(parents=True, exist_ok=True)
    write_tokenizer(directory, vocab_size=vocab_size)
    tokenizer = json.loads((directory / "tokenizer.json").read_bytes())
    num_tokens = 1 + max([*tokenizer["model"]["vocab"].values(), *(t["id"] for t in tokenizer["added_tokens"])])
    module = tiny_module(seed, max(vocab_size, num_tokens))
    module.save_pretrained(directory)  # type: ignore[operator]
    return directory


def write_small_model(directory: Path) -> Path:
    """Write a decoder of 3.3M parameters whose logits are a few units, as those of a trained one; returns it."""
    config = transformers.LlamaConfig(
        vocab_size=1024, hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=2048, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    module: Any = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        module.model.embed_tokens.weight.mul_(_EMBEDDING_SCALE)
    directory.mkdir(parents=True, exist_ok=True)
    module.save_pretrained(directory)
    write_tokenizer(directory, vocab_size=512)
    return directory
