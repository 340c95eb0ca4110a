"""Checks of a model directory that need no torch, so that a dry run can make them."""

import json
from pathlib import Path
from typing import Any

from steelyard.errors import InputError
from steelyard.types import Record

FIELD = "model.policy"
COMPANION_NAMES = (
    "added_tokens.json",
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
)
"""Files of a Hugging Face directory that training does not change."""


class ModelFiles(Record, frozen=True, kw_only=True):
    """What a Hugging Face directory says of itself."""

    architecture: str
    vocab_size: int
    num_tokenizer_tokens: int
    max_context_tokens: int | None


def check_model_dir(directory: Path) -> ModelFiles:
    """Check that ``directory`` holds a decoder and a tokenizer that fits it.

    Raises:
        InputError: names what is missing, or which token ids the model cannot take.
    """
    if not directory.is_dir():
        raise InputError(f"{FIELD}: must be a Hugging Face directory, but {directory} does not exist")
    config = _read_object(directory / "config.json")
    if not sorted(directory.glob("*.safetensors")):
        raise InputError(f"{FIELD}: {directory} must hold the weights as *.safetensors, found none")
    vocab_size = config.get("vocab_size")
    if not isinstance(vocab_size, int):
        raise InputError(f"{FIELD}: vocab_size in {directory / 'config.json'} must be an integer, got {vocab_size!r}")
    largest = _largest_token_id(_read_object(directory / "tokenizer.json"))
    if largest >= vocab_size:
        raise InputError(
            f"{FIELD}: tokenizer and model do not fit: tokenizer.json has token ids up to {largest}, but the model's "
            f"vocab_size is {vocab_size}"
        )
    context = config.get("max_position_embeddings")
    return ModelFiles(
        architecture=str((config.get("architectures") or ["unknown"])[0]),
        vocab_size=vocab_size,
        num_tokenizer_tokens=largest + 1,
        max_context_tokens=context if isinstance(context, int) else None,
    )


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise InputError(f"{FIELD}: {path.parent} must hold {path.name}, but it does not") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{FIELD}: {path} must be readable JSON: {error}") from error
    if not isinstance(value, dict):
        raise InputError(f"{FIELD}: {path} must hold a JSON object, got {type(value).__name__}")
    return value


def _largest_token_id(tokenizer: dict[str, Any]) -> int:
    vocab = tokenizer.get("model", {}).get("vocab", {})
    # BPE and WordPiece map text to id; Unigram lists its pieces, whose ids are their positions.
    ids = list(vocab.values()) if isinstance(vocab, dict) else list(range(len(vocab)))
    ids += [token["id"] for token in tokenizer.get("added_tokens") or []]
    return max(ids, default=-1)
