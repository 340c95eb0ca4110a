"""What a sampled reply says: reasoning, content and tool calls."""

from typing import NamedTuple

from steelyard.gateway.tool_calls.base import NewId, ToolParser
from steelyard.gateway.tool_calls.choice import same_calls
from steelyard.types import Message, Record, ToolCall


class ReasoningMarks(NamedTuple):
    """The strings around reasoning."""

    opening: str
    closing: str


class ParsedReply(Record, frozen=True, kw_only=True):
    """What a reply says. ``content`` is None where there is nothing but calls, or where the reasoning did not end.

    ``reasoning``: what stood between the marks, without line ends at its edges, as content is without those behind the
    reasoning; None without an opening mark.
    ``num_malformed``: tool calls that cannot be read; they stay in ``content``.
    """

    content: str | None
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    num_malformed: int = 0


class ReplyReader:
    """Reads replies to prompts of one template.

    Args:
        parser: of the calls; None where they stay text.
        marks: of reasoning; None where it stays text.
        max_calls: a reply with more calls stays text, as malformed: the template could not write it; None for any.
    """

    def __init__(self, parser: ToolParser | None, marks: ReasoningMarks | None, max_calls: int | None = None) -> None:
        self.parser = parser
        self.marks = marks
        self._max_calls = max_calls

    def is_open(self, prompt_text: str) -> bool:
        """Whether a prompt ends within reasoning, so that the reply begins there."""
        return self.marks is not None and prompt_text.rstrip().endswith(self.marks.opening)

    def read(self, text: str, new_id: NewId, *, reads_calls: bool, is_open: bool) -> ParsedReply:
        """Split ``text``; calls are read where ``reads_calls``, and behind the reasoning only."""
        reasoning, content = self._split(text, is_open)
        if content is None or not reads_calls or self.parser is None:
            return ParsedReply(content=content, reasoning=reasoning)
        parsed = self.parser.parse(content, new_id)
        num_calls = len(parsed.tool_calls)
        if self._max_calls is not None and num_calls > self._max_calls:
            return ParsedReply(content=content, reasoning=reasoning, num_malformed=num_calls + parsed.num_malformed)
        return ParsedReply(
            content=parsed.content,
            reasoning=reasoning,
            tool_calls=parsed.tool_calls,
            num_malformed=parsed.num_malformed,
        )

    def joined(self, message: Message) -> str:
        """Reasoning and content as one text, in the order and with the marks in which they are sampled."""
        content = message.content or ""
        if message.reasoning is None or self.marks is None:
            return content
        opened = f"{self.marks.opening}\n{message.reasoning}"
        if message.content is None and not message.tool_calls:
            return opened
        return f"{opened}\n{self.marks.closing}\n\n{content}"

    def says(self, text: str, reply: Message, *, is_open: bool) -> bool:
        """Whether ``text`` says what ``reply`` says, but for white space at edges and the form of calls.

        Calls of a form that no parser reads are looked for by name.
        """
        read = self.read(text, lambda: "", reads_calls=bool(reply.tool_calls), is_open=is_open)
        if (read.reasoning or "").strip() != (reply.reasoning or "").strip():
            return False
        if reply.tool_calls and self.parser is None:
            return all(call.name in text for call in reply.tool_calls)
        if (read.content or "").strip() != (reply.content or "").strip():
            return False
        return same_calls(read.tool_calls, reply.tool_calls)

    def _split(self, text: str, is_open: bool) -> tuple[str | None, str | None]:
        if self.marks is None:
            return None, text
        body = text
        if not is_open:
            body = text.lstrip()
            if not body.startswith(self.marks.opening):
                return None, text
            body = body[len(self.marks.opening) :]
        reasoning, mark, content = body.partition(self.marks.closing)
        return reasoning.strip("\n"), content.lstrip("\n") if mark else None
