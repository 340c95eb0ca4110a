"""Numbers, times and names as people read them; the same in the terminal and in the report."""

import math
import unicodedata
from collections.abc import Callable

from steelyard.observe.progress_estimate import TimeLeft
from steelyard.observe.rows import EvaluationSplit

MISSING = "–"
"""Stands where there is no number."""


def clean(text: str) -> str:
    """``text`` without control characters (escape sequences included), so that it cannot steer a terminal."""
    return "".join(char if char == "\n" or unicodedata.category(char)[0] != "C" else " " for char in text)


def one_line(text: str) -> str:
    """``text`` cleaned and without line ends."""
    return clean(text).replace("\n", " ")


def words(name: str) -> str:
    """An identifier as words: ``bad_call`` becomes ``bad call``."""
    return name.replace("_", " ")


def decimals(value: float | None, digits: int = 2) -> str:
    """A share, reward or the like with a fixed number of digits."""
    if value is None or not math.isfinite(value):
        return MISSING
    text = f"{value:.{digits}f}"
    return text.removeprefix("-") if float(text) == 0 else text


def signed(value: float | None, digits: int = 2) -> str:
    """A change, always with its sign."""
    text = decimals(value, digits)
    return text if text == MISSING or text.startswith("-") else f"+{text}"


def percent(value: float | None) -> str:
    """A share in whole per cent."""
    return MISSING if value is None or not math.isfinite(value) else f"{100 * value:.0f}%"


def integer(value: float | None) -> str:
    """A count with thousands apart."""
    return MISSING if value is None or not math.isfinite(value) else f"{value:,.0f}"


def significant(value: float | None, digits: int = 3) -> str:
    """A number of unknown size with ``digits`` significant digits; never more than it needs."""
    if value is None or not math.isfinite(value):
        return MISSING
    if value == 0:
        return "0"
    size = math.floor(math.log10(abs(value)))
    if -4 <= size < 0:
        return f"{value:.{digits - 1 - size}f}"
    if 0 <= size < 6:
        return f"{value:,.{max(0, digits - 1 - size)}f}"
    return f"{value:.{digits - 1}e}"


def duration(seconds: float | None) -> str:
    """A measured time: ``0.42 s``, ``8.1 s``, ``3 min 05 s``, ``2 h 07 min``."""
    if seconds is None or not math.isfinite(seconds):
        return MISSING
    if seconds < 0.095:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s" if seconds >= 0.995 else f"{seconds:.2f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min"


def stopwatch(seconds: float) -> str:
    """Time since the start: ``3:07`` or ``1:03:07``."""
    whole = max(0, int(seconds))
    hours, minutes = whole // 3600, whole // 60 % 60
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


def rough(seconds: float) -> str:
    """An estimated time, no finer than it can be known."""
    number, unit = _rough(seconds, round)
    return f"{number} {unit}"


def rough_range(low_s: float, high_s: float) -> str:
    """Bounds of an estimated time, rounded away from each other: ``3 to 5 min``."""
    low, low_unit = _rough(low_s, math.floor)
    high, high_unit = _rough(high_s, math.ceil)
    return f"{low} to {high} {high_unit}" if low_unit == high_unit else f"{low} {low_unit} to {high} {high_unit}"


def time_left(left: TimeLeft | None) -> str:
    """An estimate in words, with its bounds."""
    if left is None:
        return "time left not known yet"
    if left.is_late:
        return "time left unknown: this step takes far longer than the others"
    rest = ", and the evaluation" if left.without_evaluation else ""
    return f"about {rough(left.expected_s)} left ({rough_range(left.low_s, left.high_s)}){rest}"


def split_name(split: EvaluationSplit) -> str:
    """What an evaluation was on."""
    return "held-out tasks" if split is EvaluationSplit.HELDOUT else "unseen templates"


def _rough(seconds: float, to_whole: Callable[[float], int]) -> tuple[str, str]:
    if seconds < 57.5:
        return f"{max(5, 5 * to_whole(seconds / 5))}", "s"
    if seconds < 90 * 60:
        return f"{max(1, to_whole(seconds / 60))}", "min"
    return f"{to_whole(seconds / 360) / 10:.1f}", "h"
