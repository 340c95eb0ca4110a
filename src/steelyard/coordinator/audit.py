"""``steelyard audit``: proves from journal and stores alone what a run claims.

Every invariant has a name and a sentence; a report says how often each was checked and shows the first
counter-example. Nothing here trusts the coordinator's memory: the journal is replayed, every trace, batch,
artifact and weight file is read and hashed again.
"""

from steelyard.coordinator import audit_deep
from steelyard.coordinator.audit_batches import check_batches
from steelyard.coordinator.audit_books import check_books
from steelyard.coordinator.audit_evidence import AuditStores, Findings, gather
from steelyard.coordinator.audit_journal import check_ids, check_lineage, read_events, replay
from steelyard.coordinator.audit_retries import check_retries
from steelyard.coordinator.audit_traces import check_scores, check_traces
from steelyard.coordinator.audit_versions import check_checkpoints, check_versions
from steelyard.types import Record

INVARIANTS = {
    "journal_chain": "Every journal record carries the digest of itself and all before it, and the end is not cut off.",
    "legal_transitions": "Replayed from the start, every event follows from those before it.",
    "unique_ids": "No id of a group, rollout or attempt and no version number is ever used twice.",
    "step_once": "On the surviving lineage each optimizer step was computed once, without a gap.",
    "parent_chain": "Each version is one step after its parent, and each step was computed at the surviving version.",
    "weights_stored": "Each kept version's files and parameters hash to its manifest, the one that was published.",
    "load_proofs": "Each load showed in memory exactly the published weights, and no version was READY without one.",
    "checkpoints_stored": "The last checkpoint is stored, and each stored one has the digest that was journalled.",
    "budgets_kept": "No rollout was leased with a budget used up, nor cancelled for a budget that was not.",
    "retries_ruled": "Only a failed attempt is followed by another, after its back-off; an interruption costs nothing.",
    "traces_stored": "The trace of each attempt that reported one is stored with the digest and counts of its sealing.",
    "traces_unspliced": "A trace holds turns of one attempt, in order, each extending its segment, no request twice.",
    "logprobs_recorded": "Each sampled token has a recorded finite log-probability of at most 0.",
    "versions_proven": "Each sampled token came from its lease's version, or a later one where it may, READY, proven.",
    "artifacts_scored": "Each score is about the artifact that its attempt handed in, and that is the one stored.",
    "scores_finite": "Each score is a finite value of a named verifier.",
    "batches_stored": "Each step's batch is stored with the digest and samples that were journalled before the step.",
    "batch_tokens": "Each trained token, mask and version is the one in the sealed trace.",
    "batch_logprobs": "Each trained log-probability and temperature is the one in the sealed trace.",
    "micro_batch_rows": "The rows that were computed are the samples of the batch, each once.",
    "advantages_recomputed": "Each advantage follows from the journalled scores of its group.",
    "groups_whole": "Each step consumes the configured number of groups, each whole and with enough accepted members.",
    "lag_bound": "When consumed, no token was older than the lag bound, and none came from an orphaned version.",
    "trained_once": "No prompt and no sample is trained twice on the surviving lineage.",
    "evaluation_never_trained": "Nothing sampled for an evaluation was trained.",
    "prompt_book_closed": "issued = trained + dropped + live, and the task stream was issued in order.",
    "token_book_closed": "recorded = trained + evaluated + rejected + in flight + lost, and so for each attempt.",
}


class InvariantReport(Record, frozen=True, kw_only=True):
    """What the audit found about one invariant. ``counter_example`` is the first, None where it holds.

    ``note`` says what its proof rests on, where that is less than it might be.
    """

    name: str
    statement: str
    num_checked: int
    num_broken: int
    counter_example: str | None
    note: str | None = None


class AuditReport(Record, frozen=True, kw_only=True):
    """The findings on all invariants, in the order of ``INVARIANTS``."""

    invariants: tuple[InvariantReport, ...]

    @property
    def is_passed(self) -> bool:
        """Whether every invariant holds."""
        return not self.broken

    @property
    def broken(self) -> tuple[str, ...]:
        """Names of the invariants that do not hold."""
        return tuple(report.name for report in self.invariants if report.num_broken)

    def lines(self) -> tuple[str, ...]:
        """For people: one line an invariant, with counter-example and note below it."""
        lines = []
        for report in self.invariants:
            verdict = f"BROKEN {report.num_broken} of" if report.num_broken else "ok"
            lines.append(f"{report.name:<25} {verdict} {report.num_checked} checks. {report.statement}")
            if report.counter_example is not None:
                lines.append(f"{'':<25} first counter-example: {report.counter_example}")
            if report.note is not None:
                lines.append(f"{'':<25} note: {report.note}")
        return tuple(lines)


def audit(stores: AuditStores, deep: audit_deep.DeepAudit | None = None) -> AuditReport:
    """Check every invariant; a broken one does not keep the others from being checked.

    Args:
        deep: where given, kept weights are run again over a sample of what was recorded.

    Raises:
        IntegrityError: the journal cannot be opened at all.
    """
    invariants = INVARIANTS if deep is None else {**INVARIANTS, audit_deep.INVARIANT: audit_deep.STATEMENT}
    findings = Findings(invariants)
    events = read_events(stores.journal, findings)
    state = replay(events, findings)
    facts = gather(events)
    check_ids(facts, findings)
    check_lineage(facts, findings)
    check_retries(events, findings)
    check_versions(stores, facts, findings)
    check_checkpoints(stores, facts, findings)
    check_traces(stores, facts, findings)
    check_scores(stores, facts, findings)
    check_batches(stores, facts, findings)
    check_books(stores, facts, state, findings)
    if deep is not None:
        audit_deep.check_recomputed(stores, facts, deep, findings)
    return AuditReport(
        invariants=tuple(
            InvariantReport(
                name=name,
                statement=statement,
                num_checked=findings.num_checked[name],
                num_broken=findings.num_broken[name],
                counter_example=findings.examples.get(name),
                note=findings.notes.get(name),
            )
            for name, statement in invariants.items()
        )
    )
