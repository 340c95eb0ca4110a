"""Which display a stream gets."""

import io

import pytest

from steelyard.observe.display import Display, DisplayKind, QuietDisplay, can_be_live, make_display, show
from steelyard.observe.live_display import LiveDisplay
from steelyard.observe.plain_display import PlainDisplay
from steelyard.testing.manual_clock import ManualClock
from steelyard.testing.metrics_rows import sample_run
from steelyard.testing.screen import Screen


class AsciiTerminal(io.TextIOWrapper):
    """A terminal that shows no block characters."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO(), encoding="ascii")

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _smart_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")


@pytest.mark.parametrize(
    ("kind", "is_terminal", "expected"),
    [
        ("auto", True, LiveDisplay),
        ("auto", False, PlainDisplay),
        ("plain", True, PlainDisplay),
        ("live", False, LiveDisplay),
        ("quiet", True, QuietDisplay),
    ],
)
def test_the_display_follows_the_setting_and_the_stream(
    kind: DisplayKind, is_terminal: bool, expected: type[Display]
) -> None:
    stream = Screen(80, 24) if is_terminal else io.StringIO()
    display = make_display(kind, stream, ManualClock())
    display.close()
    assert type(display) is expected


def test_a_dumb_terminal_and_one_without_unicode_get_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    assert can_be_live(Screen(80, 24))
    assert not can_be_live(AsciiTerminal())
    monkeypatch.setenv("TERM", "dumb")
    assert not can_be_live(Screen(80, 24))


def test_the_quiet_display_takes_everything_and_shows_nothing() -> None:
    stream = io.StringIO()
    display = make_display("quiet", stream, ManualClock())
    for row in sample_run(num_steps=2, max_steps=2):
        show(display, row)
    display.note("hello")
    display.close()
    assert stream.getvalue() == ""
