"""The forms of Llama 3, in which a call is the whole message, perhaps after ``<|python_tag|>``.

``{"name": ..., "parameters": {...}}``, several of them with ``;`` between; or Python calls with literal arguments,
``name.call(key="value")`` after the tag and ``[name(key="value"), ...]`` without it. Arguments of a Python call are
written as JSON, since they were not.
"""

import ast
import json
import re
import warnings
from collections.abc import Sequence
from typing import Any

import msgspec

from steelyard.gateway.tool_calls.base import NewId, ParsedText, end_of_json, name_json, object_text, read_json
from steelyard.types import ToolCall

_TAG = "<|python_tag|>"
_BETWEEN = re.compile(r"\s*;\s*")
_LOOKS_LIKE_CALL = re.compile(r"\s*\{\s*\"(?:name|type|function|parameters)\"|\s*\[\s*\w[\w.]*\(")
_MAX_PYTHON_CHARS = 1 << 16

_Pairs = list[tuple[str, str]]


class _Call(msgspec.Struct):
    name: str
    parameters: msgspec.Raw = msgspec.Raw()
    arguments: msgspec.Raw = msgspec.Raw()


class Llama3Parser:
    """See :class:`ToolParser`."""

    name = "llama3"
    openings: tuple[str, ...] = (_TAG,)
    head_openings: tuple[str, ...] = ("{", "[")
    marks: tuple[str, ...] = (_TAG,)
    closing: str | None = None

    def parse(self, text: str, new_id: NewId) -> ParsedText:
        before, tag, body = text.partition(_TAG)
        if not tag:
            before, body = "", text
        pairs = _read_json(body) or _read_python(body.strip(), is_tagged=bool(tag))
        if pairs is None:
            return ParsedText(content=text, num_malformed=int(bool(tag) or _LOOKS_LIKE_CALL.match(text) is not None))
        calls = tuple(ToolCall(id=new_id(), name=name, arguments=arguments) for name, arguments in pairs)
        return ParsedText(content=before.rstrip() or None, tool_calls=calls)

    def write(self, calls: Sequence[ToolCall]) -> str:
        return "; ".join(f'{{"name": {name_json(call.name)}, "parameters": {call.arguments}}}' for call in calls)

    def forced_opening(self, tool: str | None) -> str:
        return '{"name":' if tool is None else f'{{"name": {name_json(tool)}, "parameters":'


def _read_json(text: str) -> _Pairs | None:
    """Calls as objects one after the other; None where the text is anything else."""
    pairs: _Pairs = []
    text = text.strip()
    position = 0
    while True:
        end = end_of_json(text, position) if text.startswith("{", position) else None
        pair = None if end is None else _json_call(text[position:end])
        if end is None or pair is None:
            return None
        pairs.append(pair)
        if end == len(text):
            return pairs
        between = _BETWEEN.match(text, end)
        if between is None:
            return None
        position = between.end()


def _json_call(text: str) -> tuple[str, str] | None:
    call = read_json(text, _Call)
    if call is None:
        return None
    arguments = object_text(bytes(call.parameters) or bytes(call.arguments))
    return None if arguments is None else (call.name, arguments)


def _read_python(text: str, *, is_tagged: bool) -> _Pairs | None:
    if len(text) > _MAX_PYTHON_CHARS or not (is_tagged or text.startswith("[")):
        return None
    try:
        with warnings.catch_warnings(action="ignore"):  # of a policy's odd escapes
            tree = ast.parse(text, mode="eval").body
        calls = tree.elts if isinstance(tree, ast.List) else [tree]
        pairs = [_python_call(call) for call in calls]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None
    return pairs or None


def _python_call(call: ast.expr) -> tuple[str, str]:
    """Name and arguments of a call whose arguments are literals with names.

    Raises:
        ValueError, TypeError: it is anything else.
    """
    if not isinstance(call, ast.Call) or call.args or any(word.arg is None for word in call.keywords):
        raise ValueError("not a call with named arguments")
    name = ast.unparse(call.func)
    if re.fullmatch(r"\w+(\.\w+)*", name) is None:
        raise ValueError("not a name")
    arguments: dict[str, Any] = {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    text.encode("utf-8")  # half of a surrogate pair is no text
    return name.removesuffix(".call"), text
