"""The forms of Mistral, both after the mark ``[TOOL_CALLS]``.

The older one is a JSON list of ``{"name": ..., "arguments": {...}, "id": ...}``, the newer one
``name[ARGS]{...}`` with the mark before each call, and perhaps ``[CALL_ID]...`` before the arguments. Sampled ids are
not used: a policy may repeat one, and what a tool does once per id would then be left undone.
"""

import re
from collections.abc import Sequence

import msgspec

from steelyard.gateway.tool_calls.base import (
    NewId,
    ParsedText,
    end_of_json,
    name_json,
    object_text,
    read_json,
    split_off,
)
from steelyard.types import ToolCall

_MARK = "[TOOL_CALLS]"
_NAMED = re.compile(r"\s*(?P<name>[\w.-]+)\s*(?:\[CALL_ID\]\s*\w*\s*)?\[ARGS\]\s*(?=\{)")
_LIST = re.compile(r"\s*(?=\[)")


class _Call(msgspec.Struct):
    name: str
    arguments: msgspec.Raw


class MistralParser:
    """See :class:`ToolParser`."""

    name = "mistral"
    openings: tuple[str, ...] = (_MARK,)
    head_openings: tuple[str, ...] = ()
    marks: tuple[str, ...] = (_MARK, "[ARGS]", "[CALL_ID]")
    closing: str | None = None

    def parse(self, text: str, new_id: NewId) -> ParsedText:
        found: list[tuple[int, int, ToolCall]] = []
        num_malformed = position = 0
        while (start := text.find(_MARK, position)) >= 0:
            position = start + len(_MARK)
            read = _read_named(text, position) or _read_list(text, position)
            if read is None:
                num_malformed += 1
                continue
            calls, position = read
            for name, arguments in calls:
                found.append((start, position, ToolCall(id=new_id(), name=name, arguments=arguments)))
                start = position  # the text of a list belongs to its first call
        return split_off(text, found, num_malformed)

    def write(self, calls: Sequence[ToolCall]) -> str:
        entries = [
            f'{{"name": {name_json(call.name)}, "arguments": {call.arguments}, "id": {name_json(call.id)}}}'
            for call in calls
        ]
        return f"{_MARK} [{', '.join(entries)}]"

    def forced_opening(self, tool: str | None) -> str:
        opening = f'{_MARK} [{{"name":'
        return opening if tool is None else f'{opening} {name_json(tool)}, "arguments":'


def _read_named(text: str, start: int) -> tuple[list[tuple[str, str]], int] | None:
    head = _NAMED.match(text, start)
    end = None if head is None else end_of_json(text, head.end())
    if head is None or end is None:
        return None
    arguments = object_text(text[head.end() : end])
    return None if arguments is None else ([(head["name"], arguments)], end)


def _read_list(text: str, start: int) -> tuple[list[tuple[str, str]], int] | None:
    head = _LIST.match(text, start)
    end = None if head is None else end_of_json(text, head.end())
    if head is None or end is None:
        return None
    calls = read_json(text[head.end() : end], list[_Call])
    if calls is None:
        return None
    read = [(call.name, object_text(bytes(call.arguments))) for call in calls]
    known = [(name, arguments) for name, arguments in read if arguments is not None]
    return (known, end) if known and len(known) == len(read) else None
