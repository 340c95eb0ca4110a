"""How long answers will be, judged by how long answers were. Pure bookkeeping."""

from bisect import bisect_left, insort
from collections import deque

_WINDOW = 256
_MIN_ANSWERS = 16
_QUANTILE = 0.8


class AnswerForecast:
    """Projects the tokens of an answer from ``max_tokens``, with feedback from what recent answers used of theirs.

    The projection is a quantile of used / asked over the last answers; until there are enough of them, it is all that
    was asked for. Most answers stay below it, and one that does not is projected anew by whoever watches it.
    """

    def __init__(self) -> None:
        self._recent: deque[float] = deque()
        self._ordered: list[float] = []

    def note(self, used_tokens: int, asked_tokens: int) -> None:
        """An answer has ended by itself, or at ``asked_tokens``."""
        used_frac = used_tokens / asked_tokens
        if len(self._recent) == _WINDOW:
            del self._ordered[bisect_left(self._ordered, self._recent.popleft())]
        self._recent.append(used_frac)
        insort(self._ordered, used_frac)

    def tokens(self, asked_tokens: int) -> int:
        """Projected tokens of an answer, 1 to ``asked_tokens``."""
        if len(self._ordered) < _MIN_ANSWERS:
            return asked_tokens
        used_frac = self._ordered[min(len(self._ordered) - 1, int(_QUANTILE * len(self._ordered)))]
        return min(asked_tokens, max(1, round(used_frac * asked_tokens)))
