"""The OpenAI dialect: replies, streamed chunks and errors as JSON bytes."""

import functools
from collections.abc import Sequence
from typing import Any

import msgspec

from steelyard.gateway.dialects.base import Desk, Tokens, shown_ids
from steelyard.gateway.failures import Failure, FailureKind
from steelyard.gateway.service import Completion
from steelyard.types import FinishReason, Message, ToolCall, Turn

_ENCODE = msgspec.json.Encoder().encode
DONE = b"data: [DONE]\n\n"


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What every reply repeats, and whether log-probabilities are wanted. ``num_choices`` for each prompt."""

    model: str
    created_s: int
    num_choices: int = 1
    logprobs: bool = False
    usage: bool = True


class _Replies:
    """What chat and plain completions have in common."""

    prefix: str
    whole_object: str
    chunk_object: str

    def __init__(self, wanted: Wanted, desk: Desk) -> None:
        self._wanted = wanted
        self._tokens = desk.tokens
        self._ids = desk.ids
        self._ended: dict[int, Completion] = {}

    def whole(self, completions: Sequence[Completion]) -> bytes:
        """``steelyard`` is an addition of ours: what a harness must know and OpenAI has no field for."""
        request_id = completions[0].reply.request_id
        choices = [self._choice(index, completion) for index, completion in enumerate(completions)]
        extra = {"num_malformed_calls": sum(completion.reply.num_malformed_calls for completion in completions)}
        usage = _usage(completions, self._wanted.num_choices)
        return _ENCODE(
            {**self._head(request_id, self.whole_object), "choices": choices, "usage": usage, "steelyard": extra}
        )

    def close(self) -> bytes:
        """Token counts if wanted, and the end mark."""
        if not self._wanted.usage:
            return DONE
        completions = [self._ended[index] for index in sorted(self._ended)]
        usage = _usage(completions, self._wanted.num_choices)
        return event({**self._head(self._id, self.chunk_object), "choices": [], "usage": usage}) + DONE

    @functools.cached_property
    def _id(self) -> str:
        """The id of a stream, whose chunks come before there is an id of a turn."""
        return self._ids.new("req")

    def _choice(self, index: int, completion: Completion) -> dict[str, Any]:
        raise NotImplementedError

    def _event(self, choice: dict[str, Any]) -> bytes:
        return event({**self._head(self._id, self.chunk_object), "choices": [choice]})

    def _head(self, request_id: str, kind: str) -> dict[str, Any]:
        return {
            "id": f"{self.prefix}-{request_id}",
            "object": kind,
            "created": self._wanted.created_s,
            "model": self._wanted.model,
        }


class ChatReplies(_Replies):
    """Replies to a chat request."""

    prefix, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def start(self, index: int, num_prompt_tokens: int) -> bytes:
        """The first chunk: the role."""
        return self._delta(index, {"role": "assistant", "content": ""})

    def text(self, index: int, delta: str) -> bytes:
        """A piece of content."""
        return self._delta(index, {"content": delta})

    def reasoning(self, index: int, delta: str) -> bytes:
        """A piece of reasoning, in the field that servers of such models have added."""
        return self._delta(index, {"reasoning_content": delta})

    def end(self, index: int, completion: Completion) -> bytes:
        """Tool calls, if any, log-probabilities and finish reason."""
        self._ended[index] = completion
        reply = completion.reply
        deltas = [
            self._delta(index, {"tool_calls": [{"index": place, **_call(call)}]})
            for place, call in enumerate(reply.message.tool_calls)
        ]
        last = self._delta(index, {}, _finish(reply.finish_reason, reply.message), self._logprobs(completion))
        return b"".join(deltas) + last

    def _choice(self, index: int, completion: Completion) -> dict[str, Any]:
        reply = completion.reply
        return {
            "index": index,
            "message": _message(reply.message),
            "logprobs": self._logprobs(completion),
            "finish_reason": _finish(reply.finish_reason, reply.message),
        }

    def _delta(self, index: int, delta: dict[str, Any], finish: str | None = None, logprobs: Any = None) -> bytes:
        return self._event({"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish})

    def _logprobs(self, completion: Completion) -> dict[str, Any] | None:
        return _chat_logprobs(completion.turn, self._tokens) if self._wanted.logprobs else None


class TextReplies(_Replies):
    """Replies to a plain completion request."""

    prefix, whole_object, chunk_object = "cmpl", "text_completion", "text_completion"

    def start(self, index: int, num_prompt_tokens: int) -> bytes:
        """Plain completions have no opening chunk."""
        return b""

    def text(self, index: int, delta: str) -> bytes:
        """A piece of text."""
        return self._event({"index": index, "text": delta, "logprobs": None, "finish_reason": None})

    def reasoning(self, index: int, delta: str) -> bytes:
        """Plain completions tell nothing apart."""
        return b""

    def end(self, index: int, completion: Completion) -> bytes:
        """Finish reason and log-probabilities."""
        self._ended[index] = completion
        return self._event({**self._choice(index, completion), "text": ""})

    def _choice(self, index: int, completion: Completion) -> dict[str, Any]:
        return {
            "index": index,
            "text": completion.reply.message.content or "",
            "logprobs": _text_logprobs(completion.turn, self._tokens) if self._wanted.logprobs else None,
            "finish_reason": str(completion.reply.finish_reason),
        }


class Models:
    """The policy as a model."""

    @staticmethod
    def model(name: str) -> dict[str, Any]:
        """One model."""
        return {"id": name, "object": "model", "created": 0, "owned_by": "steelyard"}

    @staticmethod
    def model_list(names: Sequence[str]) -> dict[str, Any]:
        """All models."""
        return {"object": "list", "data": [Models.model(name) for name in names]}


_STATUS = {
    FailureKind.BAD_REQUEST: 400,
    FailureKind.BAD_KEY: 401,
    FailureKind.FORBIDDEN: 403,
    FailureKind.NOT_FOUND: 404,
    FailureKind.SLOW_BODY: 408,
    FailureKind.TOO_LARGE: 413,
    FailureKind.RATE_LIMITED: 429,
    FailureKind.BUG: 500,
    FailureKind.ENGINE_FAILED: 502,
    FailureKind.OVERLOADED: 503,
    FailureKind.UNAVAILABLE: 503,
    FailureKind.TIMED_OUT: 503,
}
_CODE = {
    FailureKind.BAD_KEY: "invalid_api_key",
    FailureKind.TOO_LARGE: "request_too_large",
    FailureKind.RATE_LIMITED: "rate_limit_exceeded",
    FailureKind.OVERLOADED: "overloaded",
    FailureKind.UNAVAILABLE: "unavailable",
    FailureKind.TIMED_OUT: "deadline_exceeded",
    FailureKind.ENGINE_FAILED: "engine_error",
}


class OpenAIErrors:
    """Failures in the form of OpenAI."""

    def status(self, failure: Failure) -> int:
        """The HTTP status."""
        return _STATUS[failure.kind]

    def body(self, failure: Failure) -> dict[str, Any]:
        """The error object."""
        status = self.status(failure)
        kind = "server_error" if status >= 500 else "invalid_request_error"
        if failure.kind is FailureKind.RATE_LIMITED:
            kind = "rate_limit_error"
        code = failure.code or _CODE.get(failure.kind)
        return {"error": {"message": failure.message, "type": kind, "param": failure.param, "code": code}}

    def event(self, failure: Failure) -> bytes:
        """A chunk that is an error object."""
        return event(self.body(failure))


ERRORS = OpenAIErrors()


def event(body: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + _ENCODE(body) + b"\n\n"


def _message(message: Message) -> dict[str, Any]:
    shown: dict[str, Any] = {"role": "assistant", "content": message.content, "refusal": None}
    if message.reasoning is not None:
        shown["reasoning_content"] = message.reasoning
    if message.tool_calls:
        shown["tool_calls"] = [_call(call) for call in message.tool_calls]
    return shown


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _finish(reason: FinishReason, message: Message) -> str:
    return "tool_calls" if reason is FinishReason.STOP and message.tool_calls else str(reason)


def _usage(completions: Sequence[Completion], num_choices: int) -> dict[str, Any]:
    """Counts of all choices; the prompt of those that share one counts once."""
    firsts = completions[::num_choices]
    num_prompt = sum(completion.reply.num_prompt_tokens for completion in firsts)
    num_sampled = sum(completion.reply.num_completion_tokens for completion in completions)
    cached = sum(0 if completion.turn is None else completion.turn.num_cached_tokens for completion in firsts)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_sampled,
        "total_tokens": num_prompt + num_sampled,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def _chat_logprobs(turn: Turn | None, tokens: Tokens) -> dict[str, Any]:
    logprobs = () if turn is None else turn.logprobs
    content = []
    for token, logprob in zip(shown_ids(turn, tokens), logprobs, strict=False):
        text = tokens.text_of((token,))
        data = None if "\ufffd" in text else list(text.encode("utf-8"))  # a part of a character has no text
        content.append({"token": text, "logprob": logprob, "bytes": data, "top_logprobs": []})
    return {"content": content, "refusal": None}


def _text_logprobs(turn: Turn | None, tokens: Tokens) -> dict[str, Any]:
    shown = shown_ids(turn, tokens)
    texts = [tokens.text_of((token,)) for token in shown]
    offsets = [0]
    for text in texts:
        offsets.append(offsets[-1] + len(text))
    return {
        "tokens": texts,
        "token_logprobs": list(() if turn is None else turn.logprobs[: len(shown)]),
        "top_logprobs": None,
        "text_offset": offsets[:-1],
    }
