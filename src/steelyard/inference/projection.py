"""What requests will need, learnt from what requests needed. Pure.

``max_tokens`` is what a request may sample, and few use it up. Memory set aside for all of it would leave most of a
replica empty; memory set aside for the mean would be too little for every other request.
"""

import bisect
import math
from collections import deque

from steelyard.types import EngineStats, GenerateResult

_WINDOW = 512
_MIN_SAMPLES = 16


class RunningQuantile:
    """A quantile of the last few hundred values. ``quantile``: 0 to 1."""

    def __init__(self, quantile: float) -> None:
        self._quantile = quantile
        self._recent: deque[float] = deque()
        self._sorted: list[float] = []

    def note(self, value: float) -> None:
        """One more value."""
        self._recent.append(value)
        bisect.insort(self._sorted, value)
        if len(self._recent) > _WINDOW:
            del self._sorted[bisect.bisect_left(self._sorted, self._recent.popleft())]

    def value(self) -> float | None:
        """The least value that the wanted share of values does not exceed; None until enough have been seen."""
        if len(self._sorted) < _MIN_SAMPLES:
            return None
        return self._sorted[max(0, math.ceil(self._quantile * len(self._sorted)) - 1)]


class OutputProjection:
    """A high quantile of the share of ``max_tokens`` that this run's last requests used.

    Args:
        quantile: share of requests that are to stay within their projection, 0 to 1.
    """

    def __init__(self, quantile: float) -> None:
        self._used_frac = RunningQuantile(quantile)

    def note(self, max_tokens: int, num_tokens: int) -> None:
        """A request that might sample ``max_tokens`` sampled ``num_tokens``."""
        self._used_frac.note(num_tokens / max(1, max_tokens))

    def tokens(self, max_tokens: int) -> int:
        """How many tokens to set memory aside for; all of them until enough requests have been seen."""
        used_frac = self._used_frac.value()
        return max_tokens if used_frac is None else min(max_tokens, max(1, math.ceil(used_frac * max_tokens)))


class Pace:
    """How fast a replica works, learnt from its answers.

    Seconds per sampled token are a line over the number of requests that are open at once: a decoding step reads the
    weights once for all of them, and the KV of each. The line is fitted by least squares with decaying weights. What a
    request waits inside the engine counts as part of it.

    Where a replica has answered little, or not of late, what is known of all replicas fills in: else one that was never
    asked would look slow, and never be asked.

    Args:
        fleet: the pace of all replicas together; None for that one itself, which starts from a prior.

    ``least_token_s`` and ``least_prefill_s`` (a token) of the fleet's: no replica was ever projected to be faster.
    """

    def __init__(self, fleet: "Pace | None" = None) -> None:
        self._fleet = fleet
        self._sums = (0.0, 0.0, 0.0, 0.0, 0.0)
        self._prefill_s = self._prefill_tokens = 0.0
        self._noted_at_s = 0.0
        self._line = (0.0, 0.0)
        self.least_token_s = self.least_prefill_s = math.inf
        if fleet is None:
            self._prefill_s, self._prefill_tokens = _PRIOR_PREFILL_S, _PRIOR_PREFILL_TOKENS
            for num_open, token_s in _PRIOR_DECODE:
                self._add(num_open, token_s, weight=_PRIOR_WEIGHT, decay=1.0)
            self._note_least(self)

    def note(self, result: GenerateResult, num_prompt_tokens: int, num_open: float, now_s: float) -> None:
        """An answer that was computed while ``num_open`` requests, itself included, were open on the mean."""
        if self._fleet is not None:
            self._fleet.note(result, num_prompt_tokens, num_open, now_s)
        num_computed = num_prompt_tokens - result.num_cached_tokens
        if num_computed > 0:
            self._prefill_s = self._prefill_s * _DECAY + result.prefill_s
            self._prefill_tokens = self._prefill_tokens * _DECAY + num_computed
        if result.token_ids:
            token_s = (result.queued_s + result.decode_s) / len(result.token_ids)
            self._add(num_open, token_s, weight=1.0, decay=_DECAY)
        self._noted_at_s = now_s
        self._note_least(self if self._fleet is None else self._fleet)

    def _note_least(self, fleet: "Pace") -> None:
        """Keep bounds that neither this pace nor any mixture with that of all goes below: a mixture of two numbers is
        not less than both, and more open requests never make a token faster.
        """
        if self._sums[0]:
            fleet.least_token_s = min(fleet.least_token_s, self._own_token_s(1.0))
        if self._prefill_tokens:
            fleet.least_prefill_s = min(fleet.least_prefill_s, self._prefill_s / self._prefill_tokens)

    def prefill_s(self, num_tokens: int, now_s: float) -> float:
        """Seconds to compute the KV of so many prompt tokens."""
        own = self._prefill_s / self._prefill_tokens if self._prefill_tokens else 0.0
        if self._fleet is None:
            return num_tokens * own
        trust = self._trust(now_s) if self._prefill_tokens else 0.0
        return trust * num_tokens * own + (1.0 - trust) * self._fleet.prefill_s(num_tokens, now_s)

    def token_s(self, num_open: float, now_s: float) -> float:
        """Seconds that each sampled token takes while ``num_open`` requests are open."""
        if self._fleet is None:
            return self._own_token_s(num_open)
        trust = self._trust(now_s)
        own_s = self._own_token_s(num_open) if trust else 0.0
        return trust * own_s + (1.0 - trust) * self._fleet.token_s(num_open, now_s)

    def estimate(self, num_tokens: int, num_open: float, now_s: float) -> tuple[float, float]:
        """Both at once: :meth:`prefill_s` of so many tokens and :meth:`token_s` beside so many requests."""
        fleet = self._fleet
        if fleet is None or not self._sums[0]:
            return self.prefill_s(num_tokens, now_s), self.token_s(num_open, now_s)
        # What the router asks for most: the calls that it is made of are written out.
        evidence = self._sums[0] * math.exp2((self._noted_at_s - now_s) / _HALF_LIFE_S)
        trust = evidence / (evidence + _FLEET_EVIDENCE)
        prefill_s = num_tokens * (fleet._prefill_s / fleet._prefill_tokens)
        if self._prefill_tokens:
            prefill_s = trust * num_tokens * (self._prefill_s / self._prefill_tokens) + (1.0 - trust) * prefill_s
        own_s = self._line[0] + self._line[1] * num_open
        of_all_s = fleet._line[0] + fleet._line[1] * num_open
        own_s = own_s if own_s > _MIN_TOKEN_S else _MIN_TOKEN_S
        of_all_s = of_all_s if of_all_s > _MIN_TOKEN_S else _MIN_TOKEN_S
        return prefill_s, trust * own_s + (1.0 - trust) * of_all_s

    def _trust(self, now_s: float) -> float:
        """How far its own answers count against those of all, 0 to below 1."""
        evidence = self._sums[0] * math.exp2((self._noted_at_s - now_s) / _HALF_LIFE_S)
        return evidence / (evidence + _FLEET_EVIDENCE)

    def _own_token_s(self, num_open: float) -> float:
        at_zero, slope = self._line
        token_s = at_zero + slope * num_open
        return token_s if token_s > _MIN_TOKEN_S else _MIN_TOKEN_S

    def _add(self, x: float, y: float, *, weight: float, decay: float) -> None:
        total, sx, sy, sxx, sxy = self._sums
        total = total * decay + weight
        sx, sy = sx * decay + weight * x, sy * decay + weight * y
        sxx, sxy = sxx * decay + weight * (x * x), sxy * decay + weight * (x * y)
        self._sums = (total, sx, sy, sxx, sxy)
        spread = total * sxx - sx * sx
        slope = max(0.0, (total * sxy - sx * sy) / spread) if spread > _EPSILON * total * total else 0.0
        self._line = ((sy - slope * sx) / total, slope)


_DECAY = 0.98
_HALF_LIFE_S = 30.0
_FLEET_EVIDENCE = 4.0
_PRIOR_WEIGHT = 0.5
_PRIOR_DECODE = ((1.0, 0.02), (32.0, 0.04))
_PRIOR_PREFILL_S, _PRIOR_PREFILL_TOKENS = 0.256, 256.0
_MIN_TOKEN_S = 1e-6
_EPSILON = 1e-6
"""Least variance of the number of open requests from which a slope can be told."""


def kv_capacity(stats: EngineStats) -> int | None:
    """KV tokens that a replica has room for; None where its engine does not say."""
    return stats.kv_tokens_capacity if stats.kv_tokens_capacity > 0 else None
