"""The live picture fits where it must and keeps what matters."""

import itertools

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.observe.live_frame import MAX_WIDTH, frame
from steelyard.observe.progress import Progress, RunPlan
from steelyard.observe.rows import AnyRow, EnvironmentRow, StageName, StageRow
from steelyard.testing.metrics_rows import START_S, make_books, make_step, sample_run

PLAN = RunPlan(run_name="quickstart-003", max_steps=60, num_evaluations=8)


def progress_of(rows: list[AnyRow]) -> Progress:
    progress = Progress(PLAN, START_S)
    for row in rows:
        progress.take(row)
    return progress


def lines(progress: Progress, width: int = 80, height: int = 24) -> list[str]:
    return [line.plain for line in frame(progress, START_S + 187, width, height)]


MID_RUN = progress_of(sample_run(num_steps=23))
WHOLE_RUN = progress_of(sample_run())


def test_the_picture_of_a_run_in_the_middle() -> None:
    text = "\n".join(lines(MID_RUN))
    for part in (
        "Steelyard  quickstart-003", "3:07", "● train", "✓ start", "○ report", "23/60", "38%", "left (", "success ",
        "reward ", "first try", "had rewards that differ", "lag ", "tokens/s", "median", "tool calls", "step time",
        "█ rollouts", "▓ training", "bottleneck rollouts  the trainer waits", "held-out tasks, greedy",
        "0.41 (0.36 to 0.45) → …",
    ):  # fmt: skip
        assert part in text, part


def test_the_picture_of_a_finished_run_has_results_and_no_time_left() -> None:
    text = "\n".join(lines(WHOLE_RUN))
    assert "✓ done" in text and "60/60" in text and "left" not in text
    assert "held-out tasks, sampled   0.37 (0.32 to 0.42) → 0.82 (0.78 to 0.86)" in text


def test_the_evaluation_after_is_not_ticked_off_while_it_is_still_to_come() -> None:
    assert "○ evaluate" in lines(MID_RUN)[1]
    assert "✓ evaluate" in lines(WHOLE_RUN)[1]


@settings(deadline=None)
@given(st.integers(1, 260), st.integers(1, 60), st.sampled_from([0, 1, 2, 23]))
def test_it_always_fits_and_always_says_which_run(width: int, height: int, num_steps: int) -> None:
    picture = frame(progress_of(sample_run(num_steps=num_steps)), START_S, width, height)
    assert 1 <= len(picture) <= height
    assert all(line.cell_len <= min(width, MAX_WIDTH) for line in picture)
    assert "\n" not in "".join(line.plain for line in picture)
    assert picture[0].plain.startswith("Steelyard"[: max(1, width - 1)]) or width == 1


def test_in_a_small_window_the_main_numbers_stay() -> None:
    text = "\n".join(lines(MID_RUN, 40, 7))
    for part in ("23/60", "success", "tokens/s", "bottleneck"):
        assert part in text


def test_before_the_first_step_it_says_what_it_waits_for() -> None:
    progress = progress_of([StageRow(at_s=START_S, name=StageName.TRAIN)])
    text = lines(progress)
    assert any("waiting for the first batch" in line for line in text)
    assert any("time left not known yet" in line for line in text)
    assert not any(line == following == "" for line, following in itertools.pairwise(text))


def test_a_book_that_does_not_close_is_shown_even_where_there_is_little_room() -> None:
    progress = progress_of([*sample_run(num_steps=3), make_books(tokens_missing=5)])
    assert any("does not close" in line for line in lines(progress, 60, 5))


def test_failing_tools_are_shown_with_their_share() -> None:
    failing = EnvironmentRow(
        at_s=START_S,
        tool_p50_ms=3.0,
        tool_p99_ms=900.0,
        sandbox_start_p50_ms=None,
        failure_frac=0.2,
        timeout_frac=0.05,
    )
    silent = msgspec.structs.replace(failing, tool_p50_ms=None)
    assert any("25% failed" in line for line in lines(progress_of([failing])))
    assert not any("tool calls" in line for line in lines(progress_of([silent])))


@pytest.mark.parametrize("wall_s", [0.0, 1e-9])
def test_steps_that_took_no_time_at_all_are_no_problem(wall_s: float) -> None:
    step = msgspec.structs.replace(make_step(), wall_s=wall_s, wait_s=0.0, train_s=0.0)
    assert any("step time" in line for line in lines(progress_of([step])))


def test_names_from_outside_cannot_steer_the_terminal() -> None:
    progress = Progress(RunPlan(run_name="bad\x1b[2J\nname"), START_S)
    progress.take(StageRow(at_s=START_S, name=StageName.START, detail="two\nlines\x07"))
    assert not any(ord(char) < 32 for line in lines(progress) for char in line)
