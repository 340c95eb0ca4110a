"""How fast an engine was in a run, from the model calls that were timed there.

A call of ``n`` sampled tokens lives through ``n`` steps of its replica. While it does, ``m`` calls are open there on
average, and prompts of ``p`` tokens are computed. So it takes about::

    call_s + n * step_s + n * m * sequence_s + p * prompt_token_s

which is linear in the four times. They are found by least squares over the calls' relative errors, none below 0: the
least of them is held at 0 and the rest found again until none is (Lawson and Hanson, Solving Least Squares Problems,
1974, chapter 23, from the other side).
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from steelyard.errors import InputError
from steelyard.types.record import Record

_MOST_CALLS = 20_000
_LEAST_S = 1e-4
"""Calls below it say nothing that clocks can tell."""

Numbers = npt.NDArray[np.float64]


class ObservedTurn(Record, frozen=True, kw_only=True):
    """One model call as the gateway timed it, in seconds since the Unix epoch.

    ``joined_tokens`` of its prompt are new in its context; ``computed_tokens`` were not in any cache.
    """

    replica_id: str
    started_at_s: float
    ended_at_s: float
    joined_tokens: int
    computed_tokens: int
    sampled_tokens: int


class EngineSpeed(Record, frozen=True, kw_only=True):
    """What a step of a replica takes: ``step_s`` by itself, ``sequence_s`` more for each sequence that decodes in it,
    ``prompt_token_s`` for each token of a prompt; and ``call_s`` for a call on its way. ``error_frac``: median relative
    error over the calls."""

    step_s: float
    sequence_s: float
    prompt_token_s: float
    call_s: float
    error_frac: float


def fit_engine(turns: Sequence[ObservedTurn]) -> EngineSpeed:
    """The times that fit the calls best.

    Raises:
        InputError: there are fewer than 8 calls to learn from.
    """
    rows, took_s = list[Numbers](), list[Numbers]()
    for replica_id in sorted({turn.replica_id for turn in turns}):
        calls, seconds = _features([turn for turn in turns if turn.replica_id == replica_id])
        rows.append(calls)
        took_s.append(seconds)
    features, seconds = np.concatenate(rows), np.concatenate(took_s)
    usable = seconds >= _LEAST_S
    features, seconds = features[usable], seconds[usable]
    if len(seconds) < 8:
        raise InputError(f"a run must have at least 8 model calls to learn its speed from, got {len(seconds)}")
    stride = -(-len(seconds) // _MOST_CALLS)
    features, seconds = features[::stride], seconds[::stride]
    found = _not_negative(features / seconds[:, None], np.ones(len(seconds)))
    # Relative errors are smallest for times that are too short; in sum the calls must take what they took.
    found *= seconds.sum() / (features @ found).sum()
    error = float(np.median(np.abs(features @ found / seconds - 1.0)))
    step_s, sequence_s, prompt_token_s, call_s = (float(value) for value in found)
    return EngineSpeed(
        step_s=step_s, sequence_s=sequence_s, prompt_token_s=prompt_token_s, call_s=call_s, error_frac=error
    )


def predicted_calls_s(turns: Sequence[ObservedTurn], speed: EngineSpeed) -> list[float]:
    """Seconds that each call takes at a speed, with the calls around it as they were; in the order of ``turns``."""
    times = np.array([speed.step_s, speed.sequence_s, speed.prompt_token_s, speed.call_s])
    predicted = np.zeros(len(turns))
    for replica_id in {turn.replica_id for turn in turns}:
        places = [place for place, turn in enumerate(turns) if turn.replica_id == replica_id]
        features, _ = _features([turns[place] for place in places])
        predicted[places] = features @ times
    return [float(value) for value in predicted]


def _features(turns: Sequence[ObservedTurn]) -> tuple[Numbers, Numbers]:
    """Of the calls of one replica: steps, steps times open calls, tokens of prompts meanwhile, 1; and their seconds."""
    zero_s = min(turn.started_at_s for turn in turns)
    begun = np.array([turn.started_at_s - zero_s for turn in turns])
    ended = np.array([turn.ended_at_s - zero_s for turn in turns])
    sampled = np.array([turn.sampled_tokens for turn in turns], dtype=np.float64)
    computed = np.array([turn.computed_tokens for turn in turns], dtype=np.float64)
    seconds = np.maximum(ended - begun, 0.0)
    open_s = _open_s(begun, ended, ended) - _open_s(begun, ended, begun)
    mean_open = np.maximum(1.0, open_s / np.maximum(seconds, _LEAST_S))
    order = np.argsort(begun)
    sums = np.concatenate([[0.0], np.cumsum(computed[order])])
    after = np.searchsorted(begun[order], ended, side="right")
    before = np.searchsorted(begun[order], begun, side="left")
    prompts = sums[after] - sums[before]
    return np.stack([sampled, sampled * mean_open, prompts, np.ones(len(turns))], axis=1), seconds


def _open_s(begun: Numbers, ended: Numbers, at: Numbers) -> Numbers:
    """Seconds, over all calls, for which they were open up to each moment."""
    total = np.zeros(len(at))
    for edges, sign in ((np.sort(begun), 1.0), (np.sort(ended), -1.0)):
        sums = np.concatenate([[0.0], np.cumsum(edges)])
        number = np.searchsorted(edges, at, side="right")
        total += sign * (number * at - sums[number])
    return total


def _not_negative(features: Numbers, wanted: Numbers) -> Numbers:
    active = list(range(features.shape[1]))
    while active:
        solved = np.linalg.lstsq(features[:, active], wanted, rcond=None)[0]
        if solved.min() >= 0.0:
            found = np.zeros(features.shape[1])
            found[active] = solved
            return found
        del active[int(solved.argmin())]
    return np.zeros(features.shape[1])
