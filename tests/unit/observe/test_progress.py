"""What the displays know, gathered row by row."""

import msgspec
import pytest

from steelyard.observe.progress import Progress, RunPlan
from steelyard.observe.rows import AnyRow, EvaluationLabel, EvaluationMode, EvaluationSplit, StageName, StageRow
from steelyard.testing.metrics_rows import START_S, make_engine, make_evaluations, make_step, sample_run


def progress_of(rows: list[AnyRow], plan: RunPlan | None = None) -> Progress:
    progress = Progress(plan or RunPlan(max_steps=60), START_S)
    for row in rows:
        progress.take(row)
    return progress


def test_nothing_is_known_before_the_first_row() -> None:
    progress = progress_of([])
    assert progress.last_step is None and progress.max_steps == 60 and progress.num_steps_done == 0
    assert progress.decode_tokens_per_s is None and progress.bottleneck() is None
    assert progress.success_change() is None and progress.time_left(START_S) is None


def test_a_whole_run_ends_with_all_it_showed() -> None:
    progress = progress_of(sample_run())
    assert progress.stage is StageName.DONE and progress.stages_seen == set(StageName)
    assert progress.num_steps_done == 60 and len(progress.evaluations) == 8
    bottleneck = progress.bottleneck()
    assert bottleneck is not None and bottleneck.name == "rollouts"


def test_a_resumed_step_supersedes_its_old_self() -> None:
    progress = progress_of([make_step(step) for step in (*range(5), 2)])
    assert [step.step for step in progress.steps] == [0, 1, 2]


def test_the_rate_is_the_sum_over_replicas_of_their_recent_means() -> None:
    rows: list[AnyRow] = []
    for number in range(10):
        row = make_engine("rep_a", at_s=START_S + number)
        rows.append(msgspec.structs.replace(row, decode_tokens_per_s=1000.0 if number >= 5 else 9.0))
    rows.append(msgspec.structs.replace(make_engine("rep_b"), decode_tokens_per_s=500.0))
    progress = progress_of(rows)
    assert progress.decode_tokens_per_s == pytest.approx(1500)
    assert [engine.replica_id for engine in progress.newest_engines] == ["rep_a", "rep_b"]


def test_the_change_of_success_compares_the_last_ten_steps_with_those_before() -> None:
    steps = [msgspec.structs.replace(make_step(n), success_frac=0.2 if n < 10 else 0.5) for n in range(20)]
    assert progress_of([*steps]).success_change() == pytest.approx(0.3)
    assert progress_of([*steps[:10]]).success_change() is None


def test_the_length_of_the_evaluation_before_predicts_the_one_after() -> None:
    plan = RunPlan(max_steps=10, num_evaluations=8)
    start = StageRow(at_s=START_S, name=StageName.EVALUATE)
    train = StageRow(at_s=START_S + 16, name=StageName.TRAIN)
    steps = [
        msgspec.structs.replace(make_step(number, at_s=START_S + 16 + 8 * (number + 1), max_steps=10), wall_s=8.0)
        for number in range(6)
    ]
    progress = progress_of([start, *make_evaluations(EvaluationLabel.BEFORE, at_s=START_S), train, *steps], plan)
    left = progress.time_left(steps[-1].at_s)
    assert left is not None and not left.without_evaluation
    assert left.expected_s == pytest.approx(4 * 8 + 4 * 4)


def test_an_ended_run_has_no_time_left() -> None:
    rows = sample_run(num_steps=20)
    progress = progress_of(rows)
    assert progress.time_left(rows[-1].at_s) is not None
    progress.has_ended = True
    assert progress.time_left(rows[-1].at_s) is None


def test_evaluations_are_kept_by_setting_and_the_newest_counts() -> None:
    rows = make_evaluations(EvaluationLabel.AFTER)
    again = msgspec.structs.replace(rows[0], num_success=1)
    progress = progress_of([*rows, again])
    key = (EvaluationSplit.HELDOUT, EvaluationMode.SAMPLED, EvaluationLabel.AFTER)
    assert progress.evaluations[key] is again and len(progress.evaluations) == 4
