"""The forms of DeepSeek, each call between its own marks.

``NAME<sep>{...}`` (V3.1), or ``function<sep>NAME``, a line end and a fenced block of JSON (V3, R1).
"""

import re
from collections.abc import Sequence

from steelyard.gateway.tool_calls.base import NewId, ParsedText, end_of_json, object_text, split_off
from steelyard.types import ToolCall

_ALL_OPEN = "<｜tool▁calls▁begin｜>"
_ALL_CLOSE = "<｜tool▁calls▁end｜>"
_OPEN = "<｜tool▁call▁begin｜>"
_CLOSE = "<｜tool▁call▁end｜>"
_SEPARATOR = "<｜tool▁sep｜>"
_FENCED = re.compile(rf"\s*function\s*{re.escape(_SEPARATOR)}(?P<name>[^\n]+)\n```json\n(?=\s*\{{)")
_PLAIN = re.compile(rf"\s*(?P<name>[^\s<]+)\s*{re.escape(_SEPARATOR)}(?=\s*\{{)")
_FENCE_END = re.compile(r"\s*```")
_BLOCK_OPEN = re.compile(rf"\s*{re.escape(_ALL_OPEN)}\s*\Z")
_BLOCK_CLOSE = re.compile(rf"\s*{re.escape(_ALL_CLOSE)}")


class DeepSeekParser:
    """See :class:`ToolParser`."""

    name = "deepseek"
    openings: tuple[str, ...] = (_ALL_OPEN, _OPEN)
    head_openings: tuple[str, ...] = ()
    marks: tuple[str, ...] = (_ALL_OPEN, _ALL_CLOSE, _OPEN, _CLOSE, _SEPARATOR)
    closing: str | None = _CLOSE

    def parse(self, text: str, new_id: NewId) -> ParsedText:
        found: list[tuple[int, int, ToolCall]] = []
        num_malformed = position = 0
        while (start := text.find(_OPEN, position)) >= 0:
            block = _BLOCK_OPEN.search(text, position, start)
            position = start + len(_OPEN)
            read = _read_call(text, position)
            if read is None:
                num_malformed += 1
                continue
            name, arguments, position = read
            closing = _BLOCK_CLOSE.match(text, position)
            position = position if closing is None else closing.end()
            call = ToolCall(id=new_id(), name=name, arguments=arguments)
            found.append((start if block is None else block.start(), position, call))
        if _ALL_OPEN in text and not found and not num_malformed:
            num_malformed = 1
        return split_off(text, found, num_malformed)

    def write(self, calls: Sequence[ToolCall]) -> str:
        blocks = [f"{_OPEN}{call.name}{_SEPARATOR}{call.arguments}{_CLOSE}" for call in calls]
        return "".join([_ALL_OPEN, *blocks, _ALL_CLOSE])

    def forced_opening(self, tool: str | None) -> str:
        opening = _ALL_OPEN + _OPEN
        return opening if tool is None else f"{opening}{tool}{_SEPARATOR}"


def _read_call(text: str, start: int) -> tuple[str, str, int] | None:
    """Name, arguments and end of the call whose mark ends at ``start``."""
    fenced = _FENCED.match(text, start)
    head = fenced or _PLAIN.match(text, start)
    if head is None:
        return None
    begin = text.index("{", head.end())
    end = end_of_json(text, begin)
    arguments = None if end is None else object_text(text[begin:end])
    if end is None or arguments is None:
        return None
    if fenced is not None:
        fence = _FENCE_END.match(text, end)
        if fence is None:
            return None
        end = fence.end()
    rest = text[end:]
    if not rest.lstrip().startswith(_CLOSE):
        return None
    return head["name"].strip(), arguments, end + rest.index(_CLOSE) + len(_CLOSE)
