"""All parsers by name, and how the one for a template is found."""

from collections.abc import Sequence

from steelyard.errors import InputError
from steelyard.gateway.tool_calls.base import ToolParser, read_json
from steelyard.gateway.tool_calls.deepseek import DeepSeekParser
from steelyard.gateway.tool_calls.hermes import HermesParser
from steelyard.gateway.tool_calls.llama3 import Llama3Parser
from steelyard.gateway.tool_calls.mistral import MistralParser
from steelyard.types import ToolCall

# The forms with marks go first; Llama's has none and might read another's.
PARSERS: dict[str, ToolParser] = {
    parser.name: parser for parser in (HermesParser(), MistralParser(), DeepSeekParser(), Llama3Parser())
}
DEFAULT_PARSER = HermesParser.name


def parser_named(name: str) -> ToolParser:
    """The parser of that name.

    Raises:
        InputError: there is none.
    """
    try:
        return PARSERS[name]
    except KeyError:
        raise InputError(f"a tool parser must be one of {', '.join(PARSERS)}, got {name!r}") from None


def parser_reading(text: str, calls: Sequence[ToolCall]) -> ToolParser | None:
    """The parser that reads exactly ``calls``, and nothing else, in ``text``."""
    for parser in PARSERS.values():
        parsed = parser.parse(text, lambda: "")
        if parsed.content is None and not parsed.num_malformed and same_calls(parsed.tool_calls, calls):
            return parser
    return None


def parser_shown(text: str) -> ToolParser | None:
    """The parser whose opening mark stands in ``text``, say in what a system prompt teaches."""
    return next((parser for parser in PARSERS.values() if any(mark in text for mark in parser.openings)), None)


def same_calls(ones: Sequence[ToolCall], others: Sequence[ToolCall]) -> bool:
    """Whether names and arguments are the same, whatever the form of the JSON."""
    return len(ones) == len(others) and all(
        one.name == other.name and (one.arguments == other.arguments or _same_json(one.arguments, other.arguments))
        for one, other in zip(ones, others, strict=True)
    )


def _same_json(one: str, other: str) -> bool:
    value = read_json(one, dict[str, object])
    return value is not None and value == read_json(other, dict[str, object])
