"""The Anthropic dialect: replies, streamed events and errors as JSON bytes."""

from collections.abc import Sequence
from typing import Any

import msgspec

from steelyard.gateway.dialects.base import Desk
from steelyard.gateway.failures import Failure, FailureKind
from steelyard.gateway.service import Completion
from steelyard.types import FinishReason, Message, ToolCall

_ENCODE = msgspec.json.Encoder().encode
_SIGNATURE = "steelyard"  # clients send it back with the thinking, and a reply is known by what it says
_DELTA = {"text": ("text_delta", "text"), "thinking": ("thinking_delta", "thinking")}


class MessageReplies:
    """Replies to a request for a message: one choice.

    Args:
        shows_thinking: whether reasoning is shown, in blocks of its own.
    """

    def __init__(self, model: str, desk: Desk, *, shows_thinking: bool) -> None:
        self._model = model
        self._ids = desk.ids
        self._shows_thinking = shows_thinking
        self._num_blocks = 0
        self._open_block: str | None = None

    def whole(self, completions: Sequence[Completion]) -> bytes:
        """A message."""
        completion = completions[0]
        reply = completion.reply
        head = self._head(f"msg_{reply.request_id}", _blocks(reply.message, shows_thinking=self._shows_thinking))
        return _ENCODE({**head, **_ending(completion), "usage": _usage(completion)})

    def start(self, index: int, num_prompt_tokens: int) -> bytes:
        """``message_start``; the tokens of the prompt are counted, those that were cached are known at the end."""
        head = {**self._head(f"msg_{self._ids.new('req')}", []), "stop_reason": None, "stop_sequence": None}
        usage = {"input_tokens": num_prompt_tokens, "output_tokens": 0}
        return _event("message_start", {"message": {**head, "usage": usage}})

    def text(self, index: int, delta: str) -> bytes:
        """A delta within the block of text."""
        return self._part("text", delta) if delta else b""

    def reasoning(self, index: int, delta: str) -> bytes:
        """A delta within the block of thinking."""
        return self._part("thinking", delta) if delta and self._shows_thinking else b""

    def end(self, index: int, completion: Completion) -> bytes:
        """The end of the last block, the tools that are called, and ``message_delta``."""
        events = [self._close_block()]
        events += [self._call(call) for call in completion.reply.message.tool_calls]
        events.append(_event("message_delta", {"delta": _ending(completion), "usage": _usage(completion)}))
        return b"".join(events)

    def close(self) -> bytes:
        """``message_stop``."""
        return _event("message_stop", {})

    def _head(self, message_id: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": message_id, "type": "message", "role": "assistant", "model": self._model, "content": content}

    def _part(self, kind: str, text: str) -> bytes:
        before = b"" if self._open_block == kind else self._close_block() + self._open(kind)
        name, field = _DELTA[kind]
        return before + self._delta({"type": name, field: text})

    def _open(self, kind: str) -> bytes:
        block = {"type": "text", "text": ""} if kind == "text" else {"type": kind, "thinking": "", "signature": ""}
        self._open_block = kind
        return _event("content_block_start", {"index": self._num_blocks, "content_block": block})

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", {"index": self._num_blocks, "delta": delta})

    def _close_block(self) -> bytes:
        if self._open_block is None:
            return b""
        signed = self._delta({"type": "signature_delta", "signature": _SIGNATURE})
        before = signed if self._open_block == "thinking" else b""
        self._open_block = None
        self._num_blocks += 1
        return before + _event("content_block_stop", {"index": self._num_blocks - 1})

    def _call(self, call: ToolCall) -> bytes:
        block = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
        start = _event("content_block_start", {"index": self._num_blocks, "content_block": block})
        self._open_block = "tool_use"
        return start + self._delta({"type": "input_json_delta", "partial_json": call.arguments}) + self._close_block()


class Models:
    """The policy as a model."""

    @staticmethod
    def model(name: str) -> dict[str, Any]:
        """One model."""
        return {"type": "model", "id": name, "display_name": name, "created_at": "1970-01-01T00:00:00Z"}

    @staticmethod
    def model_list(names: Sequence[str]) -> dict[str, Any]:
        """All models, on one page."""
        data = [Models.model(name) for name in names]
        return {"data": data, "has_more": False, "first_id": names[0], "last_id": names[-1]}


_FORMS = {
    FailureKind.BAD_REQUEST: (400, "invalid_request_error"),
    FailureKind.BAD_KEY: (401, "authentication_error"),
    FailureKind.FORBIDDEN: (403, "permission_error"),
    FailureKind.NOT_FOUND: (404, "not_found_error"),
    FailureKind.SLOW_BODY: (408, "invalid_request_error"),
    FailureKind.TOO_LARGE: (413, "request_too_large"),
    FailureKind.RATE_LIMITED: (429, "rate_limit_error"),
    FailureKind.BUG: (500, "api_error"),
    FailureKind.ENGINE_FAILED: (500, "api_error"),
    FailureKind.UNAVAILABLE: (503, "api_error"),
    FailureKind.TIMED_OUT: (504, "timeout_error"),
    FailureKind.OVERLOADED: (529, "overloaded_error"),
}


class AnthropicErrors:
    """Failures in the form of Anthropic."""

    def status(self, failure: Failure) -> int:
        """The HTTP status."""
        return _FORMS[failure.kind][0]

    def body(self, failure: Failure) -> dict[str, Any]:
        """The error object."""
        return {"type": "error", "error": {"type": _FORMS[failure.kind][1], "message": failure.message}}

    def event(self, failure: Failure) -> bytes:
        """The event ``error``."""
        return _event("error", self.body(failure))


ERRORS = AnthropicErrors()


def _event(name: str, body: dict[str, Any]) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + _ENCODE({"type": name, **body}) + b"\n\n"


def _blocks(message: Message, *, shows_thinking: bool) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if message.reasoning and shows_thinking:
        blocks.append({"type": "thinking", "thinking": message.reasoning, "signature": _SIGNATURE})
    if message.content:
        blocks.append({"type": "text", "text": message.content})
    for call in message.tool_calls:
        arguments = msgspec.Raw(call.arguments.encode("utf-8"))
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": arguments})
    return blocks


def _ending(completion: Completion) -> dict[str, Any]:
    reply = completion.reply
    if reply.finish_reason is FinishReason.LENGTH:
        reason = "max_tokens"
    elif reply.message.tool_calls:
        reason = "tool_use"
    else:
        reason = "end_turn" if completion.stop is None else "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": completion.stop if reason == "stop_sequence" else None}


def _usage(completion: Completion) -> dict[str, int]:
    reply = completion.reply
    cached = 0 if completion.turn is None else completion.turn.num_cached_tokens
    return {
        "input_tokens": reply.num_prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": reply.num_completion_tokens,
    }
