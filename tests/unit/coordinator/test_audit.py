"""Audit: a clean run passes, and every corruption is named by the invariant that it breaks.

Corruptions of the journal are applied in two ways: raw, where the chain gives them away, and forged, where the chain is
written anew around them, so that the deeper invariants must find them.
"""

import copy
import math
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from steelyard.assembly.batch import build_step_batch
from steelyard.coordinator import events as e
from steelyard.coordinator.audit import INVARIANTS
from steelyard.coordinator.journal.base import EMPTY_HEAD, chain, decode
from steelyard.digests import digest_bytes
from steelyard.testing.broken_run import BrokenRun, finished_run
from steelyard.testing.run_rig import RunRig
from steelyard.types import FileDigest, Purpose, TrainingSample, Turn

CLEAN = finished_run()


def swap(row: tuple[Any, ...], index: int, value: object) -> tuple[Any, ...]:
    return (*row[:index], value, *row[index + 1 :])


def sampled_at(sample: TrainingSample) -> int:
    return sample.loss_mask.index(1)


# --- corruptions of the stores ----------------------------------------------------------------------


def swap_two_versions(run: BrokenRun) -> None:
    versions = run.stores.versions
    versions[1], versions[2] = versions[2], versions[1]


def swap_the_weights_under_a_manifest(run: BrokenRun) -> None:
    versions = run.stores.versions
    versions[2] = msgspec.structs.replace(versions[2], files=versions[1].files)


def alter_a_weights_file(run: BrokenRun) -> None:
    version = run.stores.versions[4]
    file = version.files[0]
    altered = FileDigest(name=file.name, num_bytes=file.num_bytes, digest=digest_bytes(b"altered"))
    run.stores.versions[4] = msgspec.structs.replace(version, files=(altered,))


def delete_a_version(run: BrokenRun) -> None:
    del run.stores.versions[3]


def drop_a_trace(run: BrokenRun) -> None:
    del run.stores.traces[run.trained().attempt_id]


def change_a_token_in_a_trace(run: BrokenRun) -> None:
    trace = run.trained_trace()
    turn = msgspec.structs.replace(trace.turns[0], token_ids=swap(trace.turns[0].token_ids, 0, 99))
    changed = msgspec.structs.replace(trace, turns=(turn, *trace.turns[1:]))
    run.stores.traces[trace.attempt_id] = (changed, digest_bytes(msgspec.msgpack.encode(changed)))


def change_a_token_in_a_batch(run: BrokenRun) -> None:
    batch, _ = run.stores.batches[1]
    sample = batch.samples[0]
    changed = msgspec.structs.replace(sample, token_ids=swap(sample.token_ids, sampled_at(sample), 99))
    batch = msgspec.structs.replace(batch, samples=(changed, *batch.samples[1:]))
    run.stores.batches[1] = (batch, digest_bytes(msgspec.msgpack.encode(batch)))


def delete_a_batch(run: BrokenRun) -> None:
    del run.stores.batches[2]


def swap_two_batches(run: BrokenRun) -> None:
    batches = run.stores.batches
    batches[1], batches[2] = batches[2], batches[1]


def alter_an_artifact(run: BrokenRun) -> None:
    digest = next(iter(run.stores.artifacts))
    run.stores.artifacts[digest] = b"another answer"


def lose_an_artifact(run: BrokenRun) -> None:
    del run.stores.artifacts[next(iter(run.stores.artifacts))]


def lose_the_last_checkpoint(run: BrokenRun) -> None:
    del run.stores.checkpoints[4]


def count_tokens_twice_in_the_ledger(run: BrokenRun) -> None:
    run.stores.recorded[run.trained().attempt_id] *= 2


def record_tokens_of_nobody(run: BrokenRun) -> None:
    run.stores.recorded["att_nobody"] = 3


# --- corruptions of the journal, raw ------------------------------------------------------------------


def edit_a_journal_row(run: BrokenRun) -> None:
    index, _ = run.events(e.Scored)[0]
    record = run.journal.stored[index]
    payload = record.payload.replace(b'"value":', b'"value":1')
    assert payload != record.payload
    run.journal.stored[index] = msgspec.structs.replace(record, payload=payload)


def drop_a_journal_row(run: BrokenRun) -> None:
    del run.journal.stored[40]


def double_a_journal_row(run: BrokenRun) -> None:
    run.journal.stored.insert(41, run.journal.stored[40])


def cut_the_end_of_the_journal_off(run: BrokenRun) -> None:
    del run.journal.stored[-3:]


# --- corruptions of the journal, forged ---------------------------------------------------------------


def drop_a_row_and_forge_the_chain(run: BrokenRun) -> None:
    index, _ = run.events(e.Running)[5]
    run.forge(lambda events: events.__delitem__(index))


def double_a_step(run: BrokenRun) -> None:
    index, begun = run.events(e.StepBegun)[1]
    run.forge(lambda events: events.insert(index + 1, begun))


def forge_a_load_proof(run: BrokenRun) -> None:
    index, loaded = run.events(e.VersionLoaded)[1]
    proof = msgspec.structs.replace(loaded.proof, weights_digest="f" * 32)
    run.replace(index, msgspec.structs.replace(loaded, proof=proof))


def forget_a_load_proof(run: BrokenRun) -> None:
    index, _ = run.events(e.VersionLoaded)[1]
    run.forge(lambda events: events.__delitem__(index))


def rename_the_load_of_a_turn(run: BrokenRun) -> None:
    def change(turns: list[Turn]) -> list[Turn]:
        return [msgspec.structs.replace(turn, load_id="load_unproven") for turn in turns]

    run.retrace(run.trained().attempt_id, change)


def splice_two_attempts(run: BrokenRun) -> None:
    samples = run.stores.batches[1][0].samples
    other = next(s.attempt_id for s in samples if s.attempt_id != samples[0].attempt_id)
    foreign = run.stores.traces[other][0].turns[0]
    run.retrace(samples[0].attempt_id, lambda turns: [*turns[:-1], foreign])


def relabel_a_spliced_turn(run: BrokenRun) -> None:
    samples = run.stores.batches[1][0].samples
    other = next(s.attempt_id for s in samples if s.attempt_id != samples[0].attempt_id)
    foreign = run.stores.traces[other][0].turns[0]
    mine = samples[0].attempt_id
    run.retrace(mine, lambda turns: [msgspec.structs.replace(foreign, attempt_id=mine), *turns[1:]])


def change_a_score(run: BrokenRun) -> None:
    attempt_id = run.trained().attempt_id
    index, scored = next((i, s) for i, s in run.events(e.Scored) if s.score.attempt_id == attempt_id)
    assert scored.score.value is not None
    score = msgspec.structs.replace(scored.score, value=scored.score.value + 0.5)
    run.replace(index, msgspec.structs.replace(scored, score=score))


def forge_an_infinite_score(run: BrokenRun) -> None:
    index, scored = run.events(e.Scored)[0]
    run.replace(index, msgspec.structs.replace(scored, score=msgspec.structs.replace(scored.score, value=None)))


def score_another_artifact(run: BrokenRun) -> None:
    index, scored = run.events(e.Scored)[2]
    run.replace(index, msgspec.structs.replace(scored, artifact_digest="0" * 32))


def change_a_trained_token(run: BrokenRun) -> None:
    def change(samples: list[TrainingSample]) -> None:
        at = sampled_at(samples[0])
        samples[0] = msgspec.structs.replace(samples[0], token_ids=swap(samples[0].token_ids, at, 99))

    run.rebatch(1, change)


def change_a_trained_logprob(run: BrokenRun) -> None:
    def change(samples: list[TrainingSample]) -> None:
        at = sampled_at(samples[0])
        samples[0] = msgspec.structs.replace(samples[0], logprobs=swap(samples[0].logprobs, at, -0.125))

    run.rebatch(1, change)


def change_an_advantage(run: BrokenRun) -> None:
    def change(samples: list[TrainingSample]) -> None:
        samples[0] = msgspec.structs.replace(samples[0], advantage=samples[0].advantage + 0.25)

    run.rebatch(1, change)


def train_a_prompt_token(run: BrokenRun) -> None:
    def change(samples: list[TrainingSample]) -> None:
        sample = samples[0]
        samples[0] = msgspec.structs.replace(
            sample,
            loss_mask=swap(sample.loss_mask, 0, 1),
            versions=swap(sample.versions, 0, max(sample.versions)),
            logprobs=swap(sample.logprobs, 0, -1.0),
        )

    run.rebatch(1, change)


def leave_a_member_out(run: BrokenRun) -> None:
    run.rebatch(1, lambda samples: samples.__delitem__(0))


def compute_other_rows_than_the_samples(run: BrokenRun) -> None:
    batch, _ = run.stores.batches[1]
    micro = batch.micro_batches[0]
    mask = bytes(byte ^ 1 for byte in micro.loss_mask)
    changed = msgspec.structs.replace(micro, loss_mask=mask)
    micro_batches = (changed, *batch.micro_batches[1:])
    run.store_batch(1, msgspec.structs.replace(batch, micro_batches=micro_batches))


def train_an_evaluation_attempt(run: BrokenRun) -> None:
    _, admitted = next((i, g) for i, g in run.events(e.GroupAdmitted) if g.purpose is Purpose.EVALUATION)
    index, begun = run.events(e.StepBegun)[1]
    run.replace(index, msgspec.structs.replace(begun, group_ids=(admitted.group_id, begun.group_ids[1])))


def train_a_stale_attempt(run: BrokenRun) -> None:
    """The last step takes the groups that the first one trained, and is forged to look like their only use."""
    first, last = run.events(e.StepBegun)[0][1], run.events(e.StepBegun)[3]
    old, _ = run.stores.batches[0]
    run.replace(last[0], msgspec.structs.replace(last[1], group_ids=first.group_ids))
    run.store_batch(3, build_step_batch(3, 3, old.samples, 4096))


def replay_a_prompt(run: BrokenRun) -> None:
    begun = run.events(e.StepBegun)
    again = msgspec.structs.replace(begun[2][1], group_ids=(begun[1][1].group_ids[0], begun[2][1].group_ids[1]))
    run.replace(begun[2][0], again)


def skip_a_task(run: BrokenRun) -> None:
    index, admitted = run.events(e.GroupAdmitted)[-1]
    position = (admitted.stream_position or 0) + 1
    run.replace(index, msgspec.structs.replace(admitted, stream_position=position))


def use_an_attempt_id_twice(run: BrokenRun) -> None:
    leased = run.events(e.Leased)
    index, last = leased[-1]
    run.replace(index, msgspec.structs.replace(last, attempt_id=leased[0][1].attempt_id))


def hang_a_version_on_the_wrong_parent(run: BrokenRun) -> None:
    index, published = run.events(e.VersionPublished)[3]
    run.replace(index, msgspec.structs.replace(published, parent_version=1))


def retry_without_waiting(run: BrokenRun) -> None:
    index, retried = run.events(e.RolloutRetried)[0]
    run.replace(index, msgspec.structs.replace(retried, not_before_s=retried.not_before_s + 1000.0))


def allow_one_attempt_only(run: BrokenRun) -> None:
    index, started = run.events(e.RunStarted)[0]
    run.replace(index, msgspec.structs.replace(started, budgets=e.Budgets(num_attempts=1)))


def under_report_lost_tokens(run: BrokenRun) -> None:
    index, failed = next((i, f) for i, f in run.events(e.InfraFailed) if f.lost_tokens)
    run.replace(index, msgspec.structs.replace(failed, lost_tokens=0))


def drop_a_token_from_a_trace(run: BrokenRun) -> None:
    def change(turns: list[Turn]) -> list[Turn]:
        turn = turns[-1]
        cut = msgspec.structs.replace(
            turn, token_ids=turn.token_ids[:-1], logprobs=turn.logprobs[:-1], kept_logmass=turn.kept_logmass[:-1]
        )
        return [*turns[:-1], cut]

    run.retrace(run.trained().attempt_id, change)


def make_a_logprob_infinite(run: BrokenRun) -> None:
    def change(turns: list[Turn]) -> list[Turn]:
        turn = turns[0]
        return [msgspec.structs.replace(turn, logprobs=swap(turn.logprobs, 0, -math.inf)), *turns[1:]]

    run.retrace(run.trained().attempt_id, change)


CORRUPTIONS: list[tuple[Callable[[BrokenRun], None], str]] = [
    (swap_two_versions, "weights_stored"),
    (swap_the_weights_under_a_manifest, "weights_stored"),
    (alter_a_weights_file, "weights_stored"),
    (delete_a_version, "weights_stored"),
    (drop_a_trace, "traces_stored"),
    (change_a_token_in_a_trace, "traces_stored"),
    (change_a_token_in_a_batch, "batches_stored"),
    (delete_a_batch, "batches_stored"),
    (swap_two_batches, "batches_stored"),
    (alter_an_artifact, "artifacts_scored"),
    (lose_an_artifact, "artifacts_scored"),
    (lose_the_last_checkpoint, "checkpoints_stored"),
    (count_tokens_twice_in_the_ledger, "token_book_closed"),
    (record_tokens_of_nobody, "token_book_closed"),
    (edit_a_journal_row, "journal_chain"),
    (drop_a_journal_row, "journal_chain"),
    (double_a_journal_row, "journal_chain"),
    (cut_the_end_of_the_journal_off, "journal_chain"),
    (drop_a_row_and_forge_the_chain, "legal_transitions"),
    (double_a_step, "step_once"),
    (forge_a_load_proof, "load_proofs"),
    (forget_a_load_proof, "load_proofs"),
    (rename_the_load_of_a_turn, "versions_proven"),
    (splice_two_attempts, "traces_unspliced"),
    (relabel_a_spliced_turn, "traces_unspliced"),
    (change_a_score, "advantages_recomputed"),
    (forge_an_infinite_score, "scores_finite"),
    (score_another_artifact, "artifacts_scored"),
    (change_a_trained_token, "batch_tokens"),
    (change_a_trained_logprob, "batch_logprobs"),
    (change_an_advantage, "advantages_recomputed"),
    (train_a_prompt_token, "batch_tokens"),
    (leave_a_member_out, "groups_whole"),
    (compute_other_rows_than_the_samples, "micro_batch_rows"),
    (train_an_evaluation_attempt, "evaluation_never_trained"),
    (train_a_stale_attempt, "lag_bound"),
    (replay_a_prompt, "trained_once"),
    (skip_a_task, "prompt_book_closed"),
    (use_an_attempt_id_twice, "unique_ids"),
    (hang_a_version_on_the_wrong_parent, "parent_chain"),
    (retry_without_waiting, "retries_ruled"),
    (allow_one_attempt_only, "budgets_kept"),
    (under_report_lost_tokens, "token_book_closed"),
    (drop_a_token_from_a_trace, "traces_stored"),
    (make_a_logprob_infinite, "logprobs_recorded"),
]


def test_a_clean_run_passes_and_every_invariant_was_really_checked() -> None:
    report = CLEAN.audit()
    assert report.is_passed, "\n".join(report.lines())
    assert [found.name for found in report.invariants if found.num_checked == 0] == []
    assert [found.name for found in report.invariants if found.counter_example] == []


@pytest.mark.parametrize(("corrupt", "invariant"), CORRUPTIONS, ids=lambda value: getattr(value, "__name__", ""))
def test_each_corruption_is_named_by_its_invariant(corrupt: Callable[[BrokenRun], None], invariant: str) -> None:
    run = BrokenRun()
    corrupt(run)
    report = run.rig.audit()
    found = next(r for r in report.invariants if r.name == invariant)
    assert found.num_broken > 0, f"broken are {report.broken}"
    assert found.counter_example


def test_every_invariant_is_broken_by_at_least_one_corruption() -> None:
    assert {invariant for _, invariant in CORRUPTIONS} == set(INVARIANTS)


def test_the_report_names_invariant_statement_and_counter_example() -> None:
    run = BrokenRun()
    alter_a_weights_file(run)
    report = run.rig.audit()
    text = "\n".join(report.lines())
    assert report.broken == ("weights_stored",)
    assert "weights_stored            BROKEN 1 of" in text
    assert INVARIANTS["weights_stored"] in text
    assert "first counter-example: version 4: file model.safetensors must be as in the manifest" in text


def test_an_audit_in_the_middle_of_a_run_passes_at_every_event() -> None:
    """Cut the journal after each event, as a crash would; stores may hold more than the journal knows."""
    full = CLEAN.memory_journal
    events = [decode(record.payload) for record in full.stored]
    for cut in range(3, len(events), 5):
        rig = RunRig(CLEAN.settings)
        rig.stores = copy.copy(CLEAN.stores)
        known = {event.attempt_id for event in events[:cut] if isinstance(event, e.Leased)}
        rig.stores.recorded = {name: count for name, count in CLEAN.stores.recorded.items() if name in known}
        records, head = chain(EMPTY_HEAD, events[:cut])
        rig.memory_journal.stored, rig.memory_journal.stored_head = list(records), head
        report = rig.audit()
        assert report.is_passed, (cut, events[cut - 1], report.lines())
