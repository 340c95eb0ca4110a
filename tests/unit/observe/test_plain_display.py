"""Plain lines: one for each event, at a sensible pace, without control codes."""

import io

import msgspec

from steelyard.observe.display import show
from steelyard.observe.plain_display import PlainDisplay
from steelyard.observe.progress import RunPlan
from steelyard.observe.rows import AnyRow, StageName, StageRow
from steelyard.testing.manual_clock import ManualClock
from steelyard.testing.metrics_rows import (
    START_S,
    make_books,
    make_engine,
    make_environment,
    make_evaluation,
    make_step,
    sample_run,
)


def shown(rows: list[AnyRow], *, notes: tuple[str, ...] = ()) -> list[str]:
    """The lines that these rows make when each comes at its own time."""
    stream, clock = io.StringIO(), ManualClock(START_S)
    display = PlainDisplay(stream, clock, RunPlan(run_name="test", max_steps=60))
    for row in rows:
        clock.advance(max(0.0, row.at_s - clock.now_s()))
        show(display, row)
    for note in notes:
        display.note(note)
    display.close()
    assert not any(ord(char) < 32 and char != "\n" for char in stream.getvalue())
    return stream.getvalue().splitlines()


def test_a_whole_run_is_told_in_order() -> None:
    lines = shown(sample_run())
    assert lines[0] == "[0:00] prepare policy: from the cache"
    assert sum(": success" in line and "step " in line for line in lines) == 60
    assert sum("evaluation" in line for line in lines) == 8
    assert lines[-1].endswith("done")


def test_a_step_says_what_one_wants_to_know() -> None:
    rows: list[AnyRow] = [make_engine(at_s=START_S), *(make_step(n, at_s=START_S + 8 * (n + 1)) for n in range(6))]
    line = shown(rows)[-1]
    assert line.startswith("[0:48] step 6/60: success 0.")
    for part in ("reward 0.", "lag 0.", "tokens/s", "a step", "waiting for rollouts", "min left ("):
        assert part in line


def test_an_evaluation_has_its_interval_and_its_causes() -> None:
    (line,) = shown([make_evaluation(success_frac=0.8225)])
    assert line == (
        "[0:00] evaluation after, held-out tasks, sampled: success 329 of 400, 0.82 (0.78 to 0.86); "
        "failures: wrong text 28, wrong line 21, bad call 14, no submit 8"
    )


def test_an_evaluation_of_no_tasks_has_no_interval() -> None:
    (line,) = shown([make_evaluation(num_tasks=0)])
    assert line.endswith("success 0 of 0")


def test_fast_steps_are_thinned_out_but_the_first_and_the_last_are_told() -> None:
    lines = shown([make_step(n, at_s=START_S + n / 2, max_steps=40) for n in range(40)])
    told = [line.split("step ")[1].split("/")[0] for line in lines]
    assert told == ["1", "11", "21", "31", "40"]


def test_a_long_silence_is_broken_by_the_next_engine_row() -> None:
    rows: list[AnyRow] = [StageRow(at_s=START_S, name=StageName.TRAIN)]
    rows += [make_engine(at_s=START_S + second) for second in range(0, 65, 5)]
    lines = shown([*rows, make_environment(at_s=START_S + 65)])
    assert [line.split("]")[0] for line in lines] == ["[0:00", "[0:30", "[1:00"]
    assert "still in train: " in lines[1] and "running" in lines[1]


def test_books_are_mentioned_only_when_their_state_changes() -> None:
    rows = [make_books(), make_books(tokens_missing=7), make_books(tokens_missing=7), make_books()]
    lines = shown([*rows])
    assert lines == [
        "[0:00] the book of tokens does not close: 7 tokens unaccounted for",
        "[0:00] the books close again",
    ]


def test_a_note_of_several_lines_is_indented_and_cleaned() -> None:
    assert shown([], notes=("one\ntwo\x1b[31m", "")) == ["[0:00] one", "       two [31m", "[0:00] "]


def test_numbers_that_are_missing_are_dashes() -> None:
    row = msgspec.structs.replace(make_step(), success_frac=None, reward_mean=float("nan"))
    assert "success –, reward –," in shown([row])[0]
