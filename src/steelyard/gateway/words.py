"""Tokens of plain text by a cache of words, for byte-level BPE tokenizers.

Most of the time of encoding a text goes into its first step: cutting it into words by a regular expression over all
of Unicode. BPE then works within a word and on nothing else, so the tokens of a text are those of its words. In ASCII
text the same words can be cut by a simpler expression, in which each Unicode class is its ASCII characters, and words
come again and again. What the tokenizer's description says is translated where all of it is understood; a text that
is not ASCII, or a tokenizer of another kind, is left to the tokenizer itself.
"""

import itertools
import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from steelyard.gateway.token_text import CHAR_OF_BYTE

_CACHED_WORDS = 1 << 15
_CACHED_WORD_CHARS = 64
_BYTE_LEVEL = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""The expression of a ``ByteLevel`` pre-tokenizer that cuts (that of GPT-2)."""
_NEUTRAL = ("NFC", "NFD", "NFKC", "NFKD")
"""Normalizers that leave ASCII as it is."""
_MARKS = re.compile(r"\\p\{(\w+)\}|\\.|[\[\]^$]", re.DOTALL)
_NOT_UNDERSTOOD = re.compile(r"\\[PhHXRKGAzZkgbB]|&&|\(\?[^:!i=]|\(\?i[^:]")
"""What Python's expressions do not have, or mean otherwise."""
_ASCII = [chr(code) for code in range(128)]
_NEVER = "\u0100"
"""Stands for a class that has no ASCII character."""

Cut = Callable[[str], Iterable[str]]
"""What an expression finds in a text and what lies between, in order; some may be empty."""
Encode = Callable[[str], tuple[int, ...]]


def word_cutters(description: dict[str, Any]) -> list[Cut] | None:
    """How a tokenizer cuts ASCII text into words, one step after the other; None where it is not understood.

    Args:
        description: the content of a ``tokenizer.json``.
    """
    model, normalizer = description.get("model") or {}, description.get("normalizer")
    if model.get("type") != "BPE" or model.get("dropout") or model.get("end_of_word_suffix"):
        return None
    if model.get("continuing_subword_prefix") or model.get("byte_fallback"):
        return None
    if normalizer is not None and normalizer.get("type") not in _NEUTRAL:
        return None
    steps = description.get("pre_tokenizer") or {}
    steps = steps.get("pretokenizers", ()) if steps.get("type") == "Sequence" else (steps,)
    if not steps or steps[-1].get("type") != "ByteLevel":
        return None
    cutters: list[Cut] = []
    for step in steps:
        pattern = _pattern_of(step)
        if pattern is None:
            return None
        if isinstance(pattern, re.Pattern):
            cutters.append(_cutter(pattern))
    return cutters


def word_encoder(model: Any) -> Encode:
    """The tokens of one ASCII word by the BPE ``model`` of a byte-level tokenizer, without the tokenizer around it."""

    def encode(word: str) -> tuple[int, ...]:
        return tuple([token.id for token in model.tokenize(word.translate(CHAR_OF_BYTE))])

    return encode


class _KnownWords(dict[str, tuple[int, ...]]):
    """The tokens of words; a look-up costs what one of a dict does. Long words must not fill it."""

    def __init__(self, encode_word: Encode, older: Mapping[str, tuple[int, ...]]) -> None:
        self._encode_word = encode_word
        self._older = older

    def __missing__(self, word: str) -> tuple[int, ...]:
        found = self._older.get(word)
        if found is None:
            found = self._encode_word(word)
        if len(word) <= _CACHED_WORD_CHARS:
            self[word] = found
        return found

    def followed(self) -> "_KnownWords":
        """An empty one that still knows these words, but not the older ones."""
        self._older = {}
        return _KnownWords(self._encode_word, self)


class WordEncoder:
    """Encodes ASCII texts word by word.

    Args:
        cutters: from :func:`word_cutters`.
        encode_word: the tokens of one word, whatever is in it.
    """

    def __init__(self, cutters: list[Cut], encode_word: Encode) -> None:
        self._first, *self._cutters = cutters or [lambda text: (text,)]
        self._known = _KnownWords(encode_word, {})

    def encode(self, text: str) -> tuple[int, ...]:
        """The token ids of ``text``, which must be ASCII."""
        if len(self._known) >= _CACHED_WORDS:
            self._known = self._known.followed()
        words = self._first(text)
        for cut in self._cutters:
            words = itertools.chain.from_iterable(map(cut, words))
        return tuple(itertools.chain.from_iterable(map(self._known.__getitem__, words)))


def _cutter(pattern: "re.Pattern[str]") -> Cut:
    """Cuts by an expression in one group. Most expressions leave nothing in between, and then finding is enough."""
    find, split = pattern.findall, pattern.split

    def cut(text: str) -> Iterable[str]:
        found: list[str] = find(text)
        return found if sum(map(len, found)) == len(text) else split(text)

    return cut


def _pattern_of(step: dict[str, Any]) -> "re.Pattern[str] | str | None":
    """The expression by which a step cuts; "" for one that does not cut, None for one that is not understood."""
    match step:
        case {"type": "ByteLevel", "add_prefix_space": False}:
            return ascii_pattern(_BYTE_LEVEL) if step.get("use_regex", True) else ""
        case {"type": "Split", "behavior": "Isolated", "pattern": {"Regex": str(source)}} if not step.get("invert"):
            return ascii_pattern(source)
        case {"type": "Digits"}:
            return re.compile("([0-9])" if step.get("individual_digits") else "([0-9]+)")
        case _:
            return None


def ascii_pattern(source: str) -> "re.Pattern[str] | None":
    """A tokenizer's expression for ASCII text, in one group; None where it uses what is not understood."""
    translated = None if _NOT_UNDERSTOOD.search(source.replace("\\\\", "")) else _without_properties(source)
    if translated is None:
        return None
    try:
        found = re.compile(f"({translated})", re.ASCII)
    except re.error:
        return None
    return found if found.groups == 1 else None


def _without_properties(source: str) -> str | None:
    """Each ``\\p{...}`` written as its ASCII characters, in a class of its own where it does not stand in one.

    None where a class stands in a class, or where the expression speaks of the ends of a line.
    """
    pieces, position, in_class = [], 0, False
    for match in _MARKS.finditer(source):
        mark, name = match[0], match[1]
        if (mark in "^$" and not in_class) or (mark == "[" and in_class):
            return None
        in_class = mark == "[" or (in_class and mark != "]")
        if name is not None:
            chars = "".join(re.escape(char) for char in _ASCII if unicodedata.category(char).startswith(name)) or _NEVER
            pieces += [source[position : match.start()], chars if in_class else f"[{chars}]"]
            position = match.end()
    return "".join(pieces) + source[position:]


_SAMPLE = (
    "def add(a, b):\n\treturn a + b  # it's 12345 or 3.14, isn't it?\r\n\r\n    if x_1 != 'We\\'LL' and  y[0]:\n"
    '  "ERROR:  line 42 failed"   \n{"k": [1, 2], "K": null}\n\n\n\t \tEnd ' + "".join(_ASCII) + "  "
)


def encodes_alike(encoder: WordEncoder, encode: Encode) -> bool:
    """Whether both agree on a sample of program text and on pieces of it that begin and end anywhere."""
    cuts = range(0, len(_SAMPLE), 7)
    texts = [_SAMPLE, *(_SAMPLE[start:] for start in cuts), *(_SAMPLE[:end] for end in cuts if end)]
    return all(encoder.encode(text) == encode(text) for text in texts)
