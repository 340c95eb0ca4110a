from pathlib import Path

from steelyard.coordinator import events as e
from steelyard.tasks.sampler import ShuffledStream
from steelyard.testing.faultsim.witness import Witness
from steelyard.testing.kills import acknowledged as told
from steelyard.testing.run_rig import make_manifest
from steelyard.testing.traces import sealed_trace
from steelyard.types import ArtifactReport, AttemptFailure, Lease, Outcome, Purpose, Sampling, Score

STREAM = ShuffledStream(10, 0, "task-{:04d}".format)
LEASE = Lease(
    attempt_id="att_1", rollout_id="rol_1", group_id="grp_1", task_id="t", purpose=Purpose.TRAIN, member_index=0,
    attempt_number=1, policy_version=0, sampling=Sampling(), max_turns=3, issued_at_s=0.0, expires_at_s=9.0,
)  # fmt: skip
EVERYTHING: tuple[told.Acknowledged, ...] = (
    told.GotLease(worker_id="w1", lease=LEASE),
    told.Started(attempt_id="att_1"),
    told.Reported(
        report=ArtifactReport(attempt_id="att_1", attempt_number=1, trace=sealed_trace("att_1", 5), artifact_digest="d")
    ),
    told.Failed(
        failure=AttemptFailure(attempt_id="att_2", attempt_number=1, outcome=Outcome.TIMED_OUT, reason="deadline")
    ),
    told.Delivered(
        score=Score(job_id="j", attempt_id="att_1", outcome=Outcome.SCORED, value=1.0, verifier_version="v")
    ),
    told.Begun(step=0, batch_digest="b"),
    told.Published(manifest=make_manifest(0, 0, None)),
    told.Checkpointed(step=1, digest="c"),
    told.Finished(),
)


def test_what_was_noted_is_read_back_in_order_over_all_lives(tmp_path: Path) -> None:
    for one in EVERYTHING:
        told.AcknowledgementFile(tmp_path / "told").note(one)
    assert tuple(told.read_acknowledged(tmp_path / "told")) == EVERYTHING


def test_a_line_that_a_kill_cut_short_is_left_out_and_spoils_no_other(tmp_path: Path) -> None:
    path = tmp_path / "told"
    told.AcknowledgementFile(path).note(EVERYTHING[0])
    path.write_bytes(path.read_bytes() * 2)
    path.write_bytes(path.read_bytes()[:-7])
    assert tuple(told.read_acknowledged(path)) == EVERYTHING[:1]
    told.AcknowledgementFile(path).note(EVERYTHING[1])
    assert tuple(told.read_acknowledged(path)) == EVERYTHING[:2]


def test_everything_that_was_acknowledged_and_is_not_in_the_journal_is_missed() -> None:
    witness = Witness()
    for one in EVERYTHING:
        told.testify(witness, one)
    missed = witness.broken(list[e.AnyEvent](), {}, STREAM)
    for words in (
        "lease of att_1", "start of att_1", "report of att_1", "failure of att_2", "score of att_1", "step 0 with b",
        "version 0 with", "checkpoint 1 with c",
    ):  # fmt: skip
        assert sum(words in line for line in missed) == 1, words
