"""What an attempt's recorded turns can be extended with: conversations, by message prefix or text prefix.

A segment holds the texts and tokens of its newest turn only; since each turn's are a prefix of the next
one's, older turns are lengths into them. Memory grows with the conversation, not with its square.
"""

import weakref
from typing import Literal

import msgspec

from steelyard.gateway.renderer import PreviousTurn, Prompt
from steelyard.gateway.tool_calls.choice import same_calls
from steelyard.types import Message, ToolCall

Kind = Literal["chat", "text"]


class RecordedTurn:
    """A recorded turn, as lengths into its segment, which lives as long as the history does.

    The segment holds the turn and must not be held by it: what refers to itself in a circle is freed by the search for
    garbage only, and that search would have to look at every token of every attempt that has ended.
    """

    def __init__(
        self, segment: "Segment", turn_index: int, prompt: Prompt, token_ids: tuple[int, ...], reply: Message
    ) -> None:
        self._segment = weakref.ref(segment)
        self.turn_index = turn_index
        self.token_ids = token_ids
        self.reply = reply
        self.num_messages = len(prompt.messages)
        self.num_chars = len(prompt.text)
        self.num_prompt_tokens = len(prompt.token_ids)

    @property
    def segment(self) -> "Segment":
        """The segment that it is a turn of."""
        segment = self._segment()
        assert segment is not None, "the history of this turn is gone"
        return segment

    @property
    def reply_text(self) -> str:
        """The content that we returned, "" where it was None."""
        return self.reply.content or ""

    def as_previous(self) -> PreviousTurn:
        """The turn in full, to extend it."""
        newest = self.segment.newest_prompt
        prompt = Prompt(
            token_ids=newest.token_ids[: self.num_prompt_tokens],
            text=newest.text[: self.num_chars],
            messages=newest.messages[: self.num_messages],
            tools=newest.tools,
        )
        return PreviousTurn(prompt=prompt, token_ids=self.token_ids, reply=self.reply)


class Segment:
    """Turns that share a token prefix, oldest first."""

    def __init__(self, index: int, kind: Kind, prompt: Prompt) -> None:
        self.index = index
        self.kind = kind
        self.newest_prompt = prompt
        self.turns: list[RecordedTurn] = []

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All tokens: the newest prompt and what was sampled for it."""
        return (*self.newest_prompt.token_ids, *self.turns[-1].token_ids)

    @property
    def num_tokens(self) -> int:
        """Of the newest prompt and what was sampled for it."""
        return len(self.newest_prompt.token_ids) + len(self.turns[-1].token_ids)

    def begins(self, token_ids: tuple[int, ...]) -> bool:
        """Whether ``token_ids`` start with all tokens of the segment."""
        num_prompt, sampled = len(self.newest_prompt.token_ids), self.turns[-1].token_ids
        return (
            token_ids[num_prompt : num_prompt + len(sampled)] == sampled
            and token_ids[:num_prompt] == self.newest_prompt.token_ids
        )


class History:
    """All segments of one attempt."""

    def __init__(self) -> None:
        self.segments: list[Segment] = []
        self.num_turns = 0
        self._calls: dict[str, ToolCall] = {}

    def restored(self, messages: tuple[Message, ...]) -> tuple[Message, ...]:
        """``messages`` with our tool calls as they were sampled.

        Clients parse arguments and write them again, with other white space or another order of keys. A call that
        has an id of ours, the same name and equal arguments is the one that we returned.
        """
        if not self._calls:
            return messages
        return tuple(self._restored(message) if message.tool_calls else message for message in messages)

    def _restored(self, message: Message) -> Message:
        calls = tuple(self._own_call(call) for call in message.tool_calls)
        return message if calls == message.tool_calls else msgspec.structs.replace(message, tool_calls=calls)

    def _own_call(self, call: ToolCall) -> ToolCall:
        ours = self._calls.get(call.id)
        return call if ours is None or ours == call or not same_calls([ours], [call]) else ours

    def find_chat(self, messages: tuple[Message, ...]) -> RecordedTurn | None:
        """The turn with the longest equal message prefix: its messages and the reply as we returned it."""
        best: RecordedTurn | None = None
        for segment in self.segments:
            if segment.kind == "chat":
                turn = _longest_chat(segment, messages)
                if turn is not None and (best is None or turn.num_messages > best.num_messages):
                    best = turn
        return best

    def find_text(self, text: str) -> RecordedTurn | None:
        """The turn whose prompt text and returned text are the longest prefix of ``text``."""
        best: RecordedTurn | None = None
        for segment in self.segments:
            for turn in segment.turns if segment.kind == "text" else ():
                prompt_text = segment.newest_prompt.text[: turn.num_chars]
                if text.startswith(prompt_text) and text.startswith(turn.reply_text, turn.num_chars):
                    best = turn if best is None or turn.num_chars >= best.num_chars else best
        return best

    def find_tokens(self, token_ids: tuple[int, ...]) -> RecordedTurn | None:
        """The newest turn of the segment whose tokens are the longest prefix of ``token_ids``."""
        fitting = [segment for segment in self.segments if segment.begins(token_ids)]
        return max(fitting, key=lambda segment: segment.num_tokens).turns[-1] if fitting else None

    def place(self, prompt: Prompt, parent: RecordedTurn | None) -> Segment | None:
        """The segment that a turn with ``prompt`` goes on with; None where it starts a new one.

        It goes on only from the newest turn of a segment, and only if its prompt starts with all tokens of it,
        so that a segment is one line of tokens in which every sampled token stands once.
        """
        if parent is None or parent.segment.turns[-1] is not parent:
            return None
        return parent.segment if parent.segment.begins(prompt.token_ids) else None

    def add(
        self, segment: Segment | None, kind: Kind, prompt: Prompt, token_ids: tuple[int, ...], reply: Message
    ) -> RecordedTurn:
        """Add a turn to ``segment``, or to a new one."""
        if segment is None:
            segment = Segment(len(self.segments), kind, prompt)
            self.segments.append(segment)
        segment.newest_prompt = prompt
        turn = RecordedTurn(segment, self.num_turns, prompt, token_ids, reply)
        segment.turns.append(turn)
        self._calls.update((call.id, call) for call in reply.tool_calls)
        self.num_turns += 1
        return turn


def _longest_chat(segment: Segment, messages: tuple[Message, ...]) -> RecordedTurn | None:
    known = segment.newest_prompt.messages
    num_equal = 0
    for ours, theirs in zip(known, messages, strict=False):
        if not _is_returned(ours, theirs):
            break
        num_equal += 1
    for turn in reversed(segment.turns):
        is_within = turn.num_messages <= num_equal and turn.num_messages < len(messages)
        if is_within and _is_returned(turn.reply, messages[turn.num_messages]):
            return turn
    return None


def _is_returned(ours: Message, theirs: Message) -> bool:
    """Whether a message came back as it was. Its reasoning may be missing: most dialects have no place for it."""
    if ours == theirs:
        return True
    if ours.reasoning is None or theirs.reasoning not in (None, ours.reasoning):
        return False
    content = theirs.content if ours.content is not None else theirs.content or None
    return ours == msgspec.structs.replace(theirs, reasoning=ours.reasoning, content=content)
