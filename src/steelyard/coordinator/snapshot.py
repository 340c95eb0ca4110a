"""A snapshot: the whole state after one event, as one immutable record with the journal's head at that event.

A snapshot only saves time. It is used where its own digest holds, where it was written by the same format and over
the same fields, and where the journal has the same head at the same number; else it is as if it were not there.
"""

import contextlib
import gc
import types
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from steelyard.coordinator.entities import (
    Evaluation,
    FailedAttempt,
    Group,
    PromptCounts,
    Replica,
    Rollout,
    Run,
    State,
    Step,
    Tallies,
    TokenCounts,
    Version,
)
from steelyard.coordinator.entity_rows import EntityRows, shape_of
from steelyard.coordinator.events import AnyEvent
from steelyard.coordinator.journal.base import Head
from steelyard.coordinator.moves import index_group
from steelyard.coordinator.touched_groups import touched_groups
from steelyard.digests import digest_bytes
from steelyard.errors import IntegrityError
from steelyard.types import Record

FORMAT_VERSION = 2
"""Grows with every change of the form, and of what an event does to the state: an older snapshot is then ignored."""

PLAIN_FIELDS: dict[str, Any] = {
    "run": Run | None,
    "at_s": float,
    "num_events": int,
    "ended_attempts": dict[str, str],
    "failed_attempts": dict[str, FailedAttempt],
    "versions": dict[int, Version],
    "lineage": dict[int, int],
    "unreleased": set[int],
    "replicas": dict[str, Replica],
    "steps": dict[int, Step],
    "next_step": int,
    "checkpoints": list[int],
    "checkpoint_digests": dict[int, str],
    "kept_batches": set[int],
    "next_position": int,
    "evaluations": dict[str, Evaluation],
    "prompts": PromptCounts,
    "tokens": TokenCounts,
    "tallies": Tallies,
}
"""Fields of the state that refer to no group and no rollout."""

LINKED_FIELDS = frozenset({"groups", "live_groups", "rollouts", "attempts"})
"""Fields of the state that share groups and rollouts; ``groups`` holds them, the others are stored as ids in order."""

DERIVED_FIELDS = frozenset({"standing"})
"""Fields of the state that say nothing of their own and are built anew."""

_ROLLOUTS = EntityRows(Rollout, omit=frozenset({"group"}))
_GROUPS = EntityRows(Group, omit=frozenset({"rollouts"}))
_PLAIN = {name: shape_of(hint) for name, hint in PLAIN_FIELDS.items()}
_ROLLOUTS_PER_PART = 256
_ENCODER = msgspec.msgpack.Encoder()


class _Format(msgspec.Struct):
    """What every snapshot of every format begins to say."""

    format_version: int


class Snapshot(Record, frozen=True, kw_only=True):
    """``fields_digest`` names the fields of the entities, ``digest`` covers all the rest.

    ``parts`` are msgpack: first the plain fields and the ids in order, then the groups with their rollouts.
    """

    format_version: int
    fields_digest: str
    head: Head
    parts: tuple[bytes, ...]
    digest: str


class _Links(Record, frozen=True, kw_only=True, array_like=True):
    """The order of what shares groups and rollouts: ids, and pairs of attempt id and rollout id."""

    live_groups: list[str]
    rollouts: list[str]
    attempts: list[tuple[str, str]]


_GroupRow = tuple[tuple[Any, ...], list[tuple[Any, ...]]]


_BASE_DECODER: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(
    types.GenericAlias(tuple, (types.GenericAlias(tuple, tuple(shape.wire for shape in _PLAIN.values())), _Links))
)
_GROUPS_DECODER: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(
    types.GenericAlias(list, (types.GenericAlias(tuple, (_GROUPS.wire, types.GenericAlias(list, (_ROLLOUTS.wire,)))),))
)


def fields_digest() -> str:
    """The digest of all names and types that a snapshot holds, in order."""
    named = [(name, str(shape.wire)) for name, shape in _PLAIN.items()]
    text = repr((named, _GROUPS.names, str(_GROUPS.wire), _ROLLOUTS.names, str(_ROLLOUTS.wire)))
    return digest_bytes(text.encode())


def take(state: State, head: Head) -> bytes:
    """The snapshot of ``state``: equal states give equal bytes.

    Args:
        state: after event ``head.number``.
        head: number and digest of the journal's record of that event.

    Raises:
        ValueError: the head is of another event.
    """
    return pack(capture(state), head)


class Capture:
    """A state at one moment, read in slices while events go on to change it.

    What is small, and the order of what is large, is read at the beginning. Groups with their rollouts are read slice
    by slice, and one that an event is about to change before that event. What was read is encoded at once: bytes are
    nothing for the search for cycles to go through.

    Args:
        state: live; ``before`` must be called before each event that is applied to it, until ``is_whole``.
        rollouts_per_slice: a slice ends with the group that makes it so many; part of the snapshot's form.
    """

    def __init__(self, state: State, rollouts_per_slice: int = _ROLLOUTS_PER_PART) -> None:
        self.num_events = state.num_events
        self._state = state
        with _no_search_for_cycles():
            self._plain = tuple(
                getattr(state, name) if shape.pack is None else shape.pack(getattr(state, name))
                for name, shape in _PLAIN.items()
            )
            self._live_groups = list(state.live_groups)
            self._rollouts = list(state.rollouts)
            self._attempts = list(state.attempts.items())
            self._slices = deque(_slices(state.groups.values(), rollouts_per_slice))
        self._unread = {group.group_id for groups in self._slices for group in groups}
        self._early: dict[str, msgspec.Raw] = {}
        self._parts: list[bytes] = []

    @property
    def is_whole(self) -> bool:
        """Whether all has been read, so that events matter no more."""
        return not self._slices

    def before(self, event: AnyEvent) -> None:
        """Read what ``event`` is about to change, unless it was read."""
        if not self._unread:
            return
        for group in touched_groups(self._state, event):
            if group is not None and group.group_id in self._unread:
                self._unread.discard(group.group_id)
                self._early[group.group_id] = msgspec.Raw(_ENCODER.encode(_group_row(group)))

    def read_slice(self) -> None:
        """Read some of the groups."""
        groups = self._slices.popleft()
        with _no_search_for_cycles():
            rows = [self._row(group) for group in groups]
            self._parts.append(_ENCODER.encode(rows))

    def _row(self, group: Group) -> "_GroupRow | msgspec.Raw":
        if group.group_id not in self._unread:
            return self._early.pop(group.group_id)
        self._unread.remove(group.group_id)
        return _group_row(group)

    def parts(self) -> tuple[bytes, ...]:
        """The parts of the snapshot; what they are made of does not change any more.

        Raises:
            ValueError: not all has been read.
        """
        if not self.is_whole:
            raise ValueError(f"all groups must have been read, {len(self._unread)} have not")
        attempts = [(attempt_id, rollout.rollout_id) for attempt_id, rollout in self._attempts]
        links = _Links(live_groups=self._live_groups, rollouts=self._rollouts, attempts=attempts)
        return (_ENCODER.encode((self._plain, links)), *self._parts)


def _slices(groups: Iterable[Group], size: int) -> Iterator[list[Group]]:
    """The groups in order, cut by the number of their rollouts now."""
    chosen: list[Group] = []
    num_rollouts = 0
    for group in groups:
        chosen.append(group)
        num_rollouts += len(group.rollouts)
        if num_rollouts >= size:
            yield chosen
            chosen, num_rollouts = [], 0
    if chosen:
        yield chosen


def _group_row(group: Group) -> _GroupRow:
    pack_rollout = _ROLLOUTS.pack
    return _GROUPS.pack(group), [pack_rollout(rollout) for rollout in group.rollouts]


def capture(state: State) -> Capture:
    """All of a state, read at once."""
    captured = Capture(state)
    while not captured.is_whole:
        captured.read_slice()
    return captured


def pack(captured: Capture, head: Head) -> bytes:
    """The snapshot of what was captured. It touches nothing of the live state, so another thread can do it.

    Raises:
        ValueError: the head is of another event, or the capture is not whole.
    """
    if captured.num_events != head.number:
        raise ValueError(f"head must be that of event {captured.num_events}, is of {head.number}")
    parts = captured.parts()
    snapshot = Snapshot(
        format_version=FORMAT_VERSION,
        fields_digest=fields_digest(),
        head=head,
        parts=parts,
        digest=_digest(FORMAT_VERSION, fields_digest(), head, parts),
    )
    return _ENCODER.encode(snapshot)


def restore(data: bytes) -> tuple[State, Head]:
    """The state of a snapshot and the journal's head that it belongs to.

    Raises:
        IntegrityError: the data are damaged, or of another format; says which.
    """
    snapshot = _checked(data)
    with _no_search_for_cycles():
        return _restored(snapshot), snapshot.head


def _restored(snapshot: Snapshot) -> State:
    try:
        plain, links = _BASE_DECODER.decode(snapshot.parts[0])
        rows = [row for part in snapshot.parts[1:] for row in _GROUPS_DECODER.decode(part)]
        state = State()
        for (name, shape), value in zip(_PLAIN.items(), plain, strict=True):
            setattr(state, name, value if shape.unpack is None else shape.unpack(value))
        _link(state, rows, links)
    except (msgspec.MsgspecError, KeyError, IndexError) as error:
        raise IntegrityError(f"a snapshot must hold a whole state: {error!r}") from error
    return state


@contextlib.contextmanager
def _no_search_for_cycles() -> Iterator[None]:
    """Nothing is garbage while so many objects are made at once, and looking for it takes most of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _link(state: State, rows: Sequence[_GroupRow], links: _Links) -> None:
    """Build groups and rollouts, and let everything that refers to them refer to the same objects."""
    members: dict[str, Rollout] = {}
    unpack = _ROLLOUTS.unpack
    for group_row, rollout_rows in rows:
        group: Group = _GROUPS.unpack(group_row)
        group.rollouts = [unpack(row, group=group) for row in rollout_rows]
        state.groups[group.group_id] = group
        members.update((rollout.rollout_id, rollout) for rollout in group.rollouts)
    state.live_groups = {group_id: state.groups[group_id] for group_id in links.live_groups}
    state.rollouts = {rollout_id: members[rollout_id] for rollout_id in links.rollouts}
    state.attempts = {attempt_id: members[rollout_id] for attempt_id, rollout_id in links.attempts}
    for group in sorted(state.live_groups.values(), key=lambda group: group.order):
        index_group(state, group)


def _checked(data: bytes) -> Snapshot:
    try:
        found = msgspec.msgpack.decode(data, type=_Format).format_version
        if found != FORMAT_VERSION:
            raise IntegrityError(f"a snapshot must have format version {FORMAT_VERSION}, has {found}")
        snapshot = msgspec.msgpack.decode(data, type=Snapshot)
    except msgspec.MsgspecError as error:
        raise IntegrityError(f"a snapshot cannot be read: {error}") from error
    expected = _digest(snapshot.format_version, snapshot.fields_digest, snapshot.head, snapshot.parts)
    if snapshot.digest != expected:
        raise IntegrityError(f"a snapshot must have digest {expected}, has {snapshot.digest}")
    if snapshot.fields_digest != fields_digest():
        raise IntegrityError("a snapshot must hold the fields that the state has now, it holds others")
    return snapshot


def _digest(format_version: int, fields: str, head: Head, parts: Sequence[bytes]) -> str:
    return digest_bytes(_ENCODER.encode((format_version, fields, head, [digest_bytes(part) for part in parts])))
