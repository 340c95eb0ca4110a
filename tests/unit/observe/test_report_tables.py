"""What the report says in words and tables."""

import msgspec
import pytest

from steelyard.observe.report_tables import (
    cause_tables,
    comparisons,
    facts,
    headline,
    newest_evaluations,
    status,
    step_table,
    verdicts,
)
from steelyard.observe.rows import AnyRow, EvaluationLabel, EvaluationMode, StageName, StageRow, StepRow
from steelyard.testing.metrics_rows import START_S, make_evaluation, make_evaluations, make_step, sample_run

BEFORE, AFTER = EvaluationLabel.BEFORE, EvaluationLabel.AFTER


def pair(before: float, after: float, mode: EvaluationMode = EvaluationMode.SAMPLED) -> list[AnyRow]:
    return [make_evaluation(label, mode, success_frac=frac) for label, frac in ((BEFORE, before), (AFTER, after))]


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [(0.37, 0.82, "rose from 0.37 to 0.82"), (0.6, 0.4, "fell from 0.60 to 0.40"), (0.5, 0.52, "which may be chance")],
)
def test_the_headline_claims_no_more_than_the_interval_allows(before: float, after: float, words: str) -> None:
    assert words in headline(newest_evaluations(pair(before, after)), [])


def test_the_headline_falls_back_to_what_there_is() -> None:
    greedy = newest_evaluations(pair(0.4, 0.8, EvaluationMode.GREEDY))
    assert headline(greedy, []) == "Success on held-out tasks, greedy, rose from 0.40 to 0.80."
    steps = [msgspec.structs.replace(make_step(step), success_frac=frac) for step, frac in ((0, 0.3), (1, 0.5))]
    assert "from 0.30 to 0.50; not evaluated after" in headline({}, steps)
    assert "no result yet" in headline({}, [])


def test_a_repeated_evaluation_replaces_its_old_self() -> None:
    rows = [*pair(0.37, 0.5), *pair(0.37, 0.82)[1:]]
    (verdict,) = verdicts(newest_evaluations(rows))
    assert (verdict.before, verdict.after) == ("0.37", "0.82")
    assert verdict.gain.startswith("+0.45 (+0.39 to +0.5")


def test_every_setting_has_a_verdict_and_a_line_in_the_plot() -> None:
    evaluations = newest_evaluations([*make_evaluations(BEFORE), *make_evaluations(AFTER)])
    names = [verdict.name for verdict in verdicts(evaluations)]
    assert names == [
        "Held-out tasks, sampled", "Held-out tasks, greedy", "Unseen templates, sampled", "Unseen templates, greedy",
    ]  # fmt: skip
    assert [one.name.lower() for one in comparisons(evaluations)] == [name.lower() for name in names]


def test_an_evaluation_before_alone_has_no_gain() -> None:
    (verdict,) = verdicts(newest_evaluations(pair(0.37, 0.82)[:1]))
    assert (verdict.after, verdict.gain) == ("–", "")


def test_failures_are_listed_by_cause_the_commonest_first() -> None:
    (table,) = cause_tables(newest_evaluations(pair(0.3675, 0.8225)))
    assert table.columns == ("Sampled, before", "Sampled, after")
    assert table.rows[0] == ("Wrong text", ("101 (0.25)", "28 (0.07)"))
    assert [name for name, _ in table.rows] == ["Wrong text", "Wrong line", "Bad call", "No submit"]
    totals = dict(table.total_rows)
    assert totals["Solved"] == ("147 (0.37)", "329 (0.82)") and totals["Tasks"] == ("400", "400")
    assert totals["Solved, of those"] == ("0.48", "0.81")


def test_failures_without_a_cause_are_shown_and_not_hidden() -> None:
    row = msgspec.structs.replace(make_evaluation(success_frac=0.5), causes={"bad_call": 150})
    (table,) = cause_tables(newest_evaluations([row]))
    assert table.rows[-1] == ("Without a cause", ("50 (0.12)",))


def test_the_run_in_a_few_numbers() -> None:
    found = {fact.name: fact.value for fact in facts(sample_run())}
    assert found["optimizer steps"] == "60 of 60" and found["trajectories"] == "11,520"
    assert found["highest lag"] == "1" and found["bottleneck"] == "rollouts"
    assert found["time"].startswith("7 min")
    assert facts([]) == ()


def test_a_resumed_run_says_so() -> None:
    rows = [StageRow(at_s=START_S + n, name=StageName.START) for n in range(3)]
    assert facts([*rows])[0].detail == "resumed 2 times, pauses included"


@pytest.mark.parametrize(
    ("rows", "is_finished", "words"),
    [
        ([], False, "no rows"),
        (sample_run(num_steps=0)[:1], False, "in the stage prepare policy, before its first step"),
        (sample_run(num_steps=23), False, "in the stage train, after step 23 of 60"),
        ([make_step(4)], False, "before its first stage, after step 5 of 60"),
        (sample_run(), True, ""),
        ([StageRow(at_s=START_S, name=StageName.REPORT)], True, ""),
    ],
)
def test_the_status_says_how_far_the_run_came(rows: list[AnyRow], is_finished: bool, words: str) -> None:
    found = status(rows)
    assert found.is_finished == is_finished and words in found.detail


def test_the_table_of_a_long_run_has_every_nth_step_and_the_last() -> None:
    steps: list[StepRow] = [make_step(step, max_steps=950) for step in range(950)]
    table = step_table(steps)
    assert len(table.rows) <= 201 and table.rows[0][0] == "0" and table.rows[-1][0] == "949"
    assert table.num_left_out == 950 - len(table.rows)
    assert all(len(row) == len(table.columns) for row in table.rows)
    assert step_table([]).rows == () and step_table(steps[:200]).num_left_out == 0
