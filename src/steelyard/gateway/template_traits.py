"""How a template wants to be told things, found out by asking it.

Families differ in what they take and write: arguments as an object or as text, content None or "" beside calls, ids
of nine letters, one call per message or several, reasoning in a field or within the content. Each trait is the first
of the listed ways for which the template's own text says what was put in.
"""

import contextlib
from collections.abc import Sequence
from itertools import product
from typing import Any

import msgspec

from steelyard.errors import InputError
from steelyard.gateway.reply_reader import ReasoningMarks, ReplyReader
from steelyard.gateway.template import ChatTemplate
from steelyard.gateway.tool_calls.choice import DEFAULT_PARSER, parser_reading, parser_shown
from steelyard.types import Message, Record, ToolCall

_KNOWN_MARKS = (ReasoningMarks("<think>", "</think>"), ReasoningMarks("[THINK]", "[/THINK]"))
_REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
_USER = {"role": "user", "content": "x"}
_NAME = "probe_name"
_ARGUMENTS = '{"probe_key": "probe value", "number": 3}'
_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "probe_description",
        "parameters": {"type": "object", "properties": {"probe_key": {"type": "string"}}},
    },
}
SHORT_ID_CHARS = 9  # what Mistral's templates insist on


def common_length(one: Sequence[object], other: Sequence[object]) -> int:
    """How many of the first items of two sequences are equal."""
    for index, (ours, theirs) in enumerate(zip(one, other, strict=False)):
        if ours != theirs:
            return index
    return min(len(one), len(other))


def fork(prompt: str, whole: str, control_texts: Sequence[str]) -> int:
    """Where ``whole`` leaves ``prompt``, but not within a control string."""
    position = common_length(prompt, whole)
    for text in control_texts:
        start = whole.find(text, max(0, position - len(text) + 1))
        if 0 <= start < position:
            return start
    return position


class CallForm(Record, frozen=True, kw_only=True):
    """How calls are shown to a template.

    ``arguments_are_text``: as JSON text, else as an object. ``content_is_none``: content beside calls is None where
    there is none, else "". ``has_short_ids``: ids are nine letters or digits.
    """

    arguments_are_text: bool = False
    content_is_none: bool = False
    has_short_ids: bool = False


class TemplateTraits(Record, frozen=True, kw_only=True):
    """What is known of a template.

    ``writes_calls``: calls of a message are in its text; if not, they are shown to it within the content.
    ``written_parser``: reads the calls that it writes. ``parser``: reads what its models sample, as far as the
    template tells. ``refusal``: what it said where it takes no calls at all. ``marks``: of reasoning, where they are
    in the template or are tokens of their own. ``reasoning_field``: the field of a message in which it looks for
    reasoning; None where it looks into the content.
    """

    form: CallForm
    writes_calls: bool
    written_parser: str | None
    parser: str
    takes_parallel_calls: bool
    shows_tools: bool
    refusal: str | None
    marks: ReasoningMarks | None
    reasoning_field: str | None


def call_entry(form: CallForm, call: ToolCall) -> dict[str, Any]:
    """A call as a template in that form takes it."""
    arguments: Any = call.arguments
    if not form.arguments_are_text:
        with contextlib.suppress(msgspec.DecodeError):
            arguments = msgspec.json.decode(call.arguments)
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def find_traits(template: ChatTemplate, control_texts: Sequence[str], stop_texts: Sequence[str]) -> TemplateTraits:
    """Ask ``template``.

    Args:
        control_texts: all control strings.
        stop_texts: those that end a turn.
    """
    known = (marks for marks in _KNOWN_MARKS if marks.closing in template.source or marks.closing in control_texts)
    marks = next(known, None)
    probe = _Probe(template, control_texts, stop_texts)
    form, text, refusal = probe.best_form()
    written = None if text is None else parser_reading(text, [_call(form, 0)])
    writes_calls = text is not None and _NAME in text
    taught = written or parser_shown(probe.tools_text()) or parser_shown(template.source)
    return TemplateTraits(
        form=form,
        writes_calls=writes_calls,
        written_parser=None if written is None else written.name,
        parser=DEFAULT_PARSER if taught is None else taught.name,
        takes_parallel_calls=not writes_calls or probe.takes_two(form),
        shows_tools=_NAME in probe.tools_text(),
        refusal=None if writes_calls else refusal,
        marks=marks,
        reasoning_field=None if marks is None else probe.reasoning_field(marks),
    )


class _Probe:
    def __init__(self, template: ChatTemplate, control_texts: Sequence[str], stop_texts: Sequence[str]) -> None:
        self._template = template
        self._control_texts = control_texts
        self._stop_texts = stop_texts

    def best_form(self) -> tuple[CallForm, str | None, str | None]:
        """The first form that a parser reads back, else the first that is written, else the first that is taken.

        Returns:
            The form, the text of the call, and what was said where no form was taken.
        """
        refusal = None
        taken: list[tuple[CallForm, str]] = []
        for short, none, as_text in product((False, True), repeat=3):
            form = CallForm(arguments_are_text=as_text, content_is_none=none, has_short_ids=short)
            try:
                text = self._calls_text(form, 1)
            except InputError as error:
                refusal = refusal or str(error)
                continue
            if parser_reading(text, [_call(form, 0)]) is not None:
                return form, text, None
            taken.append((form, text))
        if not taken:
            return CallForm(), None, refusal
        written = [(form, text) for form, text in taken if _NAME in text]
        return *(written or taken)[0], None

    def takes_two(self, form: CallForm) -> bool:
        """Whether a message may hold two calls, and both are written."""
        try:
            text = self._calls_text(form, 2)
        except InputError:
            return False
        calls = [_call(form, 0), _call(form, 1)]
        if parser_reading(self._calls_text(form, 1), calls[:1]) is None:
            return text.count(_NAME) > 1
        return parser_reading(text, calls) is not None

    def tools_text(self) -> str:
        """The prompt of a conversation with a tool."""
        try:
            return self._template.render([_USER], [_TOOL], add_generation_prompt=True)
        except InputError:
            return ""

    def reasoning_field(self, marks: ReasoningMarks) -> str | None:
        """The field that the template reads, where it does not find reasoning within the content."""
        reader = ReplyReader(None, marks)
        reply = Message(role="assistant", content="probe answer", reasoning="probe reason")
        shown: list[tuple[str | None, dict[str, Any]]] = [(None, {"content": reader.joined(reply)})]
        shown += [(name, {"content": reply.content, name: reply.reasoning}) for name in _REASONING_FIELDS]
        for name, entry in shown:
            try:
                text = self._last_text([_USER, {"role": "assistant", **entry}], None, is_closed=False)
            except InputError:
                continue
            if reader.says(text, reply, is_open=not text.lstrip().startswith(marks.opening)):
                return name
        return None

    def _calls_text(self, form: CallForm, num_calls: int) -> str:
        calls = [_call(form, number) for number in range(num_calls)]
        entries = [call_entry(form, call) for call in calls]
        content = None if form.content_is_none else ""
        results = [{"role": "tool", "content": "y", "tool_call_id": call.id, "name": call.name} for call in calls]
        asked = {"role": "assistant", "content": content, "tool_calls": entries}
        return self._last_text([_USER, asked, *results], [_TOOL], is_closed=True)

    def _last_text(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, *, is_closed: bool) -> str:
        """What the template writes for ``messages[1]``, from its prompt to the end of its turn."""
        prompt = self._template.render(messages[:1], tools, add_generation_prompt=True)
        whole = self._template.render(messages, tools, add_generation_prompt=is_closed)
        text = whole[fork(prompt, whole, self._control_texts) :]
        ends = [position for stop in self._stop_texts if (position := text.find(stop)) >= 0]
        return text[: min(ends)] if ends else text


def _call(form: CallForm, number: int) -> ToolCall:
    call_id = f"probe000{number}" if form.has_short_ids else f"call_probe000000000{number}"
    assert not form.has_short_ids or len(call_id) == SHORT_ID_CHARS
    return ToolCall(id=call_id, name=_NAME, arguments=_ARGUMENTS)
