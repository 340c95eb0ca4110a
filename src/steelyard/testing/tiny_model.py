"""A random-weight policy of under 0.2M parameters, with a tokenizer that fits: a Hugging Face directory in a blink."""

import json
from pathlib import Path

import torch
import transformers

from steelyard.testing.tokenizer import write_tokenizer

transformers.utils.logging.disable_progress_bar()


def tiny_config(vocab_size: int = 512) -> transformers.LlamaConfig:
    """Two layers of width 64 with grouped-query attention and tied embeddings: about 0.13M parameters at 512."""
    return transformers.LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )


def tiny_module(seed: int = 0, vocab_size: int = 512, scale: float = 4.0) -> torch.nn.Module:
    """The module alone, in eval mode.

    ``scale`` multiplies the embedding, so that random weights give log-probabilities that differ from token to token
    (and so from version to version) by far more than rounding.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module: torch.nn.Module = transformers.AutoModelForCausalLM.from_config(
            tiny_config(vocab_size), attn_implementation="sdpa"
        )
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "embed_tokens" in name:
                parameter.mul_(scale)
    return module.eval()


def write_tiny_model(directory: Path, seed: int = 0, vocab_size: int = 512) -> Path:
    """Write config, safetensors, tokenizer and chat template into ``directory``; returns it."""
    directory.mkdir(parents=True, exist_ok=True)
    write_tokenizer(directory, vocab_size=vocab_size)
    tokenizer = json.loads((directory / "tokenizer.json").read_bytes())
    num_tokens = 1 + max([*tokenizer["model"]["vocab"].values(), *(t["id"] for t in tokenizer["added_tokens"])])
    module: transformers.PreTrainedModel = tiny_module(seed, max(vocab_size, num_tokens))
    module.save_pretrained(directory)
    return directory
