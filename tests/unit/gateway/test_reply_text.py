import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.gateway.codec import TokenCodec
from steelyard.gateway.reply_reader import ReasoningMarks, ReplyReader
from steelyard.gateway.reply_text import GrowingText, Pieces, ReplyStream, find_stop, first_stop
from steelyard.gateway.tool_calls.choice import PARSERS
from steelyard.testing.tokenizer import write_tokenizer
from steelyard.types import Message

MARKS = ReasoningMarks("<think>", "</think>")
PIECES = st.lists(
    st.one_of(
        st.sampled_from(
            [
                *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "f", "<|python_tag|>", "; "),
                *('{"name": "f", "arguments": {}}', "[f(a=1)]", "{}", "<think>", "</think>", "<", "{"),
                *(" ", "\n", "STOP", "ST", "é", "🙂", "ab"),
            ]
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


@given(
    text=PIECES,
    parser=st.sampled_from(sorted(PARSERS)),
    reads_calls=st.booleans(),
    has_marks=st.booleans(),
    is_open=st.booleans(),
    chunk=st.integers(min_value=1, max_value=5),
)
def test_streamed_pieces_add_up_to_the_final_message(
    codec: TokenCodec, text: str, parser: str, reads_calls: bool, has_marks: bool, is_open: bool, chunk: int
) -> None:
    token_ids = codec.encode(text)
    stops = ("STOP",)
    is_open = is_open and has_marks
    reader = ReplyReader(PARSERS[parser], MARKS if has_marks else None)
    stream = ReplyStream(codec, stops, reader, reads_calls=reads_calls, is_open=is_open)
    content = reasoning = ""
    for start in range(0, len(token_ids), chunk):
        pieces = stream.push(token_ids[start : start + chunk])
        content, reasoning = content + pieces.content, reasoning + pieces.reasoning
        assert "STOP" not in content + reasoning
    cut = find_stop(codec, token_ids, stops)
    assert stream.is_stopped == (cut is not None)
    final = codec.decode(token_ids) if cut is None else cut.text
    read = reader.read(final, lambda: "call_1", reads_calls=reads_calls, is_open=is_open)
    rest = stream.finish(Message(role="assistant", content=read.content, reasoning=read.reasoning))
    assert content + rest.content == (read.content or "")
    assert reasoning + rest.reasoning == (read.reasoning or "")


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
    stream = ReplyStream(codec, ("STOP",), ReplyReader(PARSERS["hermes"], None), reads_calls=True)
    assert stream.push(codec.encode("so ST")).content == "so"
    assert stream.push(codec.encode("ART")).content == " START"
    assert stream.push(codec.encode("\n<tool_call>{")) == Pieces()
    assert stream.push(codec.encode("more")) == Pieces()
    assert stream.finish(Message(role="assistant", content="so START")) == Pieces()


def test_reasoning_is_shown_while_it_grows(codec: TokenCodec) -> None:
    stream = ReplyStream(codec, (), ReplyReader(None, MARKS))
    assert stream.push(codec.encode("\n<think>so it")) == Pieces(reasoning="so it")
    assert stream.push(codec.encode(" is</thi")) == Pieces(reasoning=" is")
    assert stream.push(codec.encode("nk>\nyes")) == Pieces(content="yes")
    opened = ReplyStream(codec, (), ReplyReader(None, MARKS), is_open=True)
    assert opened.push(codec.encode("so</think>yes")) == Pieces(reasoning="so", content="yes")
