import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.gateway.tool_calls.base import ParsedText
from steelyard.gateway.tool_calls.hermes import HermesParser


def parse(text: str) -> ParsedText:
    numbers = itertools.count()
    return HermesParser().parse(text, lambda: f"call_{next(numbers)}")


def test_arguments_are_kept_exactly_as_sampled() -> None:
    parsed = parse('<tool_call> {"arguments" : {"a":  1,\t"b" :"\\u00e9"} , "name": "f"}\n</tool_call>')
    (call,) = parsed.tool_calls
    assert (call.id, call.name, call.arguments) == ("call_0", "f", '{"a":  1,\t"b" :"\\u00e9"}')
    assert (parsed.content, parsed.num_malformed) == (None, 0)


def test_text_around_calls_is_content_without_the_white_space_beside_them() -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    parsed = parse(f"\n I look.  \n{call}\n then \n{call}\n")
    assert parsed.content == "\n I look.\nthen"
    assert [call.id for call in parsed.tool_calls] == ["call_0", "call_1"]


@given(text=st.text().filter(lambda text: "<tool_call>" not in text))
def test_text_without_a_call_is_content_unchanged(text: str) -> None:
    assert parse(text) == ParsedText(content=text)


@pytest.mark.parametrize(
    "block",
    [
        '<tool_call>{"name": "f", "arguments": {}}',
        '<tool_call>{"name": "f"}</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>',
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": 1,}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": nan}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": "\\x"}}</tool_call>',
        "<tool_call></tool_call>",
    ],
)
def test_a_malformed_call_stays_in_the_content_and_is_flagged(block: str) -> None:
    assert parse(f" so {block} ") == ParsedText(content=f" so {block} ", num_malformed=1)


def test_a_good_call_beside_a_malformed_one_is_read() -> None:
    parsed = parse('<tool_call>{oops}</tool_call><tool_call>{"name": "f", "arguments": {}}</tool_call>')
    assert [call.name for call in parsed.tool_calls] == ["f"]
    assert (parsed.content, parsed.num_malformed) == ("<tool_call>{oops}</tool_call>", 1)


def test_a_closing_mark_inside_a_string_does_not_end_the_call() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": "x</tool_call>y<tool_call>"}}</tool_call>'
    (call,) = parse(text).tool_calls
    assert call.arguments == '{"a": "x</tool_call>y<tool_call>"}'


def test_a_thousand_marks_are_read_in_no_time() -> None:
    parsed = parse("<tool_call></tool_call>" * 1000)
    assert (parsed.tool_calls, parsed.num_malformed) == ((), 1000)
