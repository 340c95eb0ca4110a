"""What a parser of tool calls is, and what it says."""

import json
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import msgspec

from steelyard.types import Record, ToolCall

NewId = Callable[[], str]
Read = TypeVar("Read")
_SCANNER = json.JSONDecoder()


class ParsedText(Record, frozen=True, kw_only=True):
    """What a sampled text says. ``content`` is None where it is nothing but tool calls.

    ``num_malformed``: places that open a call and cannot be read; they stay in ``content`` as sampled.
    """

    content: str | None
    tool_calls: tuple[ToolCall, ...] = ()
    num_malformed: int = 0


class ToolParser(Protocol):
    """Reads and writes the calls of one family.

    ``openings``: strings from which on a streamed text is held back, for they may open a call; ``head_openings``
    do so only where the text begins with them. ``marks``: all strings of the form that a tokenizer may have as
    tokens of their own. ``closing`` ends a call and nothing else, where the form has such a string.
    """

    name: str
    openings: tuple[str, ...]
    head_openings: tuple[str, ...]
    marks: tuple[str, ...]
    closing: str | None

    def parse(self, text: str, new_id: NewId) -> ParsedText:
        """Split ``text`` into content and calls; arguments are JSON text, exactly as sampled where it was JSON.

        Without a readable call the content is ``text`` unchanged; else the pieces around the calls, without
        white space beside the calls, joined by newlines.
        """
        ...

    def write(self, calls: Sequence[ToolCall]) -> str:
        """Calls as the family's models are taught to write them."""
        ...

    def forced_opening(self, tool: str | None) -> str:
        """How a reply begins that calls ``tool``, or any tool where it is None."""
        ...


def read_json(text: str | bytes, kind: type[Read]) -> Read | None:
    """``text`` as JSON of ``kind``; None where it is not."""
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return None


def object_text(text: str | bytes) -> str | None:
    """``text`` where it is one JSON object, else None."""
    if read_json(text, dict[str, Any]) is None:
        return None
    return text if isinstance(text, str) else text.decode("utf-8")


def end_of_json(text: str, start: int) -> int | None:
    """Where the JSON value that begins at ``start`` ends; None where there is none."""
    try:
        return _SCANNER.raw_decode(text, start)[1]
    except (ValueError, RecursionError):
        return None


def name_json(name: str) -> str:
    """``name`` as a JSON string."""
    return json.dumps(name, ensure_ascii=False)


def split_off(text: str, found: Sequence[tuple[int, int, ToolCall]], num_malformed: int) -> ParsedText:
    """Content and calls of a text in which calls stand at ``found`` places (start, end), in order."""
    if not found:
        return ParsedText(content=text, num_malformed=num_malformed)
    edges = [0, *(edge for start, end, _ in found for edge in (start, end)), len(text)]
    pieces = [text[edges[i] : edges[i + 1]] for i in range(0, len(edges), 2)]
    shown = [pieces[0].rstrip(), *(piece.strip() for piece in pieces[1:])]
    content = "\n".join(piece for piece in shown if piece)
    return ParsedText(
        content=content or None, tool_calls=tuple(call for _, _, call in found), num_malformed=num_malformed
    )
