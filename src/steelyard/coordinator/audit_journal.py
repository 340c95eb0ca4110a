"""Invariants of the journal alone: its chain, its transitions, its ids, its lineage."""

from collections.abc import Iterable

from steelyard.coordinator import events as e
from steelyard.coordinator.audit_evidence import Facts, Findings
from steelyard.coordinator.entities import State
from steelyard.coordinator.journal.base import JournalReader, decode, link
from steelyard.coordinator.state import apply
from steelyard.errors import IllegalTransition, IntegrityError


def read_events(journal: JournalReader, findings: Findings) -> list[e.AnyEvent]:
    """All events that can be read, with the chain checked on the way."""
    events: list[e.AnyEvent] = []
    number, digest = 0, ""
    before, has_passed_before = journal.head(), False
    for record in journal.records():
        number += 1
        is_next = record.number == number
        findings.check("journal_chain", is_next, f"record {number} is missing, {record.number} stands in its place")
        number = record.number
        expected = link(digest, number, record.payload)
        message = f"record {number} must have digest {expected}, has {record.digest}"
        findings.check("journal_chain", record.digest == expected, message)
        digest = record.digest
        has_passed_before |= (before.number, before.digest) == (number, digest)
        try:
            events.append(decode(record.payload))
        except IntegrityError as error:
            findings.check("journal_chain", False, f"record {number}: {error}")
    head = journal.head()
    is_growing = head != before and has_passed_before  # the run goes on and has written between our two looks
    ends_at_head = (head.number, head.digest) == (number, digest) or is_growing
    findings.check("journal_chain", ends_at_head, f"the journal must end with record {head.number}, ends with {number}")
    return events


def replay(events: Iterable[e.AnyEvent], findings: Findings) -> State:
    """Replay what can be replayed; what the state machine refuses is left out and breaks ``legal_transitions``."""
    state = State()
    for number, event in enumerate(events, start=1):
        try:
            apply(state, event)
        except IllegalTransition as error:
            findings.check("legal_transitions", False, f"event {number}: {error}")
        except (KeyError, AssertionError) as error:
            findings.check(
                "legal_transitions", False, f"event {number}: {e.kind_of(event)} contradicts others: {error!r}"
            )
        else:
            findings.check("legal_transitions", True, "")
    return state


def check_ids(facts: Facts, findings: Findings) -> None:
    """No id or number twice."""
    findings.num_checked["unique_ids"] += facts.num_ids
    for name in facts.repeated:
        kind = "step_once" if name.startswith("step ") else "unique_ids"
        findings.check(kind, False, f"{name} is given out twice")


def check_lineage(facts: Facts, findings: Findings) -> None:
    """Steps are 0, 1, 2, ... once each; every version hangs on its parent; every step on the surviving version."""
    for position, step in enumerate(sorted(facts.steps)):
        findings.check("step_once", step == position, f"step {position} is missing on the surviving lineage")
    survivors: dict[int, int] = {}
    for number, published in facts.published.items():
        parent = published.parent_version
        parent_step = -1 if parent is None else facts.step_of(parent)
        follows = parent_step is not None and published.step == parent_step + 1
        message = f"version {number} of step {published.step} has parent {parent} of step {parent_step}"
        findings.check("parent_chain", follows, message)
        if number in facts.orphaned:
            continue
        other = survivors.setdefault(published.step, number)
        findings.check("parent_chain", other == number, f"versions {other} and {number} both survive for a step")
        lives = parent is None or parent not in facts.orphaned
        findings.check("parent_chain", lives, f"version {number} survives, its parent {parent} is orphaned")
    for step, step_facts in facts.steps.items():
        at = step_facts.begun.parent_version
        message = f"step {step} was computed at version {at}, the surviving one is {survivors.get(step)}"
        findings.check("parent_chain", survivors.get(step) == at, message)
