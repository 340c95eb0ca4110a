"""Multi-turn prompts, token in and token out: what was sampled is what the next prompt holds.

::

    prompt of turn n+1 = prompt of turn n + sampled tokens + end-of-turn token, if it was not sampled
                         + encoding of what the template writes after the end of our message

The last part is cut from the template's own text, so it holds the newline after the end-of-turn token and
whatever else the template puts there. The sampled part is never rendered again. That this is allowed is
checked each turn on texts: with B the text of the previous prompt without its generation prompt, P the
template's text up to and including our message, F its text of all messages, P must start with B and F with
P. Where a template rewrites history (drops old reasoning, moves the tools), it does not, and a new segment
starts from F encoded afresh.
"""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from steelyard.errors import InputError
from steelyard.gateway.codec import TokenCodec
from steelyard.gateway.template import ChatTemplate
from steelyard.types import Message, Record, ToolSpec

_PROBE = "PROBE"
_CACHED_MESSAGES = 4096
_CACHED_CHARS = 2048
_MAX_KNOWN_TOOLS = 16


class Prompt(Record, frozen=True, kw_only=True):
    """A prompt as tokens, and what it was made from.

    ``text``: what the template says for ``messages``, without the generation prompt and with guarded content;
    for a prompt that the caller rendered, that text itself.
    """

    token_ids: tuple[int, ...]
    text: str
    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] = ()


class PreviousTurn(Record, frozen=True, kw_only=True):
    """A recorded turn to go on from: its prompt, what was sampled, and the message that we returned for it."""

    prompt: Prompt
    token_ids: tuple[int, ...]
    reply: Message


class Extension(Record, frozen=True, kw_only=True):
    """The next prompt. ``break_reason`` is None where it extends the previous turn's tokens.

    Otherwise it says why a new segment starts: ``history_changed`` (the template wrote earlier messages
    another way), ``reply_changed`` (it wrote our message another way once others followed),
    ``no_end_of_turn`` (it did not end our message with a control token that ends generation).
    """

    prompt: Prompt
    break_reason: str | None = None


class Renderer:
    """Turns messages into prompts for one tokenizer and template. Holds no conversation.

    Args:
        stop_token_ids: more tokens that end generation, beside the end-of-turn token and ``eos_token``.

    Raises:
        InputError: the template does not end an assistant message with a control token.
    """

    def __init__(self, codec: TokenCodec, template: ChatTemplate, stop_token_ids: Sequence[int] = ()) -> None:
        self.codec = codec
        self._short_message = functools.lru_cache(_CACHED_MESSAGES)(self._message)
        self._known_tools: list[tuple[tuple[ToolSpec, ...], list[dict[str, Any]]]] = []
        self._template = template
        self.end_of_turn_id = self._find_end_of_turn()
        eos_id = codec.token_id(template.special_tokens.get("eos_token", ""))
        found = {self.end_of_turn_id, *stop_token_ids, *([] if eos_id is None else [eos_id])}
        self.stop_token_ids = tuple(sorted(found))
        self._stop_set = frozenset(found)
        self.generation_prompt = self._find_generation_prompt()

    @classmethod
    def load(cls, directory: Path) -> "Renderer":
        """Read tokenizer, template and ``generation_config.json`` (its ``eos_token_id``) of a model directory.

        Raises:
            InputError: a file is missing or does not fit.
        """
        path = directory / "generation_config.json"
        settings = msgspec.json.decode(path.read_bytes(), type=dict[str, Any]) if path.exists() else {}
        eos = settings.get("eos_token_id")
        stop_token_ids = [eos] if isinstance(eos, int) else list(eos or ())
        return cls(TokenCodec.load(directory), ChatTemplate.load(directory), stop_token_ids)

    def first_prompt(self, messages: tuple[Message, ...], tools: tuple[ToolSpec, ...]) -> Prompt:
        """The prompt of a conversation of which nothing was recorded.

        Raises:
            InputError: the template refuses the messages.
        """
        return self._encoded(self._render(messages, tools, add_generation_prompt=True), messages, tools)

    def closed_text(self, previous: PreviousTurn) -> str:
        """What the template says up to and including our reply: text P above, made ahead of the next request.

        Raises:
            InputError: the template refuses the messages.
        """
        prompt = previous.prompt
        return self._render((*prompt.messages, previous.reply), prompt.tools, add_generation_prompt=False)

    def extend(
        self,
        previous: PreviousTurn,
        messages: tuple[Message, ...],
        tools: tuple[ToolSpec, ...],
        closed_text: str | None = None,
    ) -> Extension:
        """The prompt for ``messages``, which begin with those of ``previous`` and its reply.

        The returned prompt shares the message records of ``previous``.

        Args:
            closed_text: that of ``previous``, where it was made ahead.

        Raises:
            InputError: the template refuses the messages, or they do not begin so.
        """
        num_known = len(previous.prompt.messages) + 1
        if messages[:num_known] != (*previous.prompt.messages, previous.reply):
            raise InputError("messages must begin with those of the previous turn and its reply")
        messages = (*previous.prompt.messages, previous.reply, *messages[num_known:])
        prefix = closed_text
        if prefix is None or tools != previous.prompt.tools:
            prefix = self._render(messages[:num_known], tools, add_generation_prompt=False)
        full = self._render(messages, tools, add_generation_prompt=True)
        before = previous.prompt.text
        end = None
        if not prefix.startswith(before):
            reason = "history_changed"
        elif not full.startswith(prefix):
            reason = "reply_changed"
        else:
            end = self.codec.last_control(prefix, len(before), self._stop_set)
            reason = "no_end_of_turn"
        if end is None:
            return Extension(prompt=self._encoded(full, messages, tools), break_reason=reason)
        end_token_id, end_position = end
        sampled = previous.token_ids
        closing = () if sampled and sampled[-1] in self._stop_set else (end_token_id,)
        rest = self.codec.encode(full[end_position:], is_start=False)
        token_ids = (*previous.prompt.token_ids, *sampled, *closing, *rest)
        text = full.removesuffix(self.generation_prompt)
        return Extension(prompt=Prompt(token_ids=token_ids, text=text, messages=messages, tools=tools))

    def opened(self, prompt: Prompt, opening: str) -> Prompt:
        """The prompt with the beginning of the reply, ``opening``, which is ours and not sampled."""
        token_ids = (*prompt.token_ids, *self.codec.encode(opening, is_start=False))
        return msgspec.structs.replace(prompt, token_ids=token_ids)

    def text_prompt(self, text: str) -> Prompt:
        """A prompt that the caller rendered; control strings in it are control tokens."""
        return Prompt(token_ids=tuple(self.codec.encode(text)), text=text, messages=())

    def text_extension(self, previous: PreviousTurn, reply_text: str, text: str) -> Extension:
        """The prompt for ``text``, which begins with that of ``previous`` and ``reply_text``, kept as sampled.

        What was sampled after ``reply_text`` (a stop token, a stop string) is kept where the caller's text
        goes on with the same; else ``break_reason`` is ``reply_changed``.
        """
        rest = text[len(previous.prompt.text) + len(reply_text) :]
        hidden = self.codec.decode(previous.token_ids)[len(reply_text) :]
        if not rest.startswith(hidden):
            return Extension(prompt=self.text_prompt(text), break_reason="reply_changed")
        added = self.codec.encode(rest[len(hidden) :], is_start=False)
        token_ids = (*previous.prompt.token_ids, *previous.token_ids, *added)
        return Extension(prompt=Prompt(token_ids=token_ids, text=text, messages=()))

    def _encoded(self, full: str, messages: tuple[Message, ...], tools: tuple[ToolSpec, ...]) -> Prompt:
        text = full.removesuffix(self.generation_prompt)
        return Prompt(token_ids=tuple(self.codec.encode(full)), text=text, messages=messages, tools=tools)

    def _render(
        self, messages: tuple[Message, ...], tools: tuple[ToolSpec, ...], *, add_generation_prompt: bool
    ) -> str:
        return self._template.render(
            [
                self._short_message(message) if len(message.content or "") <= _CACHED_CHARS else self._message(message)
                for message in messages
            ],
            self._shown_tools(tools),
            add_generation_prompt=add_generation_prompt,
        )

    def _shown_tools(self, tools: tuple[ToolSpec, ...]) -> list[dict[str, Any]] | None:
        """Guarded tools as templates expect them; the few sets that a run uses are kept."""
        if not tools:
            return None
        for known, shown in self._known_tools:
            if known == tools:
                return shown
        shown = [self._tool(tool) for tool in tools]
        self._known_tools = [*self._known_tools[-_MAX_KNOWN_TOOLS + 1 :], (tools, shown)]
        return shown

    def _message(self, message: Message) -> dict[str, Any]:
        """The message as templates expect it, every string in it guarded."""
        guard = self.codec.guard
        is_ours = message.role == "assistant"
        shown: dict[str, Any] = {
            "role": guard(message.role),
            "content": guard(message.content or "", keep_marks=is_ours),
        }
        if message.tool_calls:
            shown["tool_calls"] = [
                {
                    "id": guard(call.id),
                    "type": "function",
                    "function": {"name": guard(call.name), "arguments": self._arguments(call.arguments)},
                }
                for call in message.tool_calls
            ]
        if message.tool_call_id is not None:
            shown["tool_call_id"] = guard(message.tool_call_id)
        if message.name is not None:
            shown["name"] = guard(message.name)
        return shown

    def _arguments(self, arguments: str) -> Any:
        """Templates write arguments with ``tojson``, so they get them as an object where they are one."""
        try:
            return self._guard_deep(msgspec.json.decode(arguments))
        except msgspec.DecodeError:
            return self.codec.guard(arguments)

    def _tool(self, tool: ToolSpec) -> dict[str, Any]:
        function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
        return {"type": "function", "function": self._guard_deep(function)}

    def _guard_deep(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.codec.guard(value)
        if isinstance(value, dict):
            return {self.codec.guard(key): self._guard_deep(entry) for key, entry in value.items()}
        if isinstance(value, list | tuple):
            return [self._guard_deep(entry) for entry in value]
        return value

    def _find_end_of_turn(self) -> int:
        messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": _PROBE}]
        text = self._template.render(messages, None, add_generation_prompt=False)
        found = self.codec.first_control(text, text.rfind(_PROBE))
        if found is None:
            raise InputError("the chat template must end an assistant message with a control token, and does not")
        return found

    def _find_generation_prompt(self) -> str:
        messages = [{"role": "user", "content": "x"}]
        without = self._template.render(messages, None, add_generation_prompt=False)
        with_prompt = self._template.render(messages, None, add_generation_prompt=True)
        return with_prompt.removeprefix(without) if with_prompt.startswith(without) else ""
