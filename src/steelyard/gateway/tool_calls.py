"""Tool calls in sampled text, in the Hermes form ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``."""

from collections.abc import Callable

import msgspec

from steelyard.types import Record, ToolCall

_OPEN = "<tool_call>"
_CLOSE = "</tool_call>"
_MAX_CLOSINGS = 8


class ParsedText(Record, frozen=True, kw_only=True):
    """What a sampled text says. ``content`` is None where it is nothing but tool calls.

    ``num_malformed``: blocks that open a call and cannot be read; they stay in ``content`` as sampled.
    """

    content: str | None
    tool_calls: tuple[ToolCall, ...] = ()
    num_malformed: int = 0


class _Call(msgspec.Struct):
    name: str
    arguments: msgspec.Raw


class HermesParser:
    """Reads Hermes tool calls.

    ``opening`` is the string from which on a streamed text is held back, ``closing`` the one that ends a call.
    """

    opening = _OPEN
    closing = _CLOSE

    def forced_opening(self, tool: str | None) -> str:
        """How a reply begins that calls ``tool``, or any tool where it is None."""
        if tool is None:
            return f"{_OPEN}\n"
        name = msgspec.json.encode(tool).decode("utf-8")
        return f'{_OPEN}\n{{"name": {name}, "arguments":'

    def parse(self, text: str, new_id: Callable[[], str]) -> ParsedText:
        """Split ``text`` into content and calls; a call's arguments are its JSON text exactly as sampled.

        Without a readable call the content is ``text`` unchanged; else the pieces around the calls, without
        white space beside the calls, joined by newlines.
        """
        pieces: list[str] = []
        calls: list[ToolCall] = []
        num_malformed = 0
        kept_from = position = 0
        while (start := text.find(_OPEN, position)) >= 0:
            found = _read_call(text, start + len(_OPEN))
            if found is None:
                num_malformed += 1
                position = start + len(_OPEN)
                continue
            call, end = found
            calls.append(ToolCall(id=new_id(), name=call.name, arguments=bytes(call.arguments).decode("utf-8")))
            pieces.append(text[kept_from:start])
            kept_from = position = end
        if not calls:
            return ParsedText(content=text, num_malformed=num_malformed)
        pieces.append(text[kept_from:])
        shown = [pieces[0].rstrip(), *(piece.strip() for piece in pieces[1:])]
        content = "\n".join(piece for piece in shown if piece)
        return ParsedText(content=content or None, tool_calls=tuple(calls), num_malformed=num_malformed)


def _read_call(text: str, start: int) -> tuple[_Call, int] | None:
    """The call at ``start`` and where it ends. A closing mark may also stand inside a JSON string, so try a few."""
    end = start - 1
    for _ in range(_MAX_CLOSINGS):
        end = text.find(_CLOSE, end + 1)
        if end < 0:
            return None
        try:
            call = msgspec.json.decode(text[start:end], type=_Call)
            msgspec.json.decode(call.arguments, type=dict[str, object])
        except msgspec.DecodeError:
            continue
        return call, end + len(_CLOSE)
    return None
