"""The live display on an emulated terminal: one picture, no remains, and the cursor comes back."""

import io
import threading

import pytest

from steelyard.observe.display import show
from steelyard.observe.live_display import LiveDisplay, terminal_size
from steelyard.observe.live_frame import frame
from steelyard.observe.progress import Progress, RunPlan
from steelyard.observe.rows import StageName, StageRow
from steelyard.testing.manual_clock import ManualClock
from steelyard.testing.metrics_rows import START_S, make_engine, make_step, sample_run
from steelyard.testing.screen import Screen

PLAN = RunPlan(run_name="quickstart-003", max_steps=60, num_evaluations=8)


class Watched:
    """A display without a thread on an emulated terminal, drawn after each row."""

    def __init__(self, num_columns: int = 80, num_rows: int = 30) -> None:
        self.screen = Screen(num_columns, num_rows)
        self.clock = ManualClock(START_S)
        self.display = LiveDisplay(self.screen, self.clock, PLAN, size=self.screen.size, refresh_s=None)

    def play(self, num_steps: int) -> None:
        for row in sample_run(num_steps=num_steps):
            self.clock.advance(max(0.0, row.at_s - self.clock.now_s()))
            show(self.display, row)
            self.display.refresh()

    def count(self, text: str) -> int:
        return sum(text in line for line in (*self.screen.scrolled_off, *self.screen.lines()))


def test_many_drawings_leave_one_picture() -> None:
    watched = Watched()
    watched.play(23)
    assert watched.count("Steelyard  quickstart-003") == 1
    assert watched.count("23/60") == 1 and watched.count("22/60") == 0
    assert watched.screen.scrolled_off == []


def test_the_screen_shows_the_picture_and_nothing_else_even_when_lines_get_shorter_and_fewer() -> None:
    watched = Watched()
    progress = Progress(PLAN, START_S)
    for row in sample_run(num_steps=12):
        watched.clock.advance(max(0.0, row.at_s - watched.clock.now_s()))
        show(watched.display, row)
        progress.take(row)
        watched.display.refresh()
        picture = [line.plain.rstrip() for line in frame(progress, watched.clock.now_s(), 80, 29)]
        assert watched.screen.lines() == picture
    progress.has_ended = True
    watched.display.close()
    assert watched.screen.lines() == [line.plain.rstrip() for line in frame(progress, watched.clock.now_s(), 80, 29)]


def test_notes_scroll_away_above_the_picture_and_stay() -> None:
    watched = Watched(num_rows=28)
    watched.play(3)
    for number in range(12):
        watched.display.note(f"checkpoint {number}\nwritten")
        watched.display.refresh()
    everything = [*watched.screen.scrolled_off, *watched.screen.lines()]
    told = [line for line in everything if "checkpoint" in line]
    assert [line.split("checkpoint ")[1] for line in told] == [str(number) for number in range(12)]
    assert everything[everything.index(told[0]) + 1] == " " * len("[0:50] ") + "written"
    assert watched.count("Steelyard  quickstart-003") == 1


@pytest.mark.parametrize(("num_columns", "num_rows"), [(50, 30), (30, 12), (120, 40), (80, 12), (80, 50), (12, 4)])
def test_a_resized_terminal_shows_one_whole_picture(num_columns: int, num_rows: int) -> None:
    watched = Watched()
    watched.play(5)
    watched.display.note("kept")
    watched.display.refresh()
    watched.screen.resize(num_columns, num_rows)
    for _ in range(3):
        watched.display.refresh()
    lines = watched.screen.lines()
    assert sum(line.startswith("Steelyard") for line in lines) == 1
    assert sum("success" in line for line in lines) == 1
    assert len(lines) <= num_rows


def test_closing_gives_the_cursor_back_and_leaves_the_last_picture() -> None:
    watched = Watched()
    watched.play(5)
    assert not watched.screen.shows_cursor()
    watched.display.note("the last word")
    watched.display.close()
    assert watched.screen.shows_cursor()
    assert watched.count("5/60") == 1 and watched.count("the last word") == 1
    assert watched.count("left (") == 0
    watched.display.close()
    watched.display.step(make_step(9))
    assert watched.count("10/60") == 0


def test_the_thread_draws_without_being_asked_and_ends_with_close() -> None:
    screen = Screen(80, 30)
    display = LiveDisplay(screen, ManualClock(START_S), PLAN, size=screen.size, refresh_s=0.01)
    display.step(make_step(4))
    display.note("hello")
    display.close()
    assert any("5/60" in line for line in screen.lines())
    assert any("hello" in line for line in screen.lines())
    assert screen.shows_cursor()
    assert not any(thread.name == "display" for thread in threading.enumerate())


class BlockedScreen(Screen):
    """A terminal after Ctrl-S: it takes nothing until it is released."""

    def __init__(self) -> None:
        super().__init__(80, 30)
        self.entered, self.released = threading.Event(), threading.Event()

    def write(self, text: str) -> int:
        self.entered.set()
        self.released.wait(30)
        return super().write(text)


def test_a_terminal_that_takes_no_output_does_not_hold_the_run_up() -> None:
    screen = BlockedScreen()
    display = LiveDisplay(screen, ManualClock(START_S), PLAN, size=screen.size, refresh_s=0.01)
    assert screen.entered.wait(30)
    for number in range(100):
        display.step(make_step(number % 60))
        display.engine(make_engine())
        display.note(f"note {number}")
    display.stage(StageRow(at_s=START_S, name=StageName.DONE))
    screen.released.set()
    display.close()
    everything = [*screen.scrolled_off, *screen.lines()]
    assert sum("] note " in line for line in everything) == 100
    assert any("✓ done" in line for line in everything)


class GoneScreen(Screen):
    """A terminal that was closed."""

    num_writes = 0

    def write(self, text: str) -> int:
        self.num_writes += 1
        raise OSError(5, "Input/output error")


def test_a_terminal_that_is_gone_ends_the_display_and_not_the_run() -> None:
    screen = GoneScreen(80, 30)
    display = LiveDisplay(screen, ManualClock(START_S), PLAN, size=screen.size, refresh_s=None)
    display.refresh()
    display.step(make_step(1))
    display.refresh()
    display.close()
    assert screen.num_writes == 1


def test_a_stream_without_a_size_counts_as_80_by_24() -> None:
    assert terminal_size(io.StringIO()) == (80, 24)
