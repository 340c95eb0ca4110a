"""Multi-turn prompts, token in and token out: what was sampled is what the next prompt holds.

::

    prompt of turn n+1 = prompt of turn n + sampled tokens + end-of-turn token, if it was not sampled
                         + encoding of what the template writes after the end of our message

The last part is cut from the template's own text, so it holds the newline after the end-of-turn token and
whatever else the template puts there. The sampled part is never rendered again. That this is allowed is
checked each turn on texts: with T the template's text of the previous prompt and F its text of all messages, F must
start with T, go on with our message in the words that were sampled (white space at the edges and the form of a
call's JSON may differ: the sampled form is the one that is kept), and end it with a token that ends generation.
Where a template rewrites history (drops old reasoning, moves the tools), it does not, and a new segment starts from
F encoded afresh.
"""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from steelyard.errors import InputError
from steelyard.gateway.codec import TokenCodec
from steelyard.gateway.reply_reader import ReplyReader
from steelyard.gateway.template import ChatTemplate, FixedDict
from steelyard.gateway.template_traits import SHORT_ID_CHARS, call_entry, find_traits, fork
from steelyard.gateway.tool_calls.base import ToolParser
from steelyard.gateway.tool_calls.choice import parser_named
from steelyard.types import Message, Record, ToolSpec

BreakReason = Literal["history_changed", "prompt_changed", "reasoning_dropped", "reply_changed", "no_end_of_turn"]

_PROBE = "PROBE"
_STAND_IN = Message(role="user", content="x")
"""For the conversation before, where a template writes each message alone."""
_CACHED_MESSAGES = 4096
_CACHED_CHARS = 2048
_MAX_KNOWN_TOOLS = 16


class Prompt(Record, frozen=True, kw_only=True):
    """A prompt as tokens, and what it was made from.

    ``text``: what the template says for ``messages``, with guarded content; for a prompt that the caller rendered,
    that text itself.
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
    another way), ``prompt_changed`` (it began our message in another way than it had asked for it),
    ``reasoning_dropped``, ``reply_changed`` (it wrote our message in other words), ``no_end_of_turn`` (it did not end
    our message with a control token that ends generation).
    """

    prompt: Prompt
    break_reason: BreakReason | None = None


class _Alone(Record, frozen=True, kw_only=True):
    """``begun``: what the template says for the stand-in, without asking for more; ``foot``: what it asks with."""

    begun: str
    foot: str


class Renderer:
    """Turns messages into prompts for one tokenizer and template. Holds no conversation.

    Args:
        stop_token_ids: more tokens that end generation, beside the end-of-turn token and ``eos_token``.
        tool_parser: name of the parser of sampled calls; by default the one that fits the template.

    Raises:
        InputError: the template does not end an assistant message with a control token, or no parser has that name.
    """

    def __init__(
        self,
        codec: TokenCodec,
        template: ChatTemplate,
        stop_token_ids: Sequence[int] = (),
        tool_parser: str | None = None,
    ) -> None:
        self.codec = codec
        self._short_message = functools.lru_cache(_CACHED_MESSAGES)(self._message)
        self._known_tools: list[tuple[tuple[ToolSpec, ...], list[dict[str, Any]]]] = []
        self._template = template
        self.end_of_turn_id = self._find_end_of_turn()
        eos_id = codec.token_id(template.special_tokens.get("eos_token", ""))
        found = {self.end_of_turn_id, *stop_token_ids, *([] if eos_id is None else [eos_id])}
        self.stop_token_ids = tuple(sorted(found))
        self._stop_set = frozenset(found)
        stop_texts = [token.text for token in codec.control_tokens if token.token_id in found]
        control_texts = [token.text for token in codec.control_tokens]
        traits = self.traits = find_traits(template, control_texts, stop_texts)
        parser = parser_named(tool_parser or traits.parser)
        max_calls = None if traits.takes_parallel_calls else 1
        self.reader = ReplyReader(parser, traits.marks, max_calls)
        written = traits.written_parser if traits.writes_calls else parser.name
        self._written = ReplyReader(None if written is None else parser_named(written), traits.marks)
        self._guard_reply = codec.guard_except(self._reply_marks(parser))
        self._alone = self._find_alone()

    @classmethod
    def load(cls, directory: Path, tool_parser: str | None = None) -> "Renderer":
        """Read tokenizer, template and ``generation_config.json`` (its ``eos_token_id``) of a model directory.

        Raises:
            InputError: a file is missing or does not fit.
        """
        path = directory / "generation_config.json"
        settings = msgspec.json.decode(path.read_bytes(), type=dict[str, Any]) if path.exists() else {}
        eos = settings.get("eos_token_id")
        stop_token_ids = [eos] if isinstance(eos, int) else list(eos or ())
        return cls(TokenCodec.load(directory), ChatTemplate.load(directory), stop_token_ids, tool_parser)

    def call_id(self, made: str) -> str:
        """An id for a sampled call, from one that is unique, in a form that the template takes."""
        if not self.traits.form.has_short_ids:
            return made
        return made[-SHORT_ID_CHARS:]

    def first_prompt(self, messages: tuple[Message, ...], tools: tuple[ToolSpec, ...]) -> Prompt:
        """The prompt of a conversation of which nothing was recorded.

        Raises:
            InputError: the template refuses the messages.
        """
        return self._encoded(self._render(messages, tools), messages, tools)

    def text_of(self, messages: tuple[Message, ...], tools: tuple[ToolSpec, ...]) -> str:
        """What the template says for ``messages``, without asking for more.

        Raises:
            InputError: the template refuses the messages.
        """
        return self.codec.restore(self._render(messages, tools, add_generation_prompt=False))

    def extend(self, previous: PreviousTurn, added: tuple[Message, ...], tools: tuple[ToolSpec, ...]) -> Extension:
        """The prompt for the messages of ``previous``, its reply, and the ``added`` ones after it.

        The returned prompt shares the message records of ``previous``.

        Raises:
            InputError: the template refuses the messages.
        """
        messages = (*previous.prompt.messages, previous.reply, *added)
        full = self._render_added(previous, added, tools) or self._render(messages, tools)
        known = previous.prompt.text
        if not full.startswith(known):
            return self._broken(full, messages, tools, self._why_rewritten(previous, full))
        end = self.codec.first_control(full, len(known), self._stop_set)
        if end is None:
            return self._broken(full, messages, tools, "no_end_of_turn")
        end_token_id, start, end_position = end
        written = self.codec.restore(full[len(known) : start])
        if not self._written.says(written, previous.reply, is_open=self.reader.is_open(known)):
            return self._broken(full, messages, tools, self._why_changed(previous.reply, written))
        sampled = previous.token_ids
        closing = () if sampled and sampled[-1] in self._stop_set else (end_token_id,)
        rest = self.codec.encode(full[end_position:], is_start=False)
        token_ids = (*previous.prompt.token_ids, *sampled, *closing, *rest)
        return Extension(prompt=Prompt(token_ids=token_ids, text=full, messages=messages, tools=tools))

    def opened(self, prompt: Prompt, tool: str | None) -> tuple[Prompt, str]:
        """The prompt with the beginning of a reply that calls ``tool`` (None: any), and the text of that beginning.

        It is ours and not sampled. Reasoning that the prompt has begun is ended before it.
        """
        parser, marks = self.reader.parser, self.reader.marks
        opening = "" if parser is None else parser.forced_opening(None if tool is None else self.codec.guard(tool))
        if marks is not None and self.reader.is_open(prompt.text):
            opening = f"\n{marks.closing}\n\n{opening}"
        token_ids = (*prompt.token_ids, *self.codec.encode(opening, is_start=False))
        return msgspec.structs.replace(prompt, token_ids=token_ids), self.codec.restore(opening)

    def written_reply(self, prompt: Prompt, reply: Message) -> str:
        """What the template writes for a reply to ``prompt``; "" where it writes history in another way.

        Raises:
            InputError: the template refuses the messages.
        """
        results = tuple(Message(role="tool", content="x", tool_call_id=call.id) for call in reply.tool_calls)
        full = self._render((*prompt.messages, reply, *results), prompt.tools)
        start = fork(prompt.text, full, [token.text for token in self.codec.control_tokens])
        end = self.codec.first_control(full, start, self._stop_set)
        return "" if end is None else self.codec.restore(full[start : end[1]])

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

    def _broken(
        self, full: str, messages: tuple[Message, ...], tools: tuple[ToolSpec, ...], reason: BreakReason
    ) -> Extension:
        return Extension(prompt=self._encoded(full, messages, tools), break_reason=reason)

    def _why_rewritten(self, previous: PreviousTurn, full: str) -> BreakReason:
        """Why ``full`` does not start with the previous prompt."""
        prompt = previous.prompt
        before = self._render(prompt.messages, prompt.tools, add_generation_prompt=False)
        if not full.startswith(before):
            return "history_changed"
        reasoning = (previous.reply.reasoning or "").strip()
        is_kept = reasoning in self.codec.restore(full[len(before) :])
        return "prompt_changed" if is_kept else "reasoning_dropped"

    def _why_changed(self, reply: Message, written: str) -> BreakReason:
        reasoning = (reply.reasoning or "").strip()
        return "reply_changed" if reasoning in written else "reasoning_dropped"

    def _reply_marks(self, parser: ToolParser) -> frozenset[str]:
        """What an assistant message may hold as tokens: marks of reasoning, and of calls if they are not special."""
        ordinary = {token.text for token in self.codec.control_tokens if not token.is_special}
        return frozenset((*(self.traits.marks or ()), *(mark for mark in parser.marks if mark in ordinary)))

    def _encoded(self, full: str, messages: tuple[Message, ...], tools: tuple[ToolSpec, ...]) -> Prompt:
        return Prompt(token_ids=tuple(self.codec.encode(full)), text=full, messages=messages, tools=tools)

    def _render(
        self, messages: tuple[Message, ...], tools: tuple[ToolSpec, ...], *, add_generation_prompt: bool = True
    ) -> str:
        return self._template.render(
            [
                self._short_message(message)
                if len(message.content or "") + len(message.reasoning or "") <= _CACHED_CHARS
                else self._message(message)
                for message in messages
            ],
            self._shown_tools(tools),
            add_generation_prompt=add_generation_prompt,
        )

    def _render_added(
        self, previous: PreviousTurn, added: tuple[Message, ...], tools: tuple[ToolSpec, ...]
    ) -> str | None:
        """As the whole rendering, by what the new messages add to it; None where the template may write another."""
        prompt = previous.prompt
        if self._alone is None or tools != prompt.tools or not prompt.text.endswith(self._alone.foot):
            return None
        text = self._render((_STAND_IN, previous.reply, *added), ())
        return prompt.text[: len(prompt.text) - len(self._alone.foot)] + text[len(self._alone.begun) :]

    def _find_alone(self) -> "_Alone | None":
        if not self._template.writes_each_alone:
            return None
        try:
            begun = self._render((_STAND_IN,), (), add_generation_prompt=False)
            whole = self._render((_STAND_IN,), ())
        except InputError:
            return None
        return _Alone(begun=begun, foot=whole[len(begun) :]) if whole.startswith(begun) else None

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
        """The message as the template takes it, every string in it guarded."""
        guard = self.codec.guard
        shown: dict[str, Any] = {"role": guard(message.role), "content": self._content(message)}
        if message.role == "assistant" and message.reasoning is not None and self.traits.reasoning_field is not None:
            shown[self.traits.reasoning_field] = self._guard_reply(message.reasoning)
        if message.tool_calls and (self.traits.writes_calls or message.role != "assistant"):
            shown["tool_calls"] = [self._guard_deep(call_entry(self.traits.form, call)) for call in message.tool_calls]
        if message.tool_call_id is not None:
            shown["tool_call_id"] = guard(message.tool_call_id)
        if message.name is not None:
            shown["name"] = guard(message.name)
        return shown

    def _content(self, message: Message) -> str | None:
        if message.role != "assistant":
            return self.codec.guard(message.content or "")
        is_apart = self.traits.reasoning_field is not None
        text = self._guard_reply((message.content or "") if is_apart else self.reader.joined(message))
        if not message.tool_calls:
            return text
        if self.traits.writes_calls:
            return text or (None if self.traits.form.content_is_none else "")
        calls = [
            msgspec.structs.replace(call, name=self.codec.guard(call.name), arguments=self.codec.guard(call.arguments))
            for call in message.tool_calls
        ]
        parser = self.reader.parser
        return text if parser is None else "\n".join(part for part in (text, parser.write(calls)) if part)

    def _tool(self, tool: ToolSpec) -> dict[str, Any]:
        function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
        return FixedDict({"type": "function", "function": self._guard_deep(function)})

    def _guard_deep(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.codec.guard(value)
        if isinstance(value, dict):
            return FixedDict({self.codec.guard(key): self._guard_deep(entry) for key, entry in value.items()})
        if isinstance(value, list | tuple):
            return [self._guard_deep(entry) for entry in value]
        return value

    def _find_end_of_turn(self) -> int:
        messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": _PROBE}]
        text = self._template.render(messages, None, add_generation_prompt=False)
        found = self.codec.first_control(text, text.rfind(_PROBE))
        if found is None:
            raise InputError("the chat template must end an assistant message with a control token, and does not")
        return found[0]
