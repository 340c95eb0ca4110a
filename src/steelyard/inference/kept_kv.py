"""How much of the KV that is kept on a replica is still worth keeping. Pure.

A conversation's KV is worth keeping while it has been idle for less than ``rate`` seconds for each of its tokens. The
rate differs from one question to the next, as the replica's pace and load do, but little; so what is idle is sorted
once for a span of time and of rates. Only the few that fall between are looked at with each question.
"""

_RATE_MARGIN = 1.1
"""A sorting holds for rates up to so many times less or more."""

_SPAN_FRAC = 0.05
"""A sorting holds for this share of the time for which a conversation is kept on the mean."""


class KeptKv:
    """The KV of conversations that are between two calls on one replica."""

    __slots__ = (
        "_certain",
        "_doubtful",
        "_from_s",
        "_idle",
        "_least_rate",
        "_most_rate",
        "_until_s",
        "_worth",
        "total",
    )

    def __init__(self) -> None:
        self.total = 0
        self._idle: dict[str, tuple[int, float]] = {}
        self._certain: set[str] = set()
        self._worth = 0
        self._doubtful: dict[str, tuple[int, float]] = {}
        self._least_rate = self._most_rate = 0.0
        self._from_s, self._until_s = 0.0, -1.0

    def __len__(self) -> int:
        return len(self._idle)

    def add(self, key: str, num_tokens: int, since_s: float) -> None:
        """A conversation's call has ended at ``since_s`` and left so much KV."""
        self.total += num_tokens
        self._idle[key] = num_tokens, since_s
        self._sort(key, num_tokens, since_s)

    def remove(self, key: str) -> None:
        """The conversation goes on, or is forgotten."""
        num_tokens, _ = self._idle.pop(key)
        self.total -= num_tokens
        if key in self._certain:
            self._certain.discard(key)
            self._worth -= num_tokens
        else:
            self._doubtful.pop(key, None)

    def worth_keeping(self, rate: float, now_s: float) -> int:
        """Tokens of all that have been idle for less than ``rate`` seconds a token."""
        if not (self._least_rate <= rate <= self._most_rate and self._from_s <= now_s <= self._until_s):
            self._sort_all(rate, now_s)
        worth = self._worth
        for num_tokens, since_s in self._doubtful.values():
            if now_s - since_s < num_tokens * rate:
                worth += num_tokens
        return worth

    def worth_keeping_of(self, key: str, rate: float, now_s: float) -> int:
        """What one conversation has part in that."""
        num_tokens, since_s = self._idle[key]
        return num_tokens if now_s - since_s < num_tokens * rate else 0

    def _sort_all(self, rate: float, now_s: float) -> None:
        self._certain.clear()
        self._doubtful.clear()
        self._worth = 0
        self._least_rate, self._most_rate = rate / _RATE_MARGIN, rate * _RATE_MARGIN
        self._from_s = now_s
        self._until_s = now_s + _SPAN_FRAC * rate * self.total / max(1, len(self._idle))
        for key, (num_tokens, since_s) in self._idle.items():
            self._sort(key, num_tokens, since_s)

    def _sort(self, key: str, num_tokens: int, since_s: float) -> None:
        if self._until_s - since_s < num_tokens * self._least_rate:
            self._certain.add(key)
            self._worth += num_tokens
        elif self._from_s - since_s < num_tokens * self._most_rate:
            self._doubtful[key] = num_tokens, since_s
