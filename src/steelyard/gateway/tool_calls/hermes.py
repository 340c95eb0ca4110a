"""The form of Hermes and Qwen: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``."""

from collections.abc import Sequence

import msgspec

from steelyard.gateway.tool_calls.base import NewId, ParsedText, name_json, object_text, read_json, split_off
from steelyard.types import ToolCall

_OPEN = "<tool_call>"
_CLOSE = "</tool_call>"
_MAX_CLOSINGS = 8


class _Call(msgspec.Struct):
    name: str
    arguments: msgspec.Raw


class HermesParser:
    """See :class:`ToolParser`."""

    name = "hermes"
    openings: tuple[str, ...] = (_OPEN,)
    head_openings: tuple[str, ...] = ()
    marks: tuple[str, ...] = (_OPEN, _CLOSE)
    closing: str | None = _CLOSE

    def parse(self, text: str, new_id: NewId) -> ParsedText:
        found: list[tuple[int, int, ToolCall]] = []
        num_malformed = position = 0
        while (start := text.find(_OPEN, position)) >= 0:
            position = start + len(_OPEN)
            read = _read_call(text, position)
            if read is None:
                num_malformed += 1
                continue
            call, position = read
            arguments = bytes(call.arguments).decode("utf-8")
            found.append((start, position, ToolCall(id=new_id(), name=call.name, arguments=arguments)))
        return split_off(text, found, num_malformed)

    def write(self, calls: Sequence[ToolCall]) -> str:
        return "\n".join(f"{_OPEN}\n{_json(call)}\n{_CLOSE}" for call in calls)

    def forced_opening(self, tool: str | None) -> str:
        return f"{_OPEN}\n" if tool is None else f'{_OPEN}\n{{"name": {name_json(tool)}, "arguments":'


def _json(call: ToolCall) -> str:
    return f'{{"name": {name_json(call.name)}, "arguments": {call.arguments}}}'


def _read_call(text: str, start: int) -> tuple[_Call, int] | None:
    """The call at ``start`` and where it ends. A closing mark may also stand inside a JSON string, so try a few."""
    end = start - 1
    for _ in range(_MAX_CLOSINGS):
        end = text.find(_CLOSE, end + 1)
        if end < 0:
            return None
        call = read_json(text[start:end], _Call)
        if call is not None and object_text(bytes(call.arguments)) is not None:
            return call, end + len(_CLOSE)
    return None
