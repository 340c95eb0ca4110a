"""What the quick policy is made of, its tokenizer, and the key under which it is cached. Imports no torch."""

import importlib.metadata
import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from steelyard.digests import digest_bytes
from steelyard.types import Record

END_OF_TEXT = "<|endoftext|>"
IM_START = "<|im_start|>"
IM_END = "<|im_end|>"
CONTROL_TOKENS = (END_OF_TEXT, IM_START, IM_END)
"""Special tokens of ChatML; nothing that a tool or a user writes can become one."""

CALL_TOKENS = ("<tool_call>", "</tool_call>")
"""The marks of a Hermes tool call: one token each, yet ordinary text, as in Qwen's tokenizers."""

_CUTS = re.compile("|".join(re.escape(mark) for mark in (*CONTROL_TOKENS, *CALL_TOKENS)))
_LIBRARIES = ("tokenizers", "torch", "transformers")


class QuickPolicyRecipe(Record, frozen=True, kw_only=True):
    """A small decoder of the Llama architecture and its supervised warm-up.

    Defaults: 1.3M parameters. A warm-up step takes ``batch_tokens`` padded tokens of sequences of similar length
    (for the same tokens in all, twice as many steps of half the size reach a clearly lower loss). After
    ``time_limit_s`` seconds, preparation included, the warm-up ends; a machine that is late at half of its time for
    training runs down the learning rate by the clock, and so still ends with a small one. ``context_weight`` is the
    weight of the loss on tokens that the policy will not be asked to produce (1 for those it will): a little of it
    teaches what functions look like, long before the policy is asked to mend one. Matrices inside the layers are
    trained by Muon at ``matrix_rate``, which needs less than half as many tokens as AdamW here; all else by AdamW at
    ``learning_rate``.
    """

    vocab_size: int = 1024
    hidden_size: int = 160
    intermediate_size: int = 448
    num_layers: int = 4
    num_heads: int = 5
    num_kv_heads: int = 1
    head_dim: int = 32
    max_context_tokens: int = 2048
    num_steps: int = 850
    batch_tokens: int = 2048
    learning_rate: float = 3e-3
    matrix_rate: float = 0.02
    warmup_frac: float = 0.05
    final_rate_frac: float = 0.05
    weight_decay: float = 0.05
    max_grad_norm: float = 1.0
    context_weight: float = 0.3
    num_threads: int = 2
    time_limit_s: float = 113.0
    seed: int = 0


class TokenSequence(Record, frozen=True, kw_only=True):
    """One demonstration as tokens; ``loss_mask[i]`` is 1 where the policy is to produce ``token_ids[i]``."""

    token_ids: tuple[int, ...]
    loss_mask: tuple[int, ...]


class WarmUpProgress(Record, frozen=True, kw_only=True):
    """How far a warm-up is. ``loss`` is the mean over recent steps, in nats per token to be produced."""

    step: int
    num_steps: int
    loss: float
    tokens_per_s: float
    elapsed_s: float


class WarmUpReport(Record, frozen=True, kw_only=True):
    """A finished warm-up. ``num_steps`` is below the recipe's where time ran out."""

    num_parameters: int
    num_steps: int
    num_tokens: int
    first_loss: float
    last_loss: float
    duration_s: float


OnProgress = Callable[[WarmUpProgress], None]


def write_quick_tokenizer(directory: Path, texts: Iterable[str], chat_template: str, vocab_size: int) -> int:
    """Train a byte-level BPE on ``texts`` and write tokenizer files and chat template; returns the number of tokens.

    Pieces end at line ends and digits alone, so that what is said often (the frame of a tool call, a whole line of
    code) becomes one token, while numbers and line numbers are read digit by digit. Control tokens and call marks in
    ``texts`` only cut them. Every byte is a token, so that any text can be encoded. Deterministic for the same texts
    in the same order.
    """
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(r"\n|\d"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(CALL_TOKENS),
        special_tokens=[AddedToken(text, special=True, normalized=False) for text in CONTROL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((piece for text in texts for piece in _CUTS.split(text) if piece), trainer)
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in CALL_TOKENS])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "add_prefix_space": False,
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": IM_END,
        "pad_token": END_OF_TEXT,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    (directory / "chat_template.jinja").write_text(chat_template, encoding="utf-8")
    return int(tokenizer.get_vocab_size(with_added_tokens=True))


def cache_key(recipe: QuickPolicyRecipe, parts: Mapping[str, str]) -> str:
    """A digest of all that makes a quick policy: the recipe, this package's code, the libraries and ``parts``.

    Args:
        parts: what the demonstrations are made of, by name (digests of their code, seeds, the chat template).
    """
    versions = {name: importlib.metadata.version(name) for name in _LIBRARIES}
    code = source_digest([Path(__file__).parent])
    recipe_fields = {name: getattr(recipe, name) for name in recipe.__struct_fields__}
    entry = {"recipe": recipe_fields, "libraries": versions, "code": code, "parts": dict(parts)}
    return digest_bytes(json.dumps(entry, sort_keys=True).encode())


def source_digest(places: Iterable[Path]) -> str:
    """Digest of the Python and template files in directories (with all below) and of single files, by their names."""
    lines = []
    for place in places:
        files = [place] if place.is_file() else [p for p in place.rglob("*") if p.suffix in {".py", ".jinja"}]
        for file in sorted(files):
            name = file.name if place.is_file() else str(file.relative_to(place.parent))
            lines.append(f"{name} {digest_bytes(file.read_bytes())}")
    return digest_bytes("\n".join(lines).encode())
