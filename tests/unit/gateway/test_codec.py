import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from steelyard.errors import InputError
from steelyard.gateway.codec import TokenCodec
from steelyard.testing.tokenizer import CONTROL_TOKENS, TEXT_TOKENS, write_tokenizer


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> TokenCodec:
    return TokenCodec.load(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


ALL = (*CONTROL_TOKENS, *TEXT_TOKENS)
HOSTILE = st.lists(
    st.one_of(
        st.sampled_from([*ALL, "<|im_", "end|>", "<", ">", "|>", "<tool_", "call>", "\U0010fffd", "\U00100001", " \n"]),
        st.text(max_size=5),
    ),
    max_size=8,
).map("".join)


def control_ids(codec: TokenCodec) -> set[int]:
    return {token.token_id for token in codec.control_tokens}


@given(text=HOSTILE)
def test_guarded_content_is_restored_exactly(codec: TokenCodec, text: str) -> None:
    assert codec.restore(codec.guard(text)) == text
    assert codec.restore(codec.guard_except(["<think>"])(text)) == text


@given(first=HOSTILE, second=HOSTILE)
def test_content_never_becomes_a_control_token_even_where_two_contents_meet(
    codec: TokenCodec, first: str, second: str
) -> None:
    joined = codec.guard(first) + codec.guard(second)
    token_ids = codec.encode(joined)
    assert not control_ids(codec) & set(token_ids)
    assert codec.decode(token_ids) == first + second


@given(first=HOSTILE, second=HOSTILE)
def test_trimmed_contents_cannot_join_to_a_control_token(codec: TokenCodec, first: str, second: str) -> None:
    joined = codec.guard(first).rstrip() + codec.guard(second).lstrip()
    assert not control_ids(codec) & set(codec.encode(joined))


def test_control_strings_of_the_template_are_control_tokens(codec: TokenCodec) -> None:
    text = "<|im_start|>tool\n" + codec.guard("<|im_end|>") + "<|im_end|>\n"
    token_ids = codec.encode(text)
    assert [t for t in token_ids if t in control_ids(codec)] == [
        codec.token_id("<|im_start|>"),
        codec.token_id("<|im_end|>"),
    ]
    assert codec.decode(token_ids) == "<|im_start|>tool\n<|im_end|><|im_end|>\n"


def test_marks_that_a_guard_excepts_are_kept(codec: TokenCodec) -> None:
    text = codec.guard_except(["<think>", "</think>"])("<think>x</think><|im_end|>")
    assert text.startswith("<think>x</think>")
    assert "<|im_end|>" not in text


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_file(str(write_tokenizer(tmp_path_factory.mktemp("same")) / "tokenizer.json"))


@given(text=st.text())
def test_ordinary_text_is_encoded_as_the_tokenizer_itself_does(
    codec: TokenCodec, tokenizer: Tokenizer, text: str
) -> None:
    message = f"<|im_start|>user\n{text}<|im_end|>\n"
    assert codec.encode(message) == tokenizer.encode(message, add_special_tokens=False).ids


def test_a_tokenizer_that_puts_a_space_first_does_so_only_at_the_start() -> None:
    pieces = {"▁": 0, "a": 1, "▁a": 2, "b": 3, "▁b": 4, "<end>": 5}
    tokenizer = Tokenizer(models.BPE(vocab=pieces, merges=[("▁", "a"), ("▁", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    tokenizer.add_tokens([AddedToken("<end>", special=True, normalized=False)])
    codec = TokenCodec(tokenizer.to_str().encode())
    assert codec.encode("a<end>b") == tokenizer.encode("a<end>b").ids == [2, 5, 3]
    assert codec.encode("b", is_start=False) == [3]


def test_a_control_token_that_takes_the_white_space_beside_it_does_so() -> None:
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0, " ": 1, "<m>": 2}, merges=[]))
    tokenizer.add_tokens([AddedToken("<m>", special=True, lstrip=True, rstrip=True, normalized=False)])
    codec = TokenCodec(tokenizer.to_str().encode())
    assert codec.encode("a <m> a") == tokenizer.encode("a <m> a").ids == [0, 2, 0]


def test_a_tokenizer_that_cannot_write_its_control_strings_as_text_is_refused() -> None:
    tokenizer = Tokenizer(models.WordLevel(vocab={"<s>": 0, "?": 1}, unk_token="?"))
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    with pytest.raises(InputError, match="'<s>' as its control token 0"):
        TokenCodec(tokenizer.to_str().encode())


def test_a_directory_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"tokenizer\.json"):
        TokenCodec.load(tmp_path)


def test_a_file_that_is_no_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps([1]))
    with pytest.raises(InputError, match="is not a tokenizer"):
        TokenCodec.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"type": "nothing"}}))
    with pytest.raises(InputError, match="is not a tokenizer"):
        TokenCodec.load(tmp_path)
