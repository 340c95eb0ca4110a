"""A snapshot: the whole state after one event, as one immutable record with the journal's head at that event.

A snapshot only saves time. It is used where its own digest holds, where it was written by the same format and over
the same fields, and where the journal has the same head at the same number; else it is as if it were not there.
"""

import contextlib
import gc
import types
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from steelyard.coordinator.entities import (
    Evaluation,
    Group,
    PromptCounts,
    Rollout,
    Run,
    State,
    Step,
    Tallies,
    TokenCounts,
    Version,
)
from steelyard.coordinator.entity_rows import EntityRows, shape_of
from steelyard.coordinator.journal.base import Head
from steelyard.digests import digest_bytes
from steelyard.errors import IntegrityError
from steelyard.types import Record

FORMAT_VERSION = 1
"""Grows with every change of the form, and of what an event does to the state: an older snapshot is then ignored."""

PLAIN_FIELDS: dict[str, Any] = {
    "run": Run | None,
    "at_s": float,
    "num_events": int,
    "ended_attempts": dict[str, str],
    "versions": dict[int, Version],
    "lineage": dict[int, int],
    "unreleased": set[int],
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

_ROLLOUTS = EntityRows(Rollout, omit=frozenset({"group"}))
_GROUPS = EntityRows(Group, omit=frozenset({"rollouts"}))
_PLAIN = {name: shape_of(hint) for name, hint in PLAIN_FIELDS.items()}
_GROUPS_PER_PART = 64
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


class Capture(NamedTuple):
    """Rows of a state at one moment. They share nothing that can change with it, so they can be encoded later."""

    num_events: int
    plain: tuple[Any, ...]
    links: _Links
    groups: list[_GroupRow]


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


def capture(state: State) -> Capture:
    """What a snapshot needs of a state that goes on; the short part of the work."""
    with _no_search_for_cycles():
        return _capture(state)


def _capture(state: State) -> Capture:
    plain = tuple(
        getattr(state, name) if shape.pack is None else shape.pack(getattr(state, name))
        for name, shape in _PLAIN.items()
    )
    links = _Links(
        live_groups=list(state.live_groups),
        rollouts=list(state.rollouts),
        attempts=[(attempt_id, rollout.rollout_id) for attempt_id, rollout in state.attempts.items()],
    )
    pack_group, pack_rollout = _GROUPS.pack, _ROLLOUTS.pack
    groups = [
        (pack_group(group), [pack_rollout(rollout) for rollout in group.rollouts]) for group in state.groups.values()
    ]
    return Capture(state.num_events, plain, links, groups)


def pack(captured: Capture, head: Head) -> bytes:
    """The snapshot of what was captured.

    It is encoded in many small parts, so that other threads run in between.

    Raises:
        ValueError: the head is of another event.
    """
    if captured.num_events != head.number:
        raise ValueError(f"head must be that of event {captured.num_events}, is of {head.number}")
    base = _ENCODER.encode((captured.plain, captured.links))
    starts = range(0, len(captured.groups), _GROUPS_PER_PART)
    parts = (base, *(_ENCODER.encode(captured.groups[start : start + _GROUPS_PER_PART]) for start in starts))
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
