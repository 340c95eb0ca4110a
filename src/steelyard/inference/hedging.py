"""A second replica for a request that has waited too long, and the tokens of whoever answers first.

Following "tied requests" and hedging after a quantile of the latency (Dean and Barroso, The Tail at Scale, CACM 2013).
"""

import asyncio

from steelyard.inference.engine import OnTokens
from steelyard.inference.projection import RunningQuantile
from steelyard.types import TokenChunk


class TokenStream:
    """Passes on the tokens of the first replica that streams any, and drops those of the other.

    Args:
        on_tokens: gets them; None where nobody looks.
    """

    def __init__(self, on_tokens: OnTokens | None) -> None:
        self._on_tokens = on_tokens
        self.speaker: str | None = None
        self.has_begun = asyncio.Event()

    def of(self, replica_id: str) -> OnTokens | None:
        """What a replica streams to."""
        if self._on_tokens is None:
            return None
        on_tokens = self._on_tokens

        def push(chunk: TokenChunk) -> None:
            if self.speaker is None:
                self.speaker = replica_id
                self.has_begun.set()
            if self.speaker == replica_id:
                on_tokens(chunk)

        return push


class HedgeDelay:
    """After how long a request is given to a second replica: a quantile of how long the last ones waited.

    Args:
        quantile: 0 to 1; None, never.
    """

    def __init__(self, quantile: float | None) -> None:
        self._waits_s = None if quantile is None else RunningQuantile(quantile)

    def note(self, waited_s: float) -> None:
        """A request had its first token, or its answer where it streams none, after so long."""
        if self._waits_s is not None:
            self._waits_s.note(waited_s)

    def delay_s(self) -> float | None:
        """Seconds; None where none is to be sent."""
        return None if self._waits_s is None else self._waits_s.value()
