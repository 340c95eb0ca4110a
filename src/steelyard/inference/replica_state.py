"""What the router knows of one replica. No I/O."""

from collections.abc import Callable
from dataclasses import dataclass

from steelyard.inference.projection import Pace
from steelyard.types import GenerateRequest

_MIN_WEIGHT = 0.125


@dataclass(frozen=True, slots=True)
class Reservation:
    """KV set aside for an open request, until when it is projected to be needed, and how many were open before it."""

    kv_tokens: int
    ends_at_s: float
    num_open_before: int


class ReplicaState:
    """Health, versions and reservations of one replica.

    Failures halve its ``weight``, down to zero: a replica that fails fast looks idle and would otherwise draw nearly
    all requests. Success, also of a probe, doubles it.

    Args:
        fleet: the pace of all replicas together.
        on_change: called when requests may fit, or be served, that did not or were not before.

    ``awaited_versions``: what the replica held that was here before it under this name, and it has not loaded yet.
    """

    def __init__(self, replica_id: str, fleet: Pace, on_change: Callable[[], None]) -> None:
        self.replica_id = replica_id
        self.weight = 1.0
        self.versions: set[int] = set()
        self.awaited_versions: set[int] = set()
        self.is_draining = False
        self.capacity_tokens: int | None = None
        self.projected_tokens = 0
        self._watcher: Callable[[str], None] = _nobody
        self.last_error = ""
        self.pace = Pace(fleet)
        self._open: dict[str, Reservation] = {}
        self._on_change = on_change

    def watch(self, watcher: Callable[[str], None]) -> None:
        """Have ``watcher`` called with the replica's id at every change, before ``on_change``."""
        self._watcher = watcher

    @property
    def num_open(self) -> int:
        """Requests that are open here."""
        return len(self._open)

    def serves(self, request_id: str) -> bool:
        """Whether a request is open here."""
        return request_id in self._open

    def can_sample(self, request: GenerateRequest) -> bool:
        """Whether a version is held that may sample for ``request``."""
        return self.holds(request.policy_version, follows_updates=request.follows_updates)

    def holds(self, policy_version: int, *, follows_updates: bool) -> bool:
        """Whether a version is held that may sample for attempts bound to ``policy_version``."""
        return _may_sample(self.versions, policy_version, follows_updates=follows_updates)

    def may_come_to_sample(self, request: GenerateRequest) -> bool:
        """Whether a version is held, or is likely to be loaded again, that may sample for ``request``."""
        known = self.versions | self.awaited_versions
        return _may_sample(known, request.policy_version, follows_updates=request.follows_updates)

    def failed(self, error: str) -> None:
        """Half the weight; zero once it is small."""
        self.last_error = error
        halved = self.weight / 2
        self.weight = halved if halved >= _MIN_WEIGHT else 0.0
        self._note_change()

    def worked(self) -> None:
        """Twice the weight, up to 1; a replica at zero starts again at the least weight."""
        if self.weight < 1.0:
            self.weight = min(1.0, max(_MIN_WEIGHT, self.weight * 2))
            self._note_change()

    def now_holds(self, versions: set[int]) -> None:
        """The versions that it serves."""
        self.versions = versions
        self.awaited_versions = self.awaited_versions - versions
        self._note_change()

    def now_fits(self, capacity_tokens: int | None) -> None:
        """KV tokens that it has room for; None where it does not say."""
        self.capacity_tokens = capacity_tokens
        self._note_change()

    def now_drains(self, is_draining: bool) -> None:
        """Whether new attempts are to go elsewhere."""
        self.is_draining = is_draining
        self._note_change()

    def reserve(self, request_id: str, kv_tokens: int, ends_at_s: float) -> None:
        """Set KV aside for a request that goes here now."""
        self._open[request_id] = Reservation(kv_tokens, ends_at_s, len(self._open))
        self.projected_tokens += kv_tokens
        self._watcher(self.replica_id)

    def free(self, request_id: str) -> float:
        """The request has ended; how many were open beside it and with it, on the mean of begin and end."""
        num_open = len(self._open)
        reservation = self._open.pop(request_id)
        self.projected_tokens -= reservation.kv_tokens
        self._watcher(self.replica_id)
        return (reservation.num_open_before + 1 + num_open) / 2

    def room_in_s(self, kv_tokens: int, kept_tokens: int, now_s: float) -> float:
        """Seconds until so much KV is projected to be free, by the ends of the requests that are open now."""
        if self.capacity_tokens is None:
            return 0.0
        used = self.projected_tokens + kept_tokens
        for reservation in sorted(self._open.values(), key=lambda one: one.ends_at_s):
            if used + kv_tokens <= self.capacity_tokens:
                return 0.0
            used -= reservation.kv_tokens
            if used + kv_tokens <= self.capacity_tokens:
                return max(0.0, reservation.ends_at_s - now_s)
        return max((one.ends_at_s - now_s for one in self._open.values()), default=0.0)

    def describe(self) -> str:
        """For messages that say why nobody serves a request."""
        error = f", last error: {self.last_error}" if self.last_error else ""
        return f"{self.replica_id} has weight {self.weight} and versions {sorted(self.versions)}{error}"

    def _note_change(self) -> None:
        self._watcher(self.replica_id)
        self._on_change()


def _may_sample(versions: set[int], policy_version: int, *, follows_updates: bool) -> bool:
    if follows_updates:
        return any(version >= policy_version for version in versions)
    return policy_version in versions


def _nobody(_replica_id: str) -> None:
    """Nobody watches."""
