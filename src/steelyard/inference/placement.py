"""Where a request goes: pure decisions over what is known of the replicas.

- A replica takes a request only where its KV is projected to fit (:func:`fits`); else the request waits.
- A conversation goes back to the replica that holds its KV, unless another is projected to be done sooner though it
  computes the whole prompt (:func:`choose`). That is asked at each of its calls, that is when its tools have returned.
- A new conversation goes where the fewest projected tokens are open for the replica's speed.
- KV that a conversation left behind is kept free for it for as long as computing it again would cost more than it
  costs others to wait (:func:`keep_s`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

MOVE_GAIN = 1.1
"""A move must be projected to be better by this factor: projections are noisy, and a move gives up what is certain."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A live replica that may sample the request.

    ``capacity_tokens`` None: it does not say how much KV it has, and takes all. ``projected_tokens``: KV that its open
    requests are projected to need. ``kept_tokens``: KV of conversations between two calls that is kept free for them,
    without the one that asks. ``prefill_s``: seconds to compute what it lacks of the prompt. ``token_s``: seconds a
    sampled token would take with this request open too. ``room_in_s``: seconds until the request would fit, where it
    does not now. ``weight``: trust, above 0, at most 1. ``is_closed``: the next room is for somebody who came before.
    """

    replica_id: str
    weight: float
    capacity_tokens: int | None
    projected_tokens: int
    kept_tokens: int
    num_open: int
    prefill_s: float
    token_s: float
    room_in_s: float = 0.0
    is_closed: bool = False


@dataclass(frozen=True, slots=True)
class Need:
    """What a request is projected to need: KV for all of its tokens, and the time of those that it samples."""

    kv_tokens: int
    output_tokens: int


def fits(need: Need, candidate: Candidate) -> bool:
    """Whether the request's KV fits beside what is projected. An idle replica takes any: it has no more room later."""
    if candidate.is_closed:
        return False
    if candidate.capacity_tokens is None or candidate.num_open == 0:
        return True
    used = candidate.projected_tokens + candidate.kept_tokens
    return used + need.kv_tokens <= candidate.capacity_tokens


def choose(need: Need, home_id: str | None, candidates: Sequence[Candidate]) -> Candidate | None:
    """The replica that takes the request now; None where it is to wait.

    Args:
        home_id: the replica that served the conversation before.
        candidates: all live replicas that may sample it, in any order.
    """
    home = next((one for one in candidates if one.replica_id == home_id), None)
    fitting = [one for one in candidates if fits(need, one)]
    if home is None:
        return min(fitting, key=lambda one: (_load(need, one), one.replica_id), default=None)
    others = [one for one in fitting if one is not home]
    best = min(others, key=lambda one: (_done_in_s(need, one), one.replica_id), default=None)
    if best is not None and _done_in_s(need, best) * MOVE_GAIN < _done_in_s(need, home):
        return best
    return home if fits(need, home) else None


def keep_s(reprefill_s: float, num_open: int) -> float:
    """How long to keep KV free for a conversation that is with its tools, in seconds since its last call.

    Giving it up costs ``reprefill_s`` of the replica's time, for which each of its ``num_open`` requests stands still;
    keeping it makes one request wait. Keeping it until that has cost as much as giving it up costs at most twice what
    one who knew the length of the pause would pay (ski rental; Karlin et al., Algorithmica 3, 1988).
    """
    return reprefill_s * max(1, num_open)


def _done_in_s(need: Need, one: Candidate) -> float:
    wait_s = 0.0 if fits(need, one) else one.room_in_s
    return (wait_s + one.prefill_s + need.output_tokens * one.token_s) / one.weight


def _load(need: Need, one: Candidate) -> float:
    """All that would be open there, by how slow the replica is and how far it is trusted."""
    return (one.projected_tokens + need.kv_tokens) * one.token_s / one.weight
