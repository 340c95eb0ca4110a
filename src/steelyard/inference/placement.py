"""Where a request goes: pure decisions over what is known of the replicas.

- A replica takes a request only where its KV is projected to fit (:func:`has_room`); else the request waits.
- A conversation goes back to the replica that holds its KV, unless another is projected to be done sooner though it
  computes the whole prompt (:func:`choose`). That is asked at each of its calls, that is when its tools have returned.
- A new conversation goes where the fewest projected tokens are open for the replica's speed.
- KV that a conversation left behind is kept free for it for as long as computing it again would cost more than it
  costs others to wait (:func:`keep_s`).
"""

from collections.abc import Sequence

from steelyard.types.record import Record

MOVE_GAIN = 1.1
"""A move must be projected to be better by this factor: projections are noisy, and a move gives up what is certain."""


class Candidate(Record, frozen=True, kw_only=True):
    """A live replica that may sample the request.

    ``has_room``: whether its KV fits there now, see :func:`has_room`; where it does not, it would after ``room_in_s``
    seconds. ``projected_tokens``: KV that its open requests are projected to need. ``prefill_s``: seconds to compute
    what it lacks of the prompt. ``token_s``: seconds a sampled token would take with this request open too. ``weight``:
    trust, above 0, at most 1.
    """

    replica_id: str
    weight: float
    has_room: bool
    projected_tokens: int
    prefill_s: float
    token_s: float
    room_in_s: float = 0.0


class Need(Record, frozen=True, kw_only=True):
    """What a request is projected to need: KV for all of its tokens, and the time of those that it samples."""

    kv_tokens: int
    output_tokens: int


def has_room(
    need: Need, *, capacity_tokens: int | None, projected_tokens: int, kept_tokens: int, num_open: int
) -> bool:
    """Whether a request's KV fits beside what is projected. An idle replica takes any: it has no more room later.

    Args:
        capacity_tokens: None where the replica does not say; it takes all.
        kept_tokens: KV that is kept free for conversations between two calls, without the one that asks.
    """
    if capacity_tokens is None or num_open == 0:
        return True
    return projected_tokens + kept_tokens + need.kv_tokens <= capacity_tokens


def choose(need: Need, home_id: str | None, candidates: Sequence[Candidate]) -> Candidate | None:
    """The replica that takes the request now; None where it is to wait.

    Args:
        home_id: the replica that served the conversation before.
        candidates: all live replicas that may sample it, in any order.
    """
    home = next((one for one in candidates if one.replica_id == home_id), None)
    others = [one for one in candidates if one.has_room and one is not home]
    if home is None:
        return min(others, key=lambda one: (_load(need, one), one.replica_id), default=None)
    best = min(others, key=lambda one: (done_in_s(need, one), one.replica_id), default=None)
    if best is not None and pays(done_in_s(need, best), done_in_s(need, home)):
        return best
    return home if home.has_room else None


def pays(elsewhere_s: float, at_home_s: float) -> bool:
    """Whether a move is worth it, by the seconds until the request would be answered."""
    return elsewhere_s * MOVE_GAIN < at_home_s


def done_in_s(need: Need, one: Candidate) -> float:
    """Seconds until a replica would have answered, more where it is trusted less."""
    wait_s = 0.0 if one.has_room else one.room_in_s
    return (wait_s + one.prefill_s + need.output_tokens * one.token_s) / one.weight


def keep_s(reprefill_s: float, num_open: int) -> float:
    """How long to keep KV free for a conversation that is with its tools, in seconds since its last call.

    Giving it up costs ``reprefill_s`` of the replica's time, for which each of its ``num_open`` requests stands still;
    keeping it makes one request wait. Keeping it until that has cost as much as giving it up costs at most twice what
    one who knew the length of the pause would pay (ski rental; Karlin et al., Algorithmica 3, 1988).
    """
    return reprefill_s * max(1, num_open)


def _load(need: Need, one: Candidate) -> float:
    """All that would be open there, by how slow the replica is and how far it is trusted."""
    return (one.projected_tokens + need.kv_tokens) * one.token_s / one.weight
