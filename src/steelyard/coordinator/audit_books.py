"""Invariants of the books: every prompt and every recorded token is accounted for exactly once."""

from steelyard.coordinator.audit_evidence import AuditStores, Facts, Findings
from steelyard.coordinator.books import prompt_book, token_book
from steelyard.coordinator.entities import State
from steelyard.types import Purpose


def check_books(stores: AuditStores, facts: Facts, state: State, findings: Findings) -> None:
    """Both books of the replayed state, and the ledger attempt by attempt."""
    prompts = prompt_book(state)
    message = (
        f"issued {prompts.issued} must be trained {prompts.trained} + dropped {prompts.dropped} + live {prompts.live}"
    )
    findings.check("prompt_book_closed", prompts.gap == 0, message)
    trained = {group for step in facts.steps.values() for group in step.begun.group_ids}
    message = f"{len(trained)} groups are in surviving steps, the book says {prompts.trained}"
    findings.check("prompt_book_closed", len(trained) == prompts.trained, message)
    positions = [g.admitted.stream_position for g in facts.groups.values() if g.admitted.purpose is Purpose.TRAIN]
    in_order = positions == list(range(len(positions)))
    findings.check(
        "prompt_book_closed", in_order, "the positions of the task stream must be issued in order, once each"
    )
    tokens = token_book(state, stores.recorded)
    message = (
        f"recorded {tokens.recorded} must be trained {tokens.trained} + evaluated {tokens.evaluated} "
        f"+ rejected {tokens.rejected} + in flight {tokens.in_flight} + lost {tokens.lost}"
    )
    findings.check("token_book_closed", tokens.gap == 0, message)
    _check_ledger(stores, facts, findings)


def _check_ledger(stores: AuditStores, facts: Facts, findings: Findings) -> None:
    for attempt in facts.attempts.values():
        recorded = stores.recorded.get(attempt.attempt_id, 0)
        booked = attempt.report.trace.num_tokens if attempt.report else attempt.lost_tokens
        message = f"the recorder counted {recorded} tokens of {attempt.attempt_id}, the journal {booked}"
        findings.check("token_book_closed", booked is None or booked == recorded, message)
    for attempt_id in stores.recorded:
        message = f"tokens are recorded for {attempt_id}, of which the journal knows nothing"
        findings.check("token_book_closed", attempt_id in facts.attempts, message)
