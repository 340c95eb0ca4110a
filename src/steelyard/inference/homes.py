"""Which replica served which conversation last, and how much KV it left there. Pure."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from steelyard.inference.kept_kv import KeptKv
from steelyard.types import GenerateRequest

_MAX_HOMES = 1 << 18


@dataclass(slots=True)
class Home:
    """Where a conversation was served last.

    ``kept_tokens``: KV that its last call left there. ``idle_since_s``: when that call ended; None while one is open.
    """

    attempt_id: str
    replica_id: str
    policy_version: int
    follows_updates: bool
    kept_tokens: int = 0
    idle_since_s: float | None = None


class Homes:
    """Homes by sequence key. A new sequence of a known attempt starts where the attempt was served last.

    Args:
        on_kept: called with a replica's id where what is kept there for conversations between two calls has changed.
    """

    def __init__(self, on_kept: Callable[[str], None]) -> None:
        self._on_kept = on_kept
        self._by_sequence: dict[str, Home] = {}
        self._by_attempt: dict[str, dict[str, Home]] = {}
        self._by_replica: dict[str, dict[str, Home]] = {}
        self._kept: dict[str, KeptKv] = {}

    def __len__(self) -> int:
        return len(self._by_sequence)

    def of(self, request: GenerateRequest) -> Home | None:
        """Where the request's conversation was served before, else its attempt."""
        home = self._by_sequence.get(request.sequence_key)
        if home is not None:
            return home
        others = self._by_attempt.get(request.attempt_id)
        return None if not others else others[next(reversed(others))]

    def of_attempt(self, attempt_id: str) -> str | None:
        """The replica that an attempt was served on last."""
        sequences = self._by_attempt.get(attempt_id)
        return None if not sequences else sequences[next(reversed(sequences))].replica_id

    def own(self, request: GenerateRequest, replica_id: str) -> Home | None:
        """The home of the request's own conversation, where it is on that replica."""
        home = self._by_sequence.get(request.sequence_key)
        return home if home is not None and home.replica_id == replica_id else None

    def start(self, request: GenerateRequest, replica_id: str) -> None:
        """The request is served there now; what it left elsewhere counts no more."""
        own = self.own(request, replica_id)
        kept = own.kept_tokens if own is not None else 0
        self._forget(request.sequence_key)
        if len(self._by_sequence) >= _MAX_HOMES:
            # Somebody does not release attempts. A conversation that is forgotten is served all the same.
            self._forget(next(iter(self._by_sequence)))
        home = Home(request.attempt_id, replica_id, request.policy_version, request.follows_updates)
        home.kept_tokens = kept
        self._by_sequence[request.sequence_key] = home
        self._by_attempt.setdefault(request.attempt_id, {})[request.sequence_key] = home
        self._by_replica.setdefault(replica_id, {})[request.sequence_key] = home

    def end(self, request: GenerateRequest, replica_id: str, kept_tokens: int, now_s: float) -> None:
        """The request's call has ended on a replica and left so much KV; the attempt may be released meanwhile."""
        home = self._by_sequence.get(request.sequence_key)
        if home is not None and home.replica_id != replica_id and kept_tokens:
            self.start(request, replica_id)
            home = self._by_sequence[request.sequence_key]
        if home is not None and home.replica_id == replica_id and home.idle_since_s is None:
            home.kept_tokens, home.idle_since_s = kept_tokens, now_s
            self.kept_on(home.replica_id).add(request.sequence_key, kept_tokens, now_s)
            self._on_kept(home.replica_id)

    def release(self, attempt_id: str) -> tuple[str, ...]:
        """Forget an attempt; the replicas that it was served on last."""
        sequences = self._by_attempt.get(attempt_id, {})
        replicas = {home.replica_id: None for home in sequences.values()}
        for sequence_key in tuple(sequences):
            self._forget(sequence_key)
        return tuple(replicas)

    def drop_replica(self, replica_id: str) -> None:
        """A replica has lost its KV: whoever was there starts anew elsewhere."""
        for sequence_key in tuple(self._by_replica.get(replica_id, {})):
            self._forget(sequence_key)
        self._kept.pop(replica_id, None)

    def at(self, replica_id: str) -> Iterator[Home]:
        """All homes on a replica."""
        return iter(self._by_replica.get(replica_id, {}).values())

    def kept_tokens(self, replica_id: str) -> int:
        """KV of all conversations that are between two calls there."""
        kept = self._kept.get(replica_id)
        return 0 if kept is None else kept.total

    def kept_on(self, replica_id: str) -> KeptKv:
        """KV of the conversations that are between two calls there, by sequence key. Only read it."""
        kept = self._kept.get(replica_id)
        if kept is None:
            kept = self._kept[replica_id] = KeptKv()
        return kept

    def _forget(self, sequence_key: str) -> None:
        home = self._by_sequence.pop(sequence_key, None)
        if home is None:
            return
        for index, name in ((self._by_attempt, home.attempt_id), (self._by_replica, home.replica_id)):
            index[name].pop(sequence_key)
            if not index[name]:
                del index[name]
        if home.idle_since_s is not None:
            self._kept[home.replica_id].remove(sequence_key)
            self._on_kept(home.replica_id)
