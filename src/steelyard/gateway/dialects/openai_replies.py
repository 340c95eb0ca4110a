"""The OpenAI dialect: replies, streamed chunks and errors as JSON bytes."""

from collections.abc import Callable
from typing import Any

import msgspec

from steelyard.gateway.service import Completion
from steelyard.types import FinishReason, Message, Turn

_ENCODE = msgspec.json.Encoder().encode
DONE = b"data: [DONE]\n\n"

TextOf = Callable[[tuple[int, ...]], str]


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What every reply repeats, and whether log-probabilities are wanted."""

    model: str
    created_s: int
    logprobs: bool = False
    usage: bool = True


def chat_reply(completion: Completion, wanted: Wanted, shown: tuple[int, ...], text_of: TextOf) -> bytes:
    """A whole chat reply. ``shown``: the sampled tokens without the stop token.

    ``steelyard`` is an addition of ours: what a harness must know and OpenAI has no field for.
    """
    reply = completion.reply
    choice = {
        "index": 0,
        "message": _message(reply.message),
        "logprobs": _chat_logprobs(completion.turn, shown, text_of) if wanted.logprobs else None,
        "finish_reason": _finish(reply.finish_reason, reply.message),
    }
    head = _head(completion, wanted, "chatcmpl", "chat.completion")
    extra = {"num_malformed_calls": reply.num_malformed_calls}
    return _ENCODE({**head, "choices": [choice], "usage": _usage(completion), "steelyard": extra})


def text_reply(completion: Completion, wanted: Wanted, shown: tuple[int, ...], text_of: TextOf) -> bytes:
    """A whole reply to a plain completion request."""
    reply = completion.reply
    choice = {
        "index": 0,
        "text": reply.message.content or "",
        "logprobs": _text_logprobs(completion.turn, shown, text_of) if wanted.logprobs else None,
        "finish_reason": str(reply.finish_reason),
    }
    head = _head(completion, wanted, "cmpl", "text_completion")
    return _ENCODE({**head, "choices": [choice], "usage": _usage(completion)})


class ChatChunks:
    """Server-sent events of one streamed chat reply. ``stream_id`` is known before the request's id is."""

    def __init__(self, stream_id: str, wanted: Wanted) -> None:
        self._wanted = wanted
        self._head = {
            "id": f"chatcmpl-{stream_id}",
            "object": "chat.completion.chunk",
            "created": wanted.created_s,
            "model": wanted.model,
        }

    def start(self) -> bytes:
        """The first chunk: the role."""
        return self._event({"role": "assistant", "content": ""})

    def text(self, delta: str) -> bytes:
        """A piece of content."""
        return self._event({"content": delta})

    def end(self, completion: Completion, shown: tuple[int, ...], text_of: TextOf) -> bytes:
        """Tool calls, if any, log-probabilities, finish reason, token counts if wanted, and the end mark."""
        reply = completion.reply
        events = []
        for index, call in enumerate(reply.message.tool_calls):
            function = {"name": call.name, "arguments": call.arguments}
            events.append(
                self._event({"tool_calls": [{"index": index, "id": call.id, "type": "function", "function": function}]})
            )
        logprobs = _chat_logprobs(completion.turn, shown, text_of) if self._wanted.logprobs else None
        events.append(self._event({}, _finish(reply.finish_reason, reply.message), logprobs))
        if self._wanted.usage:
            events.append(event({**self._head, "choices": [], "usage": _usage(completion)}))
        return b"".join(events) + DONE

    def _event(self, delta: dict[str, Any], finish: str | None = None, logprobs: Any = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        return event({**self._head, "choices": [choice]})


class TextChunks:
    """Server-sent events of one streamed plain completion."""

    def __init__(self, stream_id: str, wanted: Wanted) -> None:
        self._wanted = wanted
        self._head = {
            "id": f"cmpl-{stream_id}",
            "object": "text_completion",
            "created": wanted.created_s,
            "model": wanted.model,
        }

    def start(self) -> bytes:
        """Plain completions have no opening chunk."""
        return b""

    def text(self, delta: str) -> bytes:
        """A piece of text."""
        return self._event(delta, None, None)

    def end(self, completion: Completion, shown: tuple[int, ...], text_of: TextOf) -> bytes:
        """Finish reason, log-probabilities and token counts if wanted, and the end mark."""
        logprobs = _text_logprobs(completion.turn, shown, text_of) if self._wanted.logprobs else None
        events = self._event("", str(completion.reply.finish_reason), logprobs)
        if self._wanted.usage:
            events += event({**self._head, "choices": [], "usage": _usage(completion)})
        return events + DONE

    def _event(self, text: str, finish: str | None, logprobs: Any) -> bytes:
        choice = {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": finish}
        return event({**self._head, "choices": [choice]})


def event(body: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + _ENCODE(body) + b"\n\n"


def error_body(message: str, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """The error object of OpenAI."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _head(completion: Completion, wanted: Wanted, prefix: str, kind: str) -> dict[str, Any]:
    return {
        "id": f"{prefix}-{completion.reply.request_id}",
        "object": kind,
        "created": wanted.created_s,
        "model": wanted.model,
    }


def _message(message: Message) -> dict[str, Any]:
    shown: dict[str, Any] = {"role": "assistant", "content": message.content, "refusal": None}
    if message.tool_calls:
        shown["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    return shown


def _finish(reason: FinishReason, message: Message) -> str:
    return "tool_calls" if reason is FinishReason.STOP and message.tool_calls else str(reason)


def _usage(completion: Completion) -> dict[str, Any]:
    reply = completion.reply
    cached = 0 if completion.turn is None else completion.turn.num_cached_tokens
    return {
        "prompt_tokens": reply.num_prompt_tokens,
        "completion_tokens": reply.num_completion_tokens,
        "total_tokens": reply.num_prompt_tokens + reply.num_completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def _chat_logprobs(turn: Turn | None, shown: tuple[int, ...], text_of: TextOf) -> dict[str, Any]:
    logprobs = () if turn is None else turn.logprobs
    content = []
    for token, logprob in zip(shown, logprobs, strict=False):
        text = text_of((token,))
        data = None if "\ufffd" in text else list(text.encode("utf-8"))  # a part of a character has no text
        content.append({"token": text, "logprob": logprob, "bytes": data, "top_logprobs": []})
    return {"content": content, "refusal": None}


def _text_logprobs(turn: Turn | None, shown: tuple[int, ...], text_of: TextOf) -> dict[str, Any]:
    tokens = [text_of((token,)) for token in shown]
    offsets = [0]
    for text in tokens:
        offsets.append(offsets[-1] + len(text))
    return {
        "tokens": tokens,
        "token_logprobs": list(() if turn is None else turn.logprobs[: len(shown)]),
        "top_logprobs": None,
        "text_offset": offsets[:-1],
    }
