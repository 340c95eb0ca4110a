"""Which plots a run gets."""

import msgspec

from steelyard.observe.charts import Chart
from steelyard.observe.rows import AnyRow, EngineRow
from steelyard.observe.run_charts import chart_groups
from steelyard.testing.metrics_rows import START_S, make_engine, make_step, sample_run


def charts(rows: list[AnyRow]) -> dict[str, Chart]:
    return {chart.title: chart for group in chart_groups(rows) for chart in group.charts}


def test_a_whole_run_has_every_plot() -> None:
    assert set(charts(sample_run())) == {
        "Success while training", "Mean reward", "Groups that teach", "Sampled tokens", "Policy lag", "Turns",
        "Time of a step", "Sampled tokens a second", "Time at work", "KV cache in use", "Prompt tokens reused",
        "Tool calls", "KL divergence", "Probability ratio", "Gradient norm", "Entropy", "Clipped tokens", "Loss",
        "Mismatch of engine local and trainer",
    }  # fmt: skip


def test_a_run_without_steps_has_no_empty_groups() -> None:
    assert chart_groups([]) == ()
    assert chart_groups(sample_run(num_steps=0)) == ()
    assert [group.anchor for group in chart_groups([make_engine()])] == ["speed"]


def test_one_step_is_enough_for_every_plot_of_steps() -> None:
    found = charts([make_step()])
    assert "Success while training" in found and "Time of a step" in found and "Loss" in found


def test_the_moving_mean_is_what_the_legend_names() -> None:
    chart = charts(sample_run())["Success while training"]
    assert [entry.name for entry in chart.legend] == ["success, mean of 5", "first try, mean of 5"]
    assert [shape.css for shape in chart.shapes] == ["faint c0", "line c0", "faint c1", "line c1"]


def test_a_long_run_is_smoothed_over_more_steps() -> None:
    rows: list[AnyRow] = [make_step(step, at_s=START_S + step, max_steps=400) for step in range(400)]
    assert charts(rows)["Mean reward"].legend[0].name == "reward, mean of 10"


def test_each_replica_has_its_own_line_and_the_rows_of_others_are_no_gaps_in_it() -> None:
    rows: list[AnyRow] = []
    for second in range(10):
        for replica, rate in (("rep_a", 1000.0), ("rep_b", 3000.0)):
            row = make_engine(replica, at_s=START_S + second)
            rows.append(msgspec.structs.replace(row, decode_tokens_per_s=rate))
    chart = charts(rows)["Sampled tokens a second"]
    assert [entry.name for entry in chart.legend] == ["rep_a", "rep_b"]
    assert [shape.path.count("M") for shape in chart.shapes] == [1, 1]
    assert chart.hovers[-1].text.endswith("rep_a 1,000, rep_b 3,000")


def test_of_very_many_replicas_some_are_shown_and_that_is_said() -> None:
    rows: list[AnyRow] = [make_engine(f"rep_{number}", at_s=START_S + number) for number in range(12)]
    chart = charts(rows)["Time at work"]
    assert len(chart.legend) == 7 and chart.note == "share, 7 of 12 replicas"


def test_steps_that_a_resume_replaced_are_not_drawn() -> None:
    rows = [make_step(step) for step in (0, 1, 2, 3, 1)]
    assert [hover.text.split(":")[0] for hover in charts([*rows])["Loss"].hovers] == ["step 0", "step 1"]


def test_a_divergence_that_is_not_finite_is_a_gap() -> None:
    rows = [msgspec.structs.replace(make_step(step), kl=None if step == 1 else 0.1) for step in range(3)]
    assert charts([*rows])["KL divergence"].shapes[0].path.count("M") == 2


def test_minutes_count_from_the_first_row_of_the_run() -> None:
    rows = [*sample_run(num_steps=0)[:1], make_engine(at_s=START_S + 60), make_engine(at_s=START_S + 120)]
    assert any(isinstance(row, EngineRow) for row in rows)
    assert charts(rows)["Time at work"].hovers[0].text.startswith("minute 1:")
