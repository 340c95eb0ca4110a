"""The decoder that is trained: loaded from a Hugging Face directory, in float32, and run on chosen positions only."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError

from steelyard.errors import InputError
from steelyard.trainer.model_files import FIELD, check_model_dir

transformers.utils.logging.disable_progress_bar()


def load_model(directory: Path) -> torch.nn.Module:
    """Load a decoder in float32 with ``sdpa`` attention, ready for gradients.

    It stays in eval mode while it is trained: dropout would make the first probability ratio differ from 1.
    Parameters are copied into memory of their own: views into the file lie at any offset, and a matrix product
    may round differently at another alignment, which would break bit-for-bit replay.

    Raises:
        InputError: the directory is missing or incomplete, tokenizer and model do not fit, or parameters are absent.
    """
    check_model_dir(directory)
    try:
        module, loading = transformers.AutoModelForCausalLM.from_pretrained(
            directory,
            dtype=torch.float32,
            attn_implementation="sdpa",
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        raise InputError(f"{FIELD}: {directory} must load as a decoder: {error}") from error
    wrong = sorted(loading["missing_keys"]) + sorted(loading["unexpected_keys"])
    if wrong:
        raise InputError(f"{FIELD}: the weights in {directory} do not fit its config.json; missing or unknown: {wrong}")
    model: torch.nn.Module = module
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
    return model.eval()


def logits_at(module: torch.nn.Module, token_ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Next-token logits at chosen positions of right-padded rows.

    The model's own forward runs unchanged, apart from its head, which is given the chosen rows alone: of a
    conversation often only a quarter was sampled, and over a vocabulary the head is not cheap. No attention mask is
    needed: attention is causal and the padding stands on the right.

    Args:
        token_ids: int64 [num_rows, num_columns].
        rows: int64 [N], positions in the flattened [num_rows * num_columns].

    Returns:
        float32 [N, vocab_size].
    """
    with _head_on(module, rows):
        output: Any = module(input_ids=token_ids, use_cache=False)
    logits: torch.Tensor = output.logits
    return logits.float()


@contextmanager
def _head_on(module: Any, rows: torch.Tensor) -> Iterator[None]:
    def select(_head: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor]:
        hidden = inputs[0]
        return (hidden.reshape(-1, hidden.shape[-1]).index_select(0, rows),)

    handle = module.get_output_embeddings().register_forward_pre_hook(select)
    try:
        yield
    finally:
        handle.remove()
