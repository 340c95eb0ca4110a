import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from steelyard.gateway.codec import TokenCodec
from steelyard.gateway.words import WordEncoder, ascii_pattern, encodes_alike, word_cutters, word_encoder
from steelyard.testing.tokenizer import write_tokenizer

LLAMA = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
CASES = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{M}]*[\p{Ll}\p{Lm}]+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PUNCTUATION = r"[!-/:-~]?[A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s+(?!\S)|\s+"
WHOLE = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
CUTTING = {**WHOLE, "use_regex": True}


def split(source: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": source}, "behavior": "Isolated", "invert": False}


def sequence(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": list(steps)}


FAMILIES = {
    "byte level": CUTTING,
    "digits apart": sequence({"type": "Digits", "individual_digits": True}, CUTTING),
    "digits together": sequence({"type": "Digits", "individual_digits": False}, CUTTING),
    "one expression": sequence(split(LLAMA), WHOLE),
    "cases of letters": sequence(split(CASES), WHOLE),
    "several expressions": sequence(split(r"\p{N}{1,3}"), split("[一-龥]+"), split(PUNCTUATION), WHOLE),
}


@pytest.fixture(scope="module")
def description(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = write_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    found: dict[str, Any] = json.loads((directory / "tokenizer.json").read_text())
    return {**found, "added_tokens": []}


def encoder_of(description: dict[str, Any]) -> WordEncoder:
    cutters = word_cutters(description)
    assert cutters is not None
    return WordEncoder(cutters, word_encoder(Tokenizer.from_str(json.dumps(description)).model))


PIECES = st.sampled_from(
    [" ", "  ", "\n", "\r\n", "\t", "\x1c", "a", "Bc", "def", "'s", "'LL", "1", "2345", "!", "_$", "/"]
)
TEXTS = st.one_of(st.text(st.characters(max_codepoint=127)), st.lists(PIECES, max_size=20).map("".join))


@pytest.mark.parametrize("family", FAMILIES)
@given(text=TEXTS)
def test_words_have_the_tokens_that_the_tokenizer_gives_the_text(
    description: dict[str, Any], family: str, text: str
) -> None:
    described = {**description, "pre_tokenizer": FAMILIES[family]}
    tokenizer = Tokenizer.from_str(json.dumps(described))
    assert list(encoder_of(described).encode(text)) == tokenizer.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize(
    "change",
    [
        {"pre_tokenizer": None},
        {"pre_tokenizer": {**CUTTING, "add_prefix_space": True}},
        {"pre_tokenizer": {"type": "Metaspace", "replacement": "_", "prepend_scheme": "first", "split": True}},
        {"pre_tokenizer": sequence(split(r"\P{L}+"), WHOLE)},
        {"pre_tokenizer": sequence({**split(r"\p{L}+"), "behavior": "Removed"}, WHOLE)},
        {"pre_tokenizer": sequence({**split(r"\p{L}+"), "invert": True}, WHOLE)},
        {"normalizer": {"type": "Lowercase"}},
        {"model": {"type": "Unigram"}},
    ],
)
def test_a_tokenizer_that_is_not_understood_is_left_to_itself(
    description: dict[str, Any], change: dict[str, Any]
) -> None:
    assert word_cutters({**description, **change}) is None


@pytest.mark.parametrize("source", [r"^a", r"a$", r"[a[b]]", r"[a&&b]", r"\h+", r"(a)|b", r"(?m:a.b)", r"(?i)a", "("])
def test_an_expression_that_python_reads_otherwise_is_not_translated(source: str) -> None:
    assert ascii_pattern(source) is None


def test_a_class_without_ascii_characters_matches_nothing() -> None:
    found = ascii_pattern(r"\p{Mn}+|[\p{Lt}x]")
    assert found is not None
    assert [word for word in found.split("axb") if re.fullmatch(found, word)] == ["x"]


def test_a_translation_that_gives_other_tokens_is_noticed(description: dict[str, Any]) -> None:
    encoder = encoder_of({**description, "pre_tokenizer": CUTTING})
    other = Tokenizer.from_str(json.dumps({**description, "pre_tokenizer": sequence(split(r"\p{N}"), WHOLE)}))
    assert encodes_alike(encoder, encoder.encode)
    assert not encodes_alike(encoder, lambda text: tuple(other.encode(text, add_special_tokens=False).ids))


def test_long_words_are_not_kept() -> None:
    asked: list[str] = []

    def encode_word(word: str) -> tuple[int, ...]:
        asked.append(word)
        return (len(word),)

    encoder = WordEncoder([str.splitlines], encode_word)
    for _ in range(2):
        assert encoder.encode("short\n" + "x" * 65) == (5, 65)
    assert asked == ["short", "x" * 65, "x" * 65]


@given(text=st.text())
def test_the_codec_gives_any_text_the_tokens_of_its_tokenizer(
    tokenizer: Tokenizer, codec: TokenCodec, text: str
) -> None:
    assert codec.encode(codec.guard(text)) == tokenizer.encode(text, add_special_tokens=False).ids


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("codec"))


@pytest.fixture(scope="module")
def codec(directory: Path) -> TokenCodec:
    return TokenCodec.load(directory)


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Tokenizer:
    described = json.loads((directory / "tokenizer.json").read_text())
    return Tokenizer.from_str(json.dumps({**described, "added_tokens": []}))


def test_of_many_words_the_newest_are_known_and_the_oldest_are_not() -> None:
    asked: list[str] = []

    def encode_word(word: str) -> tuple[int, ...]:
        asked.append(word)
        return (int(word),)

    encoder = WordEncoder([str.split], encode_word)
    for begin in range(0, 80_000, 1000):
        numbers = range(begin, begin + 1000)
        assert encoder.encode(" ".join(map(str, numbers))) == tuple(numbers)
    asked.clear()
    assert encoder.encode(" ".join(map(str, range(60_000, 80_000)))) == tuple(range(60_000, 80_000))
    assert asked == []
    assert encoder.encode("7 8") == (7, 8)
    assert asked == ["7", "8"], "what is kept is bounded"
