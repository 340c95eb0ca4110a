import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from steelyard.gateway.token_text import TokenBytes, is_byte_level
from steelyard.testing.tokenizer import write_tokenizer

NUM_IDS = 519


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory: Path = write_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    described = json.loads((directory / "tokenizer.json").read_text())
    assert is_byte_level(described)
    foreign = {**described["added_tokens"][-1], "id": NUM_IDS - 1, "content": "\u4e2d \u00e9nd"}
    return Tokenizer.from_str(json.dumps({**described, "added_tokens": [*described["added_tokens"], foreign]}))


@given(token_ids=st.lists(st.integers(0, NUM_IDS + 3), max_size=12))
def test_the_table_gives_the_text_that_the_tokenizer_gives(tokenizer: Tokenizer, token_ids: list[int]) -> None:
    table = TokenBytes(tokenizer.id_to_token)
    assert table.decode(token_ids) == tokenizer.decode(token_ids, skip_special_tokens=False)


def test_ids_without_a_token_are_not_kept() -> None:
    table = TokenBytes({1: "a"}.get)
    assert table.decode([1, 7, 8, 9, 1]) == "aa"
    assert list(table) == [1]


@pytest.mark.parametrize("decoder", [None, {"type": "Metaspace"}, {"type": "Sequence", "decoders": []}])
def test_other_decoders_are_left_to_the_tokenizer(decoder: object) -> None:
    assert not is_byte_level({"decoder": decoder})
