"""Parsers of Mistral, DeepSeek and Llama; see ``test_hermes`` for what all have in common."""

import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.errors import InputError
from steelyard.gateway.tool_calls.base import ParsedText
from steelyard.gateway.tool_calls.choice import PARSERS, parser_named, parser_reading, same_calls
from steelyard.types import ToolCall

DEEPSEEK = "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>"
ONE = "<｜tool▁call▁begin｜>{}<｜tool▁call▁end｜>"


def parse(parser: str, text: str) -> ParsedText:
    numbers = itertools.count()
    return PARSERS[parser].parse(text, lambda: f"call_{next(numbers)}")


def read(parser: str, text: str) -> tuple[str | None, list[tuple[str, str]]]:
    parsed = parse(parser, text)
    assert parsed.num_malformed == 0
    assert [call.id for call in parsed.tool_calls] == [f"call_{i}" for i in range(len(parsed.tool_calls))]
    return parsed.content, [(call.name, call.arguments) for call in parsed.tool_calls]


@pytest.mark.parametrize(
    ("parser", "text", "content", "calls"),
    [
        ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"a":  1}, "id": "abc"}]', None, [("f", '{"a":  1}')]),
        (
            "mistral",
            'So. [TOOL_CALLS][{"arguments": {}, "name": "f"}, {"name": "g", "arguments": {"a": "]"}}]',
            "So.",
            [("f", "{}"), ("g", '{"a": "]"}')],
        ),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}', None, [("f", '{"a": 1}'), ("g", "{}")]),
        ("mistral", "[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{}", None, [("f", "{}")]),
        ("deepseek", DEEPSEEK.format(ONE.format('f<｜tool▁sep｜>{"a": 1}')), None, [("f", '{"a": 1}')]),
        (
            "deepseek",
            "I look." + DEEPSEEK.format((ONE + "\n" + ONE).format("f<｜tool▁sep｜>{}", "g<｜tool▁sep｜>{}")),
            "I look.",
            [("f", "{}"), ("g", "{}")],
        ),
        (
            "deepseek",
            DEEPSEEK.format(ONE.format('function<｜tool▁sep｜>f\n```json\n{"a": 1}\n```')),
            None,
            [("f", '{"a": 1}')],
        ),
        ("llama3", '{"name": "f", "parameters": {"a":  1}}', None, [("f", '{"a":  1}')]),
        ("llama3", '\n<|python_tag|>{"type": "function", "name": "f", "arguments": {}}', None, [("f", "{}")]),
        ("llama3", 'Look: <|python_tag|>{"name": "f", "parameters": {}}', "Look:", [("f", "{}")]),
        (
            "llama3",
            '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"a": ";"}}',
            None,
            [("f", "{}"), ("g", '{"a": ";"}')],
        ),
        ("llama3", '<|python_tag|>search.call(query="é", limit=3)', None, [("search", '{"query": "é", "limit": 3}')]),
        ("llama3", "[f(a=[1, None], b=True), g()]", None, [("f", '{"a": [1, null], "b": true}'), ("g", "{}")]),
    ],
)
def test_calls_are_read_in_the_forms_of_their_family(
    parser: str, text: str, content: str | None, calls: list[tuple[str, str]]
) -> None:
    assert read(parser, text) == (content, calls)


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("mistral", "[TOOL_CALLS]"),
        ("mistral", "[TOOL_CALLS] []"),
        ("mistral", '[TOOL_CALLS] [{"name": "f"}]'),
        ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {}}, 3]'),
        ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {}'),
        ("mistral", "[TOOL_CALLS]f[ARGS]{oops}"),
        ("mistral", "[TOOL_CALLS]f[ARGS][1]"),
        ("deepseek", DEEPSEEK.format("")),
        ("deepseek", DEEPSEEK.format(ONE.format("f"))),
        ("deepseek", DEEPSEEK.format(ONE.format("f<｜tool▁sep｜>[1]"))),
        ("deepseek", DEEPSEEK.format(ONE.format("f<｜tool▁sep｜>{} more"))),
        ("deepseek", DEEPSEEK.format(ONE.format("function<｜tool▁sep｜>f\n```json\n{}"))),
        ("llama3", "<|python_tag|>print(1)"),
        ("llama3", "<|python_tag|>"),
        ("llama3", '<|python_tag|>f.call(a=b"x")'),
        ("llama3", "<|python_tag|>f.call(a=1e999)"),
        ("llama3", "<|python_tag|>f.call(**x)"),
        ("llama3", "<|python_tag|>" + "(" * 500),
        ("llama3", '{"name": "f", "parameters": [1]}'),
        ("llama3", '{"name": "f", "parameters": {}} and so on'),
        ("llama3", '{"name": "f", "parameters": {"a": 1}'),
        ("llama3", "[f(a=x)]"),
    ],
)
def test_malformed_calls_stay_in_the_content_and_are_counted(parser: str, text: str) -> None:
    assert parse(parser, text) == ParsedText(content=text, num_malformed=1)


@pytest.mark.parametrize("text", ["yes", "[1, 2]", '{"answer": 3}', "{", "[", "[x for x in y]", '["a"]', "f(a=1)"])
def test_text_that_only_begins_as_calls_of_llama_do_is_text(text: str) -> None:
    assert parse("llama3", text) == ParsedText(content=text)


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=False, allow_infinity=False)
    # Names of files and lines of code hold all that a form could take for its own.
    | st.text()
    | st.sampled_from(["</tool_call>", "[TOOL_CALLS]", "]", '"}', "<｜tool▁call▁end｜>", "```", "; {"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
CALLS = st.lists(
    st.builds(
        lambda name, arguments: ToolCall(id="x", name=name, arguments=msgspec.json.encode(arguments).decode("utf-8")),
        st.from_regex(r"[a-z_][a-z0-9_]{0,8}", fullmatch=True).filter(lambda name: name != "function"),
        st.dictionaries(st.text(max_size=4), VALUES, max_size=3),
    ),
    min_size=1,
    max_size=3,
)


@pytest.mark.parametrize("parser", sorted(PARSERS))
@given(calls=CALLS)
def test_every_parser_reads_what_it_writes(parser: str, calls: list[ToolCall]) -> None:
    parsed = parse(parser, PARSERS[parser].write(calls))
    assert (parsed.content, parsed.num_malformed) == (None, 0)
    assert [(call.name, call.arguments) for call in parsed.tool_calls] == [(c.name, c.arguments) for c in calls]
    assert parser_reading(PARSERS[parser].write(calls), calls) is PARSERS[parser]


@pytest.mark.parametrize("parser", sorted(PARSERS))
@given(calls=CALLS.map(lambda calls: calls[:1]))
def test_a_forced_opening_begins_a_call_that_is_read(parser: str, calls: list[ToolCall]) -> None:
    whole = PARSERS[parser].write(calls)
    for tool in (None, calls[0].name):
        opening = PARSERS[parser].forced_opening(tool)
        assert whole.startswith(opening)


@pytest.mark.parametrize("parser", sorted(PARSERS))
@given(text=st.lists(st.sampled_from([*"{}[]();=\"' \n", "[TOOL_CALLS]", "f", "[ARGS]", "<tool_call>"]), max_size=30))
def test_no_text_makes_a_parser_fail_or_lose_a_word(parser: str, text: list[str]) -> None:
    parsed = parse(parser, "".join(text))
    if not parsed.tool_calls:
        assert parsed.content == "".join(text)


@pytest.mark.parametrize("parser", sorted(PARSERS))
def test_deep_nesting_is_malformed_and_no_failure(parser: str) -> None:
    deep = "[" * 100_000
    call = PARSERS[parser].write([ToolCall(id="x", name="f", arguments='{"a": ' + deep + "}")])
    assert parse(parser, call).tool_calls == ()


@pytest.mark.parametrize(("parser", "mark"), [("mistral", "[TOOL_CALLS] ["), ("deepseek", "<｜tool▁call▁begin｜>f")])
def test_a_thousand_marks_are_read_one_by_one(parser: str, mark: str) -> None:
    assert parse(parser, mark * 1000).num_malformed == 1000


def test_calls_are_the_same_whatever_the_form_of_their_json() -> None:
    one = ToolCall(id="1", name="f", arguments='{"a":1, "b": 2.0}')
    assert same_calls([one], [ToolCall(id="2", name="f", arguments='{"b": 2.0, "a": 1}')])
    assert not same_calls([one], [ToolCall(id="1", name="f", arguments='{"a": 1, "b": 3}')])
    assert not same_calls([one], [ToolCall(id="1", name="g", arguments=one.arguments)])
    assert not same_calls([one], [])


def test_an_unknown_parser_is_bad_input() -> None:
    with pytest.raises(InputError, match="must be one of hermes, mistral, deepseek, llama3, got 'x'"):
        parser_named("x")
