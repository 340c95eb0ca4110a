"""Every way to spoil a finished run is found by ``steelyard audit``, and named by the invariant that it breaks."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest

from steelyard.cli.main import EXIT_BAD_INPUT, EXIT_CHECK_FAILED, EXIT_DONE, main
from steelyard.coordinator.audit import INVARIANTS
from steelyard.testing.forgery import Event, ForgedRun, flip_byte, swap
from steelyard.testing.small_runs import steelyard, write_small_config
from steelyard.testing.tiny_model import write_tiny_model
from steelyard.weights.manifest import encode_manifest, file_digest, read_manifest

replace = msgspec.structs.replace


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole run whose batches are all kept, and whose weights move although a random policy never succeeds."""
    home = tmp_path_factory.mktemp("run")
    config = write_small_config(
        home,
        write_tiny_model(home / "policy"),
        run={"dir": str(home / "run")},
        algorithm={"entropy_coef": 0.01},
        train={"max_steps": 3, "checkpoint_every": 3},
        eval={"num_tasks": 2, "greedy": False},
    )
    ended = steelyard("train", config)
    assert ended.returncode == EXIT_DONE, ended.stderr
    return home / "run"


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> ForgedRun:
    # Versions share files by hard links, which a copy does away with.
    shutil.copytree(finished, tmp_path / "run")
    return ForgedRun(tmp_path / "run")


def audit(run: ForgedRun, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, set[str]]:
    """Exit code, and the invariants that the command says are broken."""
    code = main(["audit", str(run.path), *options])
    lines = capsys.readouterr().out.splitlines()
    return code, {line.split()[0] for line in lines if " BROKEN " in line}


def kept_versions(run: ForgedRun) -> tuple[Path, Path]:
    one, other = sorted((run.path / "weights").glob("v*"))[-2:]
    return one, other


# --- weights and checkpoints --------------------------------------------------------------------------


def swap_weights(run: ForgedRun) -> None:
    one, other = kept_versions(run)
    swap(one / "model.safetensors", other / "model.safetensors")


def swap_manifests(run: ForgedRun) -> None:
    one, other = kept_versions(run)
    swap(one / "manifest.json", other / "manifest.json")


def damage_weights(run: ForgedRun) -> None:
    flip_byte(kept_versions(run)[1] / "model.safetensors")


def forge_weights(run: ForgedRun) -> None:
    """With the file's digest in the manifest recomputed."""
    version = kept_versions(run)[1]
    flip_byte(version / "model.safetensors")
    manifest = read_manifest(version)
    files = tuple(file_digest(version / file.name) for file in manifest.files)
    (version / "manifest.json").write_bytes(encode_manifest(replace(manifest, files=files)))


def delete_version(run: ForgedRun) -> None:
    shutil.rmtree(kept_versions(run)[1])


def forge_proof(run: ForgedRun) -> None:
    run.edit("VERSION_LOADED", lambda event: event["proof"].update(weights_digest="0" * 32), 1)


def forge_probe(run: ForgedRun) -> None:
    run.edit("VERSION_LOADED", lambda event: event["proof"].update(probe_max_error=1.0), 1)


def forge_parent(run: ForgedRun) -> None:
    run.edit("VERSION_PUBLISHED", lambda event: event.update(parent_version=0), 2)


def damage_checkpoint(run: ForgedRun) -> None:
    flip_byte(run.path / "checkpoints" / "step-000003" / "optimizer.safetensors_state")


def delete_checkpoint(run: ForgedRun) -> None:
    shutil.rmtree(run.path / "checkpoints" / "step-000003")


# --- traces, artifacts, the ledger --------------------------------------------------------------------


def drop_trace(run: ForgedRun) -> None:
    run.trace_file(run.trained_attempts()[0]).unlink()


def damage_trace(run: ForgedRun) -> None:
    flip_byte(run.trace_file(run.trained_attempts()[0]))


def splice_traces(run: ForgedRun) -> None:
    mine, theirs = (run.trace(attempt) for attempt in run.trained_attempts()[:2])
    behind = len(mine.turns)
    stolen = replace(theirs.turns[0], attempt_id=mine.attempt_id, turn_index=behind, segment_index=behind)
    run.put_trace(replace(mine, turns=(*mine.turns, stolen)), is_journalled=True)


def change_turn(run: ForgedRun, is_journalled: bool, **changes: Callable[[Any], Any]) -> None:
    """Change fields of the first turn of a trained trace."""
    trace = run.trace(run.trained_attempts()[0])
    first = trace.turns[0]
    changed = replace(first, **{name: change(getattr(first, name)) for name, change in changes.items()})
    run.put_trace(replace(trace, turns=(changed, *trace.turns[1:])), is_journalled=is_journalled)


def change_token(run: ForgedRun) -> None:
    change_turn(run, False, token_ids=lambda ids: (ids[0] ^ 1, *ids[1:]))


def change_token_and_journal(run: ForgedRun) -> None:
    """In the last turn, so that no later prompt shows the token."""
    trace = run.trace(run.trained_attempts()[0])
    last = trace.turns[-1]
    changed = replace(last, token_ids=(*last.token_ids[:-1], last.token_ids[-1] ^ 1))
    run.put_trace(replace(trace, turns=(*trace.turns[:-1], changed)), is_journalled=True)


def change_logprob(run: ForgedRun) -> None:
    change_turn(run, False, logprobs=lambda values: (values[0] - 0.5, *values[1:]))


def change_logprob_and_journal(run: ForgedRun) -> None:
    change_turn(run, True, logprobs=lambda values: (values[0] - 0.5, *values[1:]))


def impossible_logprob(run: ForgedRun) -> None:
    change_turn(run, True, logprobs=lambda values: (0.5, *values[1:]))


def change_load(run: ForgedRun) -> None:
    change_turn(run, True, load_id=lambda _: "load_0000000000000000")


def damage_artifact(run: ForgedRun) -> None:
    digest = run.event("ARTIFACT_READY")["report"]["artifact_digest"]
    (run.path / "artifacts" / digest[:2] / digest).write_bytes(b"another answer")


def score_another_artifact(run: ForgedRun) -> None:
    run.edit("SCORED", lambda event: event.update(artifact_digest="0" * 32))


def raise_ledger(run: ForgedRun) -> None:
    path = run.path / "traces" / "recorded.log"
    lines = path.read_text().splitlines()
    attempt, request, num_tokens = lines[0].split()
    path.write_text("\n".join([f"{attempt} {request} {int(num_tokens) + 1}", *lines[1:]]) + "\n")


def shorten_ledger(run: ForgedRun) -> None:
    path = run.path / "traces" / "recorded.log"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[1:]))


# --- batches ------------------------------------------------------------------------------------------


def delete_batch(run: ForgedRun) -> None:
    run.batch_file(1).unlink()


def change_sample(run: ForgedRun, is_journalled: bool, **changes: Callable[[Any], Any]) -> None:
    """Change fields of the first sample of a batch, and nothing in its micro-batches."""
    batch = run.batch(1)
    first = batch.samples[0]
    changed = replace(first, **{name: change(getattr(first, name)) for name, change in changes.items()})
    run.put_batch(replace(batch, samples=(changed, *batch.samples[1:])), is_journalled=is_journalled)


def change_batch_token(run: ForgedRun) -> None:
    change_sample(run, False, token_ids=lambda ids: (*ids[:-1], ids[-1] ^ 1))


def change_batch_logprob(run: ForgedRun) -> None:
    change_sample(run, True, logprobs=lambda values: (*values[:-1], values[-1] - 0.5))


def change_batch_advantage(run: ForgedRun) -> None:
    change_sample(run, True, advantage=lambda value: value + 1.0)


def change_computed_advantage(run: ForgedRun) -> None:
    """Only what is really computed: the rows."""
    batch = run.batch(1)
    first = batch.micro_batches[0]
    advantages = np.frombuffer(first.advantages, dtype="<f4") + np.float32(1.0)
    rows = replace(first, advantages=advantages.astype("<f4").tobytes())
    run.put_batch(replace(batch, micro_batches=(rows, *batch.micro_batches[1:])), is_journalled=True)


# --- the journal --------------------------------------------------------------------------------------


def edit_row(run: ForgedRun) -> None:
    run.sql("""update records set payload = replace(payload, '"value":0.0', '"value":1.0')""")


def drop_row(run: ForgedRun) -> None:
    run.sql("delete from records where number = 10")


def duplicate_row(run: ForgedRun) -> None:
    run.sql("insert into records select max(number) + 1, payload, digest from records")


def cut_end(run: ForgedRun) -> None:
    run.sql("delete from records where number = (select max(number) from records)")


def raise_score(run: ForgedRun) -> None:
    run.edit("SCORED", lambda event: event["score"].update(value=1.0))


def empty_score(run: ForgedRun) -> None:
    run.edit("SCORED", lambda event: event["score"].update(value=None))


def double_step(run: ForgedRun) -> None:
    def change(events: list[Event]) -> None:
        at = next(i for i, event in enumerate(events) if event["kind"] == "STEP_BEGUN")
        events.insert(at, events[at])

    run.rewrite(change)


def drop_event_carefully(run: ForgedRun) -> None:
    def change(events: list[Event]) -> None:
        events.remove(next(event for event in events if event["kind"] == "RUNNING"))

    run.rewrite(change)


def train_a_group_twice(run: ForgedRun) -> None:
    groups = run.event("STEP_BEGUN", 0)["group_ids"]
    run.edit("STEP_BEGUN", lambda event: event.update(group_ids=groups), 1)


def train_an_evaluation(run: ForgedRun) -> None:
    group = next(event for event in run.events() if event["kind"] == "GROUP_ADMITTED" and event["label"])
    run.edit("STEP_BEGUN", lambda event: event["group_ids"].__setitem__(0, group["group_id"]), 2)


def drop_a_group_from_a_step(run: ForgedRun) -> None:
    run.edit("STEP_BEGUN", lambda event: event["group_ids"].pop(), 2)


def tighten_the_lag_bound(run: ForgedRun) -> None:
    run.edit("RUN_STARTED", lambda event: event["rules"].update(max_policy_lag=0))


def skip_a_prompt(run: ForgedRun) -> None:
    run.edit("GROUP_ADMITTED", lambda event: event.update(stream_position=event["stream_position"] + 100), 1)


def reuse_an_attempt(run: ForgedRun) -> None:
    first = run.event("LEASED", 0)["attempt_id"]
    run.edit("LEASED", lambda event: event.update(attempt_id=first), 1)


def retry_what_did_not_fail(run: ForgedRun) -> None:
    def change(events: list[Event]) -> None:
        at, lease = next((n, event) for n, event in enumerate(events) if event["kind"] == "LEASED")
        retried = {"kind": "ROLLOUT_RETRIED", "rollout_id": lease["rollout_id"]}
        events.insert(at, {**retried, "at_s": lease["at_s"], "not_before_s": lease["at_s"]})

    run.rewrite(change)


def allow_no_attempt(run: ForgedRun) -> None:
    run.edit("RUN_STARTED", lambda event: event["budgets"].update(num_attempts=0))


class Case(NamedTuple):
    """``named`` must be among the broken invariants; only those of ``along`` may be broken with it."""

    spoil: Callable[[ForgedRun], None]
    named: str
    along: tuple[str, ...] = ()


BOOKS = ("legal_transitions", "prompt_book_closed", "token_book_closed")
"""An event that cannot follow is left out of the replay, from which the books are made."""

CASES = (
    Case(swap_weights, "weights_stored"),
    Case(swap_manifests, "weights_stored"),
    Case(damage_weights, "weights_stored"),
    Case(forge_weights, "weights_stored"),
    Case(delete_version, "weights_stored"),
    Case(forge_proof, "load_proofs", BOOKS),
    Case(forge_probe, "load_proofs", BOOKS),
    Case(forge_parent, "parent_chain", ("weights_stored", *BOOKS)),
    Case(damage_checkpoint, "checkpoints_stored"),
    Case(delete_checkpoint, "checkpoints_stored"),
    Case(drop_trace, "traces_stored", ("batch_tokens",)),
    Case(damage_trace, "traces_stored", ("batch_tokens",)),
    Case(splice_traces, "traces_unspliced", ("traces_stored",)),
    Case(change_token, "batch_tokens", ("traces_stored", "traces_unspliced")),
    Case(change_token_and_journal, "batch_tokens"),
    Case(change_logprob, "batch_logprobs", ("traces_stored",)),
    Case(change_logprob_and_journal, "batch_logprobs"),
    Case(impossible_logprob, "logprobs_recorded", ("batch_logprobs",)),
    Case(change_load, "versions_proven"),
    Case(damage_artifact, "artifacts_scored"),
    Case(score_another_artifact, "artifacts_scored", BOOKS),
    Case(raise_ledger, "token_book_closed"),
    Case(shorten_ledger, "token_book_closed"),
    Case(delete_batch, "batches_stored"),
    Case(change_batch_token, "batch_tokens", ("batches_stored", "micro_batch_rows")),
    Case(change_batch_logprob, "batch_logprobs", ("micro_batch_rows",)),
    Case(change_batch_advantage, "advantages_recomputed", ("micro_batch_rows",)),
    Case(change_computed_advantage, "micro_batch_rows"),
    Case(edit_row, "journal_chain"),
    Case(drop_row, "journal_chain", (*BOOKS, "advantages_recomputed", "evaluation_never_trained", "groups_whole")),
    Case(duplicate_row, "journal_chain", ("legal_transitions",)),
    Case(cut_end, "journal_chain"),
    Case(raise_score, "advantages_recomputed"),
    Case(empty_score, "scores_finite", ("advantages_recomputed",)),
    Case(double_step, "step_once", ("legal_transitions",)),
    Case(drop_event_carefully, "legal_transitions", BOOKS),
    Case(train_a_group_twice, "trained_once", (*BOOKS, "advantages_recomputed", "groups_whole")),
    Case(
        train_an_evaluation,
        "evaluation_never_trained",
        (*BOOKS, "advantages_recomputed", "groups_whole", "lag_bound"),
    ),
    Case(drop_a_group_from_a_step, "groups_whole", (*BOOKS, "advantages_recomputed")),
    Case(tighten_the_lag_bound, "lag_bound"),
    Case(allow_no_attempt, "budgets_kept"),
    Case(retry_what_did_not_fail, "retries_ruled", ("legal_transitions",)),
    Case(skip_a_prompt, "prompt_book_closed", BOOKS),
    Case(
        reuse_an_attempt,
        "unique_ids",
        (*BOOKS, "advantages_recomputed", "evaluation_never_trained", "groups_whole"),
    ),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.spoil.__name__)
def test_a_spoiled_run_fails_the_audit_by_the_right_name(
    run: ForgedRun, case: Case, capsys: pytest.CaptureFixture[str]
) -> None:
    case.spoil(run)
    code, broken = audit(run, capsys)
    assert code == EXIT_CHECK_FAILED
    assert case.named in broken
    assert broken <= {case.named, *case.along}


def test_the_run_itself_passes(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert audit(ForgedRun(finished), capsys) == (EXIT_DONE, set())


def test_a_careful_rewriting_that_changes_nothing_passes(run: ForgedRun, capsys: pytest.CaptureFixture[str]) -> None:
    run.rewrite(lambda events: None)
    for step in range(3):
        run.put_batch(run.batch(step), is_journalled=True)
    for attempt_id in run.trained_attempts():
        run.put_trace(run.trace(attempt_id), is_journalled=True)
    assert audit(run, capsys) == (EXIT_DONE, set())


def test_every_invariant_is_broken_by_some_case() -> None:
    assert {case.named for case in CASES} == set(INVARIANTS)


# --- what no digest can show --------------------------------------------------------------------------


def test_the_run_itself_passes_deeply(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert audit(ForgedRun(finished), capsys, "--deep") == (EXIT_DONE, set())


def test_a_log_probability_forged_everywhere_is_found_by_running_the_weights_again(
    run: ForgedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    newest = max(event["version"] for event in run.events() if event["kind"] == "VERSION_PUBLISHED")
    evaluated = [event["attempt_id"] for event in run.events() if event["kind"] == "LEASED"]
    trace = next(t for t in map(run.trace, reversed(evaluated)) if t.turns[0].version_spans[0].version == newest)
    first = trace.turns[0]
    changed = replace(first, logprobs=(first.logprobs[0] - 0.01, *first.logprobs[1:]))
    run.put_trace(replace(trace, turns=(changed, *trace.turns[1:])), is_journalled=True)
    assert audit(run, capsys) == (EXIT_DONE, set())
    assert audit(run, capsys, "--deep") == (EXIT_CHECK_FAILED, {"logprobs_recomputed"})


def test_a_sample_of_no_attempts_is_refused(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", str(finished), "--deep", "--attempts", "0"]) == EXIT_BAD_INPUT
    assert "--attempts must be >= 1, got 0" in capsys.readouterr().err
