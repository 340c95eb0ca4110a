import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.gateway.codec import TokenCodec
from steelyard.gateway.reply_text import GrowingText, ReplyStream, find_stop, first_stop
from steelyard.gateway.tool_calls import HermesParser
from steelyard.testing.tokenizer import write_tokenizer

PIECES = st.lists(
    st.one_of(
        st.sampled_from(
            ["<tool_call>", "</tool_call>", '{"name": "f", "arguments": {}}', " ", "\n", "STOP", "ST", "é", "🙂", "ab"]
        ),
        st.text(max_size=3),
    ),
    max_size=8,
).map("".join)


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> TokenCodec:
    return TokenCodec.load(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@given(token_ids=st.lists(st.integers(min_value=0, max_value=404), max_size=30))
def test_growing_text_is_the_beginning_of_the_whole_text_whatever_is_sampled(
    codec: TokenCodec, token_ids: list[int]
) -> None:
    growing = GrowingText(codec)
    for count, token_id in enumerate(token_ids, start=1):
        growing.push(token_id)
        assert codec.decode(token_ids[:count]).startswith(growing.text)
    assert codec.decode(token_ids).removeprefix(growing.text).strip("\ufffd") == ""


@given(text=PIECES, reads_calls=st.booleans(), chunk=st.integers(min_value=1, max_value=5))
def test_streamed_pieces_add_up_to_the_final_content(
    codec: TokenCodec, text: str, reads_calls: bool, chunk: int
) -> None:
    token_ids = codec.encode(text)
    stops = ("STOP",)
    stream = ReplyStream(codec, stops, HermesParser.opening if reads_calls else None)
    shown = ""
    for start in range(0, len(token_ids), chunk):
        shown += stream.push(token_ids[start : start + chunk])
        assert "STOP" not in shown
    cut = find_stop(codec, token_ids, stops)
    assert stream.is_stopped == (cut is not None)
    final = codec.decode(token_ids) if cut is None else cut.text
    parsed = HermesParser().parse(final, lambda: "call_1") if reads_calls else None
    content = final if parsed is None else parsed.content or ""
    assert shown + stream.finish(content) == content


@given(text=PIECES, stops=st.lists(st.sampled_from(["STOP", "é", "a", "\n\n"]), min_size=1, max_size=3))
def test_a_stop_string_ends_the_text_before_it_at_the_token_that_completes_it(
    codec: TokenCodec, text: str, stops: list[str]
) -> None:
    token_ids = codec.encode(text)
    cut = find_stop(codec, token_ids, stops)
    position = first_stop(codec.decode(token_ids), stops)
    if cut is None:
        assert position is None
        return
    assert cut.text == codec.decode(token_ids)[:position]
    assert first_stop(codec.decode(token_ids[: cut.num_tokens]), stops) == position
    assert first_stop(codec.decode(token_ids[: cut.num_tokens - 1]), stops) is None


def test_what_may_begin_a_call_or_a_stop_is_held_back(codec: TokenCodec) -> None:
    stream = ReplyStream(codec, ("STOP",), "<tool_call>")
    assert stream.push(codec.encode("so ST")) == "so"
    assert stream.push(codec.encode("ART")) == " START"
    assert stream.push(codec.encode("\n<tool_call>{")) == ""
    assert stream.push(codec.encode("more")) == ""
    assert stream.finish("so START") == ""
