"""Replicas by the room that they have, so that a decision looks at few of them however many there are. Pure.

Replicas are *alike* that hold the same versions and KV of about the same size. Those that are alike stand in one list,
by the KV that is neither projected to be used nor kept for conversations between two calls, and by how far they are
trusted. A decision looks closely at the first few of each list that may serve it: whoever has room for the request is
among the first, and among so many the best hardly differs from the best of all. Keeping the lists costs O(log n)
comparisons a change.
"""

import bisect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from steelyard.inference.replica_state import ReplicaState
from steelyard.types import GenerateRequest

Kind = tuple[frozenset[int], int, bool]
"""Versions, size of the KV, and whether they drain."""

_Key = tuple[float, float, str]


@dataclass(eq=False, slots=True)
class Alike:
    """Live replicas that are alike. ``keys`` are sorted: the one with most room first."""

    kind: Kind
    keys: list[_Key] = field(default_factory=list)

    @property
    def is_draining(self) -> bool:
        """Whether they take only what no other may."""
        return self.kind[2]

    def can_sample(self, request: GenerateRequest) -> bool:
        """Whether they hold a version that may sample for ``request``."""
        return self.holds(request.policy_version, follows_updates=request.follows_updates)

    def holds(self, policy_version: int, *, follows_updates: bool) -> bool:
        """Whether they hold a version that may sample for attempts bound to ``policy_version``."""
        versions = self.kind[0]
        if follows_updates:
            return max(versions, default=-1) >= policy_version
        return policy_version in versions

    def ids(self) -> Iterator[str]:
        """All of them, the one with most room first."""
        return (key[2] for key in self.keys)


class ReplicaIndex:
    """The live replicas, sorted.

    Args:
        kept_tokens: KV that is kept on a replica for conversations between two calls.
    """

    def __init__(self, kept_tokens: Callable[[str], int]) -> None:
        self._kept_tokens = kept_tokens
        self._states: dict[str, ReplicaState] = {}
        self._alike: dict[Kind, Alike] = {}
        self._standing: dict[str, tuple[Kind, _Key]] = {}
        self._changed: dict[str, None] = {}

    @property
    def states(self) -> Mapping[str, ReplicaState]:
        """All replicas by id, dead ones included."""
        return self._states

    def add(self, state: ReplicaState) -> None:
        """A replica is there."""
        self._states[state.replica_id] = state
        state.watch(self.note)
        self.note(state.replica_id)

    def remove(self, replica_id: str) -> None:
        """A replica is gone."""
        del self._states[replica_id]
        self.note(replica_id)

    def note(self, replica_id: str) -> None:
        """Something about a replica has changed."""
        self._changed[replica_id] = None

    def settle(self) -> tuple[str, ...]:
        """Sort what has changed since this was last called; returns it."""
        if not self._changed:
            return ()
        changed = tuple(self._changed)
        self._changed.clear()
        for replica_id in changed:
            self._take_out(replica_id)
            state = self._states.get(replica_id)
            if state is not None and state.weight > 0.0:
                self._put_in(state)
        return changed

    def able(self, request: GenerateRequest, tried: Collection[str] = ()) -> list[Alike]:
        """Those that may sample a request; draining ones only where no other may: it was bound before the drain."""
        live = [alike for alike in self._alike.values() if alike.can_sample(request) and _has_other_than(alike, tried)]
        return [alike for alike in live if not alike.is_draining] or live

    def takes_new(self, policy_version: int, *, follows_updates: bool, but: str) -> bool:
        """Whether another replica than ``but`` may sample for attempts bound to a version, and goes on to."""
        return any(
            not alike.is_draining
            and alike.holds(policy_version, follows_updates=follows_updates)
            and _has_other_than(alike, (but,))
            for alike in self._alike.values()
        )

    def kind(self, replica_id: str) -> Kind | None:
        """What a replica is alike with; None where it is dead."""
        standing = self._standing.get(replica_id)
        return None if standing is None else standing[0]

    def first_of(self, able: Iterable[Alike], number: int, is_out: Callable[[str], bool]) -> list[ReplicaState]:
        """The first ``number`` of each that are not out."""
        found = list[ReplicaState]()
        for alike in able:
            left = number
            for key in alike.keys:
                if not is_out(key[2]):
                    found.append(self._states[key[2]])
                    left -= 1
                    if not left:
                        break
        return found

    def _put_in(self, state: ReplicaState) -> None:
        size = -1 if state.capacity_tokens is None else state.capacity_tokens.bit_length()
        kind = (frozenset(state.versions), size, state.is_draining)
        key = (-self._free_tokens(state) * state.weight, state.projected_tokens / state.weight, state.replica_id)
        alike = self._alike.get(kind)
        if alike is None:
            alike = self._alike[kind] = Alike(kind)
        bisect.insort(alike.keys, key)
        self._standing[state.replica_id] = kind, key

    def _take_out(self, replica_id: str) -> None:
        standing = self._standing.pop(replica_id, None)
        if standing is None:
            return
        kind, key = standing
        keys = self._alike[kind].keys
        del keys[bisect.bisect_left(keys, key)]
        if not keys:
            del self._alike[kind]

    def _free_tokens(self, state: ReplicaState) -> float:
        """What is neither used nor kept; an idle one takes any request, whatever it keeps."""
        if state.capacity_tokens is None:
            return float("inf")
        if not state.num_open:
            return state.capacity_tokens
        return state.capacity_tokens - state.projected_tokens - self._kept_tokens(state.replica_id)


def _has_other_than(alike: Alike, ids: Collection[str]) -> bool:
    return len(alike.keys) > len(ids) or any(one not in ids for one in alike.ids())
