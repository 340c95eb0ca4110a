"""A random-weight policy of under 0.2M parameters, with a tokenizer that fits: a Hugging Face directory in a blink."""

import json
from pathlib import Path

import torch

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
