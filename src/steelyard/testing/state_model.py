"""An independent model of the state machine, for tests, written from DESIGN section 3 as plain dictionaries.

It imports nothing of the coordinator: a mistake in the real tables cannot be repeated here by reading them.
"""

from collections import Counter
from dataclasses import dataclass, field

MOVES = {
    "lease": {"PENDING": "LEASED"},
    "run": {"LEASED": "RUNNING"},
    "seal": {"RUNNING": "ARTIFACT_READY"},
    "score": {"ARTIFACT_READY": "SCORED"},
    "grader_failed": {"ARTIFACT_READY": "ARTIFACT_READY"},
    "accept": {"SCORED": "ACCEPTED"},
    "reject": {"SCORED": "REJECTED"},
    "fail": {"LEASED": "INFRA_FAILED", "RUNNING": "INFRA_FAILED", "ARTIFACT_READY": "INFRA_FAILED"},
    "expire": {"LEASED": "INFRA_FAILED", "RUNNING": "INFRA_FAILED"},
    "retry": {"INFRA_FAILED": "PENDING"},
    "cancel": dict.fromkeys(["PENDING", "LEASED", "RUNNING", "ARTIFACT_READY", "INFRA_FAILED"], "CANCELLED"),
}
WITH_A_WORKER = {"LEASED", "RUNNING"}
ENDED = {"ACCEPTED", "REJECTED", "CANCELLED", "CONSUMED"}
GROUP_MOVES = {
    "complete": {"OPEN": "COMPLETE"},
    "evaluate": {"OPEN": "EVALUATED"},
    "drop": {"OPEN": "DROPPED", "COMPLETE": "DROPPED", "PARKED": "DROPPED"},
    "park": {"OPEN": "PARKED", "COMPLETE": "PARKED"},
    "restart": {"OPEN": "OPEN", "COMPLETE": "OPEN", "PARKED": "OPEN"},
    "begin": {"COMPLETE": "CONSUMED"},
}
FOR_TRAINING = {"complete", "park", "restart", "begin"}
FOR_EVALUATION = {"evaluate"}
NOBODY = "nobody"
"""An id that was never given out."""


@dataclass
class Member:
    """A rollout in the model. ``held`` is the number of tokens that its newest attempt samples."""

    group: str
    state: str = "PENDING"
    attempt: str | None = None
    number: int = 0
    version: int = 0
    held: int = 0
    is_sealed: bool = False
    failures: int = 0
    tokens: int = 0


@dataclass
class Bundle:
    """A group in the model."""

    is_train: bool
    members: list[str]
    state: str = "OPEN"


@dataclass
class Model:
    """Everything that must stand."""

    members: dict[str, Member] = field(default_factory=dict)
    groups: dict[str, Bundle] = field(default_factory=dict)
    known: dict[str, str] = field(default_factory=dict)
    over: dict[str, str] = field(default_factory=dict)
    recorded: dict[str, int] = field(default_factory=dict)
    versions: list[int] = field(default_factory=list)
    next_step: int = 0
    next_position: int = 0
    trained_groups: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    trained: int = 0
    evaluated: int = 0
    lost: Counter[str] = field(default_factory=Counter)
    rejected: Counter[str] = field(default_factory=Counter)

    def may(self, what: str, member: Member | None) -> bool:
        """Whether a move is open to a rollout."""
        return member is not None and member.state in MOVES[what]

    def of_attempt(self, attempt: str) -> Member | None:
        """The rollout whose live attempt this is."""
        return self.members.get(self.known.get(attempt, ""))

    def move(self, what: str, member: Member) -> str:
        """Make a move; the state before."""
        was, member.state = member.state, MOVES[what][member.state]
        return was

    def end_attempt(self, member: Member, why: str = "late") -> None:
        """From now on messages of its attempt are refused."""
        if member.attempt is not None and self.known.pop(member.attempt, None) is not None:
            self.over[member.attempt] = why

    def accepted_tokens(self, group: Bundle) -> int:
        """Tokens of the members that were accepted."""
        return sum(self.members[m].held for m in group.members if self.members[m].state == "ACCEPTED")

    def may_close(self, what: str, name: str) -> bool:
        """Whether a move is open to a group whose members have all ended."""
        group = self.groups.get(name)
        if group is None or group.state not in GROUP_MOVES[what]:
            return False
        fits = what not in (FOR_EVALUATION if group.is_train else FOR_TRAINING)
        return fits and all(self.members[m].state in ENDED for m in group.members)

    def close(self, what: str, name: str, fresh: tuple[str, ...]) -> None:
        """Make a move that a group may make; ``fresh`` are its members after a restart."""
        group = self.groups[name]
        tokens = self.accepted_tokens(group)
        group.state = GROUP_MOVES[what][group.state]
        reason = {"drop": "cancelled", "park": "orphaned", "restart": "stale"}.get(what)
        if reason is not None:
            self.rejected[reason] += tokens
        self.evaluated += tokens if what == "evaluate" else 0
        if what != "complete":
            self.forget_members(group)
        if what == "restart":
            group.members = list(fresh)
            self.members.update({rollout: Member(name) for rollout in fresh})
        if what in ("drop", "evaluate"):
            self.dropped["cancelled"] += what == "drop" and group.is_train
            del self.groups[name]

    def forget_members(self, group: Bundle) -> None:
        """A closed group has no members any more."""
        for name in group.members:
            self.end_attempt(self.members.pop(name))
        group.members = []
