"""How conversations grow and end, and how much space they will need together. Pure bookkeeping.

Conversations that begin together are long together: then as many fit as if each were at its longest all the time. Where
they are at all stages, their mean length decides, and about twice as many fit. So those that begin are spread out: one
is admitted if at every turn ahead there is space for all that are here, and for others that keep coming at the rate
that can be kept up.

With ``S(k)`` the share of conversations that reach their turn ``k`` and ``m(k)`` their length there, one takes
``A = sum of S(k) m(k)`` tokens times turns, and ``capacity / A`` of them may begin in each turn (Little's law). ``S``
is the product of the shares that go on after each turn (Kaplan and Meier, 1958): those that are still open count for
the turns that they have reached.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt

_MAX_ATTEMPTS = 10_000

# Turns that are looked ahead. Turns beyond are taken to end conversations as often as this one.
_HORIZON = 64
# Of so many conversations the length is remembered, about.
_WINDOW = 512
# Before anything is known, conversations go on for nine more turns on the mean. That counts as much as two of them.
_PRIOR_END_FRAC, _PRIOR_WEIGHT = 0.1, 2.0


@dataclass(frozen=True, slots=True)
class Member:
    """A conversation that has space: which turn it is in, from 1, and its tokens, projected to the end of that turn."""

    turn: int
    num_tokens: int


Growth = Callable[[Sequence[Member]], int]
"""Tokens that members, the last of whom comes anew, will need beyond what they are projected to have."""


class RunningMean:
    """Mean of about the last ``_WINDOW`` values."""

    def __init__(self) -> None:
        self._value = 0.0
        self._num = 0

    def note(self, value: float) -> None:
        """One more value."""
        self._num = min(self._num + 1, _WINDOW)
        self._value += (value - self._value) / self._num

    def value(self, default: float) -> float:
        """The mean; ``default`` before there is a value."""
        return self._value if self._num else default


class GrowthForecast:
    """Projects the space that conversations will need together, at the turn ahead at which they need most."""

    def __init__(self) -> None:
        self._num_ended = np.zeros(_HORIZON)
        self._num_went_on = np.zeros(_HORIZON)
        self._first_tokens = RunningMean()
        self._turn_tokens = RunningMean()

    def note_first(self, num_tokens: int) -> None:
        """The first turn of a conversation has ended at so many tokens."""
        self._first_tokens.note(num_tokens)

    def note_growth(self, num_tokens: int) -> None:
        """A later turn has ended, and the conversation is longer by so many tokens than after the turn before."""
        self._turn_tokens.note(num_tokens)

    def note_went_on(self, turn: int) -> None:
        """A conversation has come back after its turn ``turn``, from 1."""
        self._num_went_on[min(turn, _HORIZON) - 1] += 1

    def note_ended(self, turn: int) -> None:
        """A conversation has ended after its turn ``turn``, from 1."""
        self._num_ended *= 1.0 - 1.0 / _WINDOW
        self._num_went_on *= 1.0 - 1.0 / _WINDOW
        self._num_ended[min(turn, _HORIZON) - 1] += 1

    def growth_tokens(
        self, members: Sequence[Member], *, num_waiting: int, capacity_tokens: int, longest_tokens: int
    ) -> int:
        """How many tokens more than now will be needed at some turn ahead, at most; at least 0.

        Args:
            members: who has space, and last the one that asks for it.
            num_waiting: how many others wait to begin. As many come as wait, and one for each that ends, but not more
                than can be kept up.
            capacity_tokens: space for all.
            longest_tokens: no conversation gets longer.
        """
        ahead = np.arange(_HORIZON)
        turns = np.array([min(member.turn, _HORIZON) for member in members])[:, None]
        now = np.array([member.num_tokens for member in members], np.float64)[:, None]
        turn_tokens = max(0.0, self._turn_tokens.value(members[-1].num_tokens))
        reached = self._share_that_reaches()
        go_on = reached[turns - 1 + ahead] / reached[turns - 1]
        # One that is longer than any may get stays as it is.
        needed = (go_on * np.minimum(now + turn_tokens * ahead, np.maximum(now, longest_tokens))).sum(axis=0)
        first_tokens = self._first_tokens.value(members[-1].num_tokens)
        one = reached[:_HORIZON] * np.minimum(first_tokens + turn_tokens * ahead, longest_tokens)
        # The one that asks is the first of those that keep coming.
        num_kept_up = np.maximum(0.0, ahead * (capacity_tokens / one.sum()) - 1.0)
        num_begun = np.minimum(num_kept_up, num_waiting + len(members) - go_on.sum(axis=0))
        needed += np.convolve(np.diff(num_begun, prepend=0.0), one)[:_HORIZON]
        # What is needed when it will probably have ended does not speak against it.
        is_there = go_on[-1] >= 0.5
        return max(0, int(needed[is_there].max() - now.sum()))

    def _share_that_reaches(self) -> npt.NDArray[np.float64]:
        """By turn less 1: the share of all conversations that reach it; 1 for the first."""
        num_known = self._num_ended + self._num_went_on
        end_frac = (self._num_ended + _PRIOR_WEIGHT * _PRIOR_END_FRAC) / (num_known + _PRIOR_WEIGHT)
        go_on = np.concatenate((1.0 - end_frac, np.full(_HORIZON - 1, 1.0 - end_frac[-1])))
        return np.concatenate(([1.0], np.cumprod(go_on)))


@dataclass(slots=True)
class _Conversation:
    turn: int = 0
    num_tokens: int = 0


@dataclass(slots=True)
class _Attempt:
    rank: int
    conversations: dict[str, _Conversation] = field(default_factory=dict)


class Conversations:
    """Open attempts, in the order in which they came, and which turn each of their conversations is in.

    Some attempts are never released: the oldest of too many is forgotten, and taken for a new one if it comes back.
    """

    def __init__(self) -> None:
        self._forecast = GrowthForecast()
        self._attempts: dict[str, _Attempt] = {}
        self._next_rank = 0

    def growth(self, num_waiting: int, capacity_tokens: int, longest_tokens: int) -> Growth:
        """What members will need by what is known now; see :meth:`GrowthForecast.growth_tokens`."""
        return partial(
            self._forecast.growth_tokens,
            num_waiting=num_waiting,
            capacity_tokens=capacity_tokens,
            longest_tokens=longest_tokens,
        )

    def begin_turn(self, attempt_id: str, sequence_key: str) -> tuple[int, int]:
        """A request has come: rank of its attempt, the lower the older, and the turn of its conversation, from 1."""
        attempt = self._attempts.get(attempt_id)
        if attempt is None:
            if len(self._attempts) >= _MAX_ATTEMPTS:
                del self._attempts[next(iter(self._attempts))]
            self._next_rank += 1
            attempt = self._attempts[attempt_id] = _Attempt(self._next_rank)
        one = attempt.conversations.setdefault(sequence_key, _Conversation())
        if one.turn:
            self._forecast.note_went_on(one.turn)
        one.turn += 1
        return attempt.rank, one.turn

    def end_turn(self, attempt_id: str, sequence_key: str, num_tokens: int) -> None:
        """A request was answered: how long its conversation is now. Ignored where the attempt was released."""
        attempt = self._attempts.get(attempt_id)
        if attempt is None or sequence_key not in attempt.conversations:
            return
        one = attempt.conversations[sequence_key]
        if one.num_tokens:
            self._forecast.note_growth(num_tokens - one.num_tokens)
        else:
            self._forecast.note_first(num_tokens)
        one.num_tokens = num_tokens

    def release(self, attempt_id: str) -> None:
        """An attempt has ended, and its conversations with it."""
        attempt = self._attempts.pop(attempt_id, None)
        if attempt is not None:
            for one in attempt.conversations.values():
                self._forecast.note_ended(one.turn)
