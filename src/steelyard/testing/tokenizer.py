"""A tiny tokenizer directory in the Hugging Face layout: byte-level BPE with ChatML control tokens."""

from collections.abc import Iterable
from importlib import resources
from pathlib import Path

import msgspec
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

_TEXTS = (
    "system\nTools, called as",
    'user\nThe function add has a bug. {"name": "replace_line", "arguments": {"line": 3, "text": "return a + b"}}',
    "assistant\ntool\nok failed passed line number: def f(a, b):\n    return a - b\n",
    'run_tests() submit() replace_line(line: integer, text: string) {"name": "run_tests", "arguments": {}}',
    "think about it, the answer is 42\n\n",
)
CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEXT_TOKENS = ("<tool_call>", "</tool_call>", "<think>", "</think>")


def chatml_hermes_template() -> str:
    """The chat template that ships with the gateway."""
    return resources.files("steelyard.gateway").joinpath("templates/chatml_hermes.jinja").read_text("utf-8")


def write_tokenizer(
    directory: Path, template: str | None = None, vocab_size: int = 512, texts: Iterable[str] = _TEXTS
) -> Path:
    """Write ``tokenizer.json``, ``tokenizer_config.json`` and ``chat_template.jinja``; returns ``directory``.

    As in Qwen tokenizers, the ChatML tokens are special and the tool-call and thinking marks are added
    tokens that are not special. ``texts`` are what it is trained on.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(text, special=True, normalized=False) for text in CONTROL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in TEXT_TOKENS])
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (directory / "tokenizer_config.json").write_bytes(msgspec.json.format(msgspec.json.encode(settings), indent=2))
    text = chatml_hermes_template() if template is None else template
    (directory / "chat_template.jinja").write_text(text, encoding="utf-8")
    return directory
