"""How much of a trajectory is left, as quantiles, learnt from trajectories that have ended. Pure, of bounded memory.

One amount (sampled tokens, turns, seconds in tools) is looked at through several *views*. A view is a chain of keys,
from general to specific, and a scale. For every key it keeps what was left, over the scale, in the last trajectories
of that key. Its quantiles are those of the most specific key, drawn towards those of the key before it where few were
seen: of ``n`` values and ``m`` = ``_SUPPORT`` they count ``n / (n + m)``. In logarithms: what is left spans decades.

Which view is right is left to the data. For each kind of situation every view keeps its decaying mean quantile loss
(pinball), each value judged before it was learnt, and the views' quantiles are averaged with weights
``loss ** -_ZEAL``. The loss is convex: an average is never worse than its parts are on average. Averages of monotone
quantiles are monotone.

A lookup takes microseconds: what a view says of a key is kept until enough new values have come.
"""

import bisect
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Sequence

from steelyard.allocation.workload import ToolResult, TrajectoryWork
from steelyard.types.record import Record

LEVELS = (0.1, 0.25, 0.5, 0.75, 0.9)
"""The quantiles that are kept: shares of trajectories that have no more left than that."""

MAX_KEYS = 2048
"""Keys of one amount, over all views; the one that was not learnt from for longest goes first."""

_WINDOW = 1024
"""Values kept a key: those before have decayed."""
_SUPPORT = 12.0
_ZEAL = 16.0
_LEAST_WEIGHT = 0.02
_LOSS_DECAY = 0.999
_RENEWED_FRAC = 0.05
_RENEWED_AT_MOST = 256
"""What is known of a key is made anew once so many values have come, or a share of all."""
_KNOWN_A_KEY = 4
_DENSE_TURNS = 16
_TURNS_AN_OCTAVE = 8
"""Turns that are learnt from: all at first, then so many from each to twice it. Which they are must not depend on how
long the trajectory became: else at each turn the long would be too few among the learnt.
"""
_LAST_RESULTS = 2

Quantiles = tuple[float, ...]
"""One value for each of :data:`LEVELS`, not falling."""


class Seen(Record, frozen=True, kw_only=True):
    """What is known of a trajectory before one of its model calls, as far as it tells how much is left.

    Attributes:
        turn: model calls that have ended.
        done: of the amount so far.
        last_results: how its tool calls ended, the newest last; the last few suffice.
        num_siblings: members of its group that have ended; ``sibling_mean``: of the amount that they had in all.
    """

    turn: int
    done: float
    last_results: tuple[ToolResult, ...] = ()
    num_siblings: int = 0
    sibling_mean: float = 0.0


def _turn_step(seen: Seen) -> int:
    """Turns one by one at first, then in half octaves."""
    turn = seen.turn
    if turn < 8:
        return turn
    octave = turn.bit_length()
    return 2 * octave + (turn >> (octave - 2) & 1)


def _done_step(seen: Seen) -> int:
    return _octaves(seen.done, 1.5)


def _sibling_step(seen: Seen) -> int:
    return _octaves(seen.sibling_mean, 1.5) if seen.num_siblings else -99


def _way_gone(seen: Seen) -> int:
    """How far the trajectory is on the way that its siblings went, in thirds of an octave; 99 without siblings."""
    if not seen.num_siblings or seen.sibling_mean <= 0.0:
        return 99
    if seen.done <= 0.0:
        return -99
    return max(-6, min(8, round(3.0 * (math.log2(seen.done) - math.log2(seen.sibling_mean)))))


def _octaves(value: float, parts: float) -> int:
    return round(parts * math.log2(value)) if value > 0.0 else -98


def _as_it_is(_: Seen) -> float:
    return 0.0


def _done_a_turn(seen: Seen) -> float:
    return math.log(seen.done) - math.log(seen.turn) if seen.turn and seen.done > 0.0 else 0.0


def _as_siblings(seen: Seen) -> float:
    return math.log(seen.sibling_mean) if seen.num_siblings and seen.sibling_mean > 0.0 else 0.0


class View:
    """One way to look at it: ``scale`` is a logarithm, ``keys`` go from general to specific."""

    def __init__(self, scale: Callable[[Seen], float], *keys: Callable[[Seen], Hashable]) -> None:
        self.scale = scale
        self.keys = keys

    def __call__(self, seen: Seen) -> tuple[Hashable, ...]:
        """The keys of a situation."""
        return tuple(key(seen) for key in self.keys)


BY_TURN = View(_as_it_is, _turn_step)

VIEWS = (
    BY_TURN,
    View(_as_it_is, lambda seen: _turn_step(seen) // 2, _done_step),
    View(_as_it_is, _turn_step, lambda seen: seen.last_results[-1:], lambda seen: seen.last_results[-_LAST_RESULTS:]),
    View(_done_a_turn, _turn_step, lambda seen: seen.last_results[-1:]),
    View(_as_siblings, lambda seen: seen.num_siblings > 0, _way_gone, lambda seen: min(4, seen.num_siblings)),
    View(_as_it_is, _turn_step, _sibling_step),
)
"""Turn index; own amount so far; last tool outcomes; own pace; siblings as a measure; siblings as a hint."""


class _Recent:
    """The last values of one key, in order of arrival and sorted."""

    __slots__ = ("arrived", "ordered")

    def __init__(self) -> None:
        self.arrived = deque[float]()
        self.ordered = list[float]()

    def note(self, value: float) -> None:
        self.arrived.append(value)
        bisect.insort(self.ordered, value)
        if len(self.arrived) > _WINDOW:
            del self.ordered[bisect.bisect_left(self.ordered, self.arrived.popleft())]

    def quantiles(self) -> Quantiles:
        """Of ``n`` values the k-th stands for the level ``k / (n + 1)``: so many of those to come lie below it."""
        values = self.ordered
        last = len(values) - 1
        found = list[float]()
        for level in LEVELS:
            place = min(float(last), max(0.0, (last + 2) * level - 1.0))
            below = int(place)
            rest = place - below
            found.append(values[below] + (rest * (values[below + 1] - values[below]) if rest else 0.0))
        return tuple(found)


_Place = tuple[int, tuple[Hashable, ...]]
"""A view's number, and keys down to some depth."""
_Situation = tuple[bool, int]


class RemainingAmount:
    """What is left of one amount.

    Args:
        views: the ways to look at it; one alone is that view.
        least: what is left is never taken to be less; above 0.
        max_keys: see :data:`MAX_KEYS`.
    """

    def __init__(self, views: Sequence[View] = VIEWS, least: float = 1.0, max_keys: int = MAX_KEYS) -> None:
        self._views = views
        self._least = least
        self._max_keys = max_keys
        self._recent: OrderedDict[_Place, _Recent] = OrderedDict()
        self._known: dict[_Place, Quantiles] = {}
        self._losses: dict[_Situation, list[tuple[float, float]]] = {}
        self._weights: dict[_Situation, tuple[tuple[int, float], ...]] = {}
        self._num_learnt = self._num_since = 0

    @property
    def num_keys(self) -> int:
        """Keys that something is kept for."""
        return len(self._recent)

    def quantiles(self, seen: Seen) -> Quantiles | None:
        """What is left, at :data:`LEVELS`; None before the first trajectory has ended."""
        if not self._num_learnt:
            return None
        weights = self._weights_in(seen)
        low = mid_low = mid = mid_high = high = 0.0
        for number, weight in weights:
            view = self._views[number]
            of_view = self._of_view(number, view(seen))
            scale = view.scale(seen)
            low += weight * (of_view[0] + scale)
            mid_low += weight * (of_view[1] + scale)
            mid += weight * (of_view[2] + scale)
            mid_high += weight * (of_view[3] + scale)
            high += weight * (of_view[4] + scale)
        exp = math.exp
        least = self._least
        logs = (low, mid_low, mid, mid_high, high)
        return tuple([max(least, exp(value)) for value in logs])

    def learn(self, points: Sequence[tuple[Seen, float]]) -> None:
        """A trajectory has ended: at each of these points, one a turn from the first on, so much was left."""
        chosen = [(seen, math.log(max(self._least, left))) for seen, left in points if _is_learnt(seen.turn)]
        if not chosen:
            return
        if self._num_learnt:
            for seen, left in chosen:
                self._judge(seen, left)
        for seen, left in chosen:
            for number, view in enumerate(self._views):
                keys, value = view(seen), left - view.scale(seen)
                for depth in range(len(keys) + 1):
                    self._note((number, keys[:depth]), value)
        self._num_learnt += len(chosen)
        self._num_since += len(chosen)
        if self._num_since > min(_RENEWED_AT_MOST, _RENEWED_FRAC * self._num_learnt):
            self._known.clear()
            self._weights.clear()
            self._num_since = 0

    def _note(self, place: _Place, value: float) -> None:
        recent = self._recent.get(place)
        if recent is None:
            recent = self._recent[place] = _Recent()
            if len(self._recent) > self._max_keys:
                forgotten, _ = self._recent.popitem(last=False)
                self._known.pop(forgotten, None)
        else:
            self._recent.move_to_end(place)
        recent.note(value)

    def _judge(self, seen: Seen, left: float) -> None:
        """What each view would have said, against the truth."""
        losses = self._losses.setdefault(_situation(seen), [(0.0, 0.0)] * len(self._views))
        for number, view in enumerate(self._views):
            scale = view.scale(seen)
            loss = pinball([value + scale for value in self._of_view(number, view(seen))], left)
            total, weight = losses[number]
            losses[number] = (total * _LOSS_DECAY + loss, weight * _LOSS_DECAY + 1.0)

    def _weights_in(self, seen: Seen) -> tuple[tuple[int, float], ...]:
        """The views that count in such a situation, and how much."""
        situation = _situation(seen)
        found = self._weights.get(situation)
        if found is None:
            losses = self._losses.get(situation, [(1.0, 1.0)] * len(self._views))
            means = [max(1e-9, total / weight) for total, weight in losses]
            best = min(means)
            raw = [(best / mean) ** _ZEAL for mean in means]
            kept = [(number, one) for number, one in enumerate(raw) if one >= _LEAST_WEIGHT]
            total = sum(one for _, one in kept)
            found = self._weights[situation] = tuple((number, one / total) for number, one in kept)
        return found

    def _of_view(self, number: int, keys: tuple[Hashable, ...]) -> Quantiles:
        place = (number, keys)
        found = self._known.get(place)
        if found is None:
            if len(self._known) >= _KNOWN_A_KEY * self._max_keys:
                self._known.clear()
            found = self._known[place] = self._backed_off(number, keys)
        return found

    def _backed_off(self, number: int, keys: tuple[Hashable, ...]) -> Quantiles:
        whole = self._recent.get((number, ()))
        blended = whole.quantiles() if whole is not None else (math.log(self._least),) * len(LEVELS)
        for depth in range(1, len(keys) + 1):
            recent = self._recent.get((number, keys[:depth]))
            if recent is None:
                break
            trust = len(recent.ordered) / (len(recent.ordered) + _SUPPORT)
            pairs = zip(recent.quantiles(), blended, strict=True)
            blended = tuple(trust * own + (1.0 - trust) * general for own, general in pairs)
        return blended


def _is_learnt(turn: int) -> bool:
    return turn < _DENSE_TURNS or turn % ((1 << turn.bit_length() - 1) // _TURNS_AN_OCTAVE) == 0


def _situation(seen: Seen) -> _Situation:
    """Views are weighed apart with and without siblings that have ended, and early and late."""
    return seen.num_siblings > 0, min(3, (seen.turn + 1).bit_length() // 2)


def pinball(quantiles: Sequence[float], value: float) -> float:
    """The mean quantile loss at :data:`LEVELS`, times 2: at the median alone it would be the absolute error.

    Koenker and Bassett, Econometrica 46, 1978.
    """
    total = 0.0
    for level, quantile in zip(LEVELS, quantiles, strict=True):
        miss = value - quantile
        total += max(level * miss, (level - 1.0) * miss)
    return 2.0 * total / len(LEVELS)


def points_of(
    trajectory: TrajectoryWork, sibling_totals: Sequence[float] = (), *, only_shorter: bool = False
) -> list[tuple[Seen, float]]:
    """What is known of a trajectory's sampled tokens before each of its calls, and how many are left.

    Args:
        sibling_totals: sampled tokens of the members of its group that have ended.
        only_shorter: those count as ended only that sampled no more than this one has already: all run side by side.
    """
    points, done = list[tuple[Seen, float]](), 0.0
    total = float(trajectory.generated_tokens)
    results = tuple(turn.result for turn in trajectory.turns)
    for index, turn in enumerate(trajectory.turns):
        ended = [one for one in sibling_totals if one <= done] if only_shorter else sibling_totals
        seen = Seen(
            turn=index,
            done=done,
            last_results=results[max(0, index - _LAST_RESULTS) : index],
            num_siblings=len(ended),
            sibling_mean=sum(ended) / len(ended) if ended else 0.0,
        )
        points.append((seen, total - done))
        done += turn.generated_tokens
    return points
