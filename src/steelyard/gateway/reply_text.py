"""Text of sampled tokens as it grows: what may be shown already, and where a stop string ends it."""

from collections.abc import Sequence

from steelyard.gateway.codec import TokenCodec
from steelyard.types import Record

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


class ReplyStream:
    """Decides how much of a growing reply may be shown before it is complete.

    Held back: what may be the beginning of a stop string or of a tool call, everything from a tool call on,
    and, where tool calls are read, white space, since it is stripped before a call.

    Args:
        stops: strings that end the text.
        opening: the string that opens a tool call; None where calls are not read.
    """

    def __init__(self, codec: TokenCodec, stops: Sequence[str], opening: str | None) -> None:
        self._growing = GrowingText(codec)
        self._stops = tuple(stops)
        self._opening = opening
        self._barriers = (*stops, *([] if opening is None else [opening]))
        self._num_shown = 0
        self.is_stopped = False

    def push(self, token_ids: Sequence[int]) -> str:
        """Add tokens; returns the text that may be shown now, "" for none. Sets ``is_stopped`` at a stop string."""
        for token_id in token_ids:
            self._growing.push(token_id)
        text = self._growing.text
        if first_stop(text, self._stops, self._num_shown) is not None:
            self.is_stopped = True
        end = first_stop(text, self._barriers, self._num_shown)
        shown = text[: _safe_end(text, self._barriers) if end is None else end]
        if self._opening is not None:
            shown = shown.rstrip() if self._num_shown or shown.strip() else ""
        delta = shown[self._num_shown :]
        self._num_shown += len(delta)
        return delta

    def finish(self, content: str) -> str:
        """What is still to be shown of the final ``content``."""
        return content[self._num_shown :]


def _safe_end(text: str, barriers: Sequence[str]) -> int:
    """Up to where ``text`` cannot be the beginning of a barrier."""
    end = len(text)
    for barrier in barriers:
        for length in range(min(len(barrier) - 1, len(text)), 0, -1):
            if text.endswith(barrier[:length]):
                end = min(end, len(text) - length)
                break
    return end
