"""Tiny model directories of the families whose templates differ in their rules.

The templates are of our own writing; what they share with the families' own are the rules: where turns end and what
closes them, how tools, calls, results and reasoning are written, what a later turn writes in another way. The
tokenizers are small, with the control tokens of the family and its kind of encoding.
"""

from collections.abc import Mapping
from importlib import resources
from pathlib import Path

import msgspec
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from steelyard.testing.tokenizer import chatml_hermes_template
from steelyard.types import Record

_TEXTS = (
    'The function add has a bug. {"name": "look", "arguments": {"path": "a.py", "line": 3}}',
    "You are a careful engineer. Find it, then say what is wrong.\n\n",
    "step by step, because 2 and 3 are 5. It returns a - b, but must return a + b.\n",
    "Your tools: Today: 1 Jul 2024 [1, 2, 3] ok failed passed",
)
_VOCAB_SIZE = 480
_UNKNOWN = "<unk>"
_CHATML = ("<|im_start|>", "<|im_end|>")
_QWEN_MARKS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
_DEEPSEEK_MARKS = (
    *("<｜User｜>", "<｜Assistant｜>", "<think>", "</think>"),
    *(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁sep｜>",
    ),
    *("<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"),
)
_LLAMA3 = (
    *("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>"),
    *("<|eot_id|>", "<|eom_id|>", "<|python_tag|>"),
)
_MISTRAL = (
    *("[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
)


class Family(Record, frozen=True, kw_only=True):
    """A family's template and tokenizer.

    ``special`` and ``ordinary``: added tokens, marked as special or not. ``stops``: more tokens that end a turn.
    ``is_byte_level``: bytes as characters; else words with a mark before them and bytes as a last resort.
    """

    name: str
    template: str
    special: tuple[str, ...]
    ordinary: tuple[str, ...] = ()
    bos: str | None = None
    eos: str
    stops: tuple[str, ...] = ()
    is_byte_level: bool = True


def _template(name: str) -> str:
    return resources.files("steelyard.testing.families").joinpath(f"{name}.jinja").read_text("utf-8")


def families() -> Mapping[str, Family]:
    """All families by name."""
    qwen3 = _template("qwen3")
    qwen = Family(
        name="qwen3", template=qwen3, special=("<|endoftext|>", *_CHATML), ordinary=_QWEN_MARKS, eos="<|im_end|>"
    )
    kept = qwen3.replace("keeps_reasoning = false", "keeps_reasoning = true")
    deepseek = Family(
        name="deepseek",
        template=_template("deepseek"),
        special=("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
        ordinary=_DEEPSEEK_MARKS,
        bos="<｜begin▁of▁sentence｜>",
        eos="<｜end▁of▁sentence｜>",
    )
    found = (
        msgspec.structs.replace(qwen, name="chatml", template=chatml_hermes_template()),
        msgspec.structs.replace(qwen, name="chatml_plain", template=_template("chatml_plain"), ordinary=()),
        Family(
            name="llama3",
            template=_template("llama3"),
            special=_LLAMA3,
            bos="<|begin_of_text|>",
            eos="<|eot_id|>",
            stops=("<|end_of_text|>", "<|eom_id|>"),
        ),
        qwen,
        msgspec.structs.replace(qwen, name="qwen3_kept", template=kept),
        Family(
            name="mistral",
            template=_template("mistral"),
            special=("<s>", "</s>", *_MISTRAL),
            bos="<s>",
            eos="</s>",
            is_byte_level=False,
        ),
        deepseek,
        msgspec.structs.replace(deepseek, name="deepseek_r1", template=_template("deepseek_r1")),
    )
    return {family.name: family for family in found}


def write_family(directory: Path, family: Family) -> Path:
    """Write the files of a model directory that say how to talk to it; returns ``directory``."""
    tokenizer = _byte_level(family.special) if family.is_byte_level else _words_and_bytes(family.special)
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in family.ordinary])
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"eos_token": family.eos, "tokenizer_class": "PreTrainedTokenizerFast"}
    if family.bos is not None:
        settings["bos_token"] = family.bos
    ends = [tokenizer.token_to_id(text) for text in (family.eos, *family.stops)]
    for name, content in (("tokenizer_config.json", settings), ("generation_config.json", {"eos_token_id": ends})):
        (directory / name).write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=2))
    (directory / "chat_template.jinja").write_text(family.template, encoding="utf-8")
    return directory


def _byte_level(special: tuple[str, ...]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCAB_SIZE,
        special_tokens=_added(special),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXTS, trainer)
    return tokenizer


def _words_and_bytes(special: tuple[str, ...]) -> Tokenizer:
    """As SentencePiece does it: a mark for each space and before each piece; what has no token is spelled in bytes."""
    draft = Tokenizer(models.BPE(unk_token=_UNKNOWN))
    draft.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=_VOCAB_SIZE // 2, special_tokens=[_UNKNOWN], show_progress=False)
    draft.train_from_iterator(_TEXTS, trainer)
    model = msgspec.json.decode(draft.to_str())["model"]
    texts = [_UNKNOWN, *special, *(f"<0x{byte:02X}>" for byte in range(256))]
    texts += [text for text in sorted(model["vocab"], key=model["vocab"].__getitem__) if text != _UNKNOWN]
    vocab = {text: number for number, text in enumerate(texts)}
    merges = [(one, other) for one, other in model["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token=_UNKNOWN, fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(_added((_UNKNOWN, *special)))
    return tokenizer


def _added(texts: tuple[str, ...]) -> list[AddedToken]:
    return [AddedToken(text, special=True, normalized=False) for text in texts]
