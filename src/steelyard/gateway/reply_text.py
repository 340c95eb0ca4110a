"""Text of sampled tokens as it grows: what may be shown already, and where a stop string ends it."""

from collections.abc import Sequence

from steelyard.gateway.codec import TokenCodec
from steelyard.gateway.reply_reader import ReplyReader
from steelyard.types import Message, Record

_UNFINISHED = "\ufffd"


class Cut(Record, frozen=True, kw_only=True):
    """``stop`` was found: keep ``num_tokens`` tokens and ``text``, which ends before it."""

    num_tokens: int
    text: str
    stop: str


class GrowingText:
    """Decodes tokens one by one; the text of all of them equals their decoding at once.

    Only a window is decoded again with each token: from the last token that began at a character boundary.
    A character that is cut between two tokens is held back until it is whole.
    """

    def __init__(self, codec: TokenCodec) -> None:
        self._codec = codec
        self._window: list[int] = []
        self._num_shown_ids = 0
        self.text = ""

    def push(self, token_id: int) -> None:
        """Add one token."""
        shown = self._codec.decode(self._window[: self._num_shown_ids])
        self._window.append(token_id)
        whole = self._codec.decode(self._window)
        if whole.endswith(_UNFINISHED) or len(whole) <= len(shown):
            return
        self.text += whole[len(shown) :]
        self._window = self._window[self._num_shown_ids :]
        self._num_shown_ids = len(self._window)


def find_stop(codec: TokenCodec, token_ids: Sequence[int], stops: Sequence[str]) -> Cut | None:
    """Where the first stop string ends generation: at the token that completes it; None without one."""
    growing = GrowingText(codec)
    longest = max((len(stop) for stop in stops), default=0)
    for index, token_id in enumerate(token_ids):
        num_seen = len(growing.text)
        growing.push(token_id)
        position = first_stop(growing.text, stops, max(0, num_seen - longest))
        if position is not None:
            stop = next(stop for stop in stops if growing.text.startswith(stop, position))
            return Cut(num_tokens=index + 1, text=growing.text[:position], stop=stop)
    return None


def first_stop(text: str, stops: Sequence[str], start: int = 0) -> int | None:
    """Position of the earliest stop string in ``text[start:]``."""
    return min((found for stop in stops if (found := text.find(stop, start)) >= 0), default=None)


class Pieces(Record, frozen=True, kw_only=True):
    """What may be shown now; "" for none."""

    content: str = ""
    reasoning: str = ""


class ReplyStream:
    """Decides how much of a growing reply may be shown before it is complete.

    Held back: what may be the beginning of a mark, a stop string or a tool call, everything from a tool call on,
    and, where tool calls are read, white space, since it is stripped before a call.

    Args:
        stops: strings that end the text.
        reader: of the complete reply.
        reads_calls: whether it will look for tool calls.
        is_open: whether the reply begins within reasoning.
    """

    def __init__(
        self,
        codec: TokenCodec,
        stops: Sequence[str],
        reader: ReplyReader | None = None,
        *,
        reads_calls: bool = False,
        is_open: bool = False,
    ) -> None:
        self._growing = GrowingText(codec)
        self._stops = tuple(stops)
        self._marks = None if reader is None else reader.marks
        self._parser = reader.parser if reader is not None and reads_calls else None
        self._reasoning_from = 0 if is_open and self._marks is not None else None
        self._content_from = 0 if self._marks is None else None
        self._num_reasoning = self._num_shown = 0
        self._stop_at: int | None = None

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string was seen."""
        return self._stop_at is not None

    def push(self, token_ids: Sequence[int]) -> Pieces:
        """Add tokens; returns what may be shown now."""
        num_seen = len(self._growing.text)
        for token_id in token_ids:
            self._growing.push(token_id)
        text = self._growing.text
        if self._stop_at is None:
            longest = max((len(stop) for stop in self._stops), default=0)
            self._stop_at = first_stop(text, self._stops, max(0, num_seen - longest))
        text = text[: self._stop_at]
        self._find_parts(text)
        return Pieces(reasoning=self._more_reasoning(text), content=self._more_content(text))

    def finish(self, message: Message) -> Pieces:
        """What is still to be shown of the complete ``message``."""
        reasoning = (message.reasoning or "")[self._num_reasoning :]
        return Pieces(reasoning=reasoning, content=(message.content or "")[self._num_shown :])

    def _find_parts(self, text: str) -> None:
        """Where reasoning and content begin, as soon as it is known."""
        if self._marks is None:
            return
        opening, closing = self._marks
        if self._reasoning_from is None and self._content_from is None:
            body = text.lstrip()
            if body.startswith(opening):
                self._reasoning_from = len(text) - len(body) + len(opening)
            elif not opening.startswith(body):
                self._content_from = 0
        if self._reasoning_from is not None and self._content_from is None:
            end = text.find(closing, self._reasoning_from)
            if end >= 0:
                self._content_from = end + len(closing)

    def _more_reasoning(self, text: str) -> str:
        if self._reasoning_from is None or self._marks is None:
            return ""
        body = text[self._reasoning_from :]
        if self._content_from is None:
            shown = body[: _safe_end(body, (self._marks.closing, *self._stops))]
        else:
            shown = text[self._reasoning_from : self._content_from - len(self._marks.closing)]
        delta = shown.strip("\n")[self._num_reasoning :]
        self._num_reasoning += len(delta)
        return delta

    def _more_content(self, text: str) -> str:
        if self._content_from is None:
            return ""
        body = text[self._content_from :]
        if self._reasoning_from is not None:
            body = body.lstrip("\n")
        openings = () if self._parser is None else self._parser.openings
        end = first_stop(body, openings, self._num_shown)
        shown = body[: _safe_end(body, (*self._stops, *openings)) if end is None else end]
        if self._parser is not None:
            shown = shown.rstrip() if self._num_shown or shown.strip() else ""
            if body.lstrip().startswith(self._parser.head_openings):
                shown = ""
        delta = shown[self._num_shown :]
        self._num_shown += len(delta)
        return delta


def _safe_end(text: str, barriers: Sequence[str]) -> int:
    """Up to where ``text`` cannot be the beginning of a barrier."""
    end = len(text)
    for barrier in barriers:
        for length in range(min(len(barrier) - 1, len(text)), 0, -1):
            if text.endswith(barrier[:length]):
                end = min(end, len(text) - length)
                break
    return end
