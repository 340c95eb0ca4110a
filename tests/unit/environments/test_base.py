"""Options and the truncation rule."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.environments.base import parse_options, shorten
from steelyard.errors import ConfigError


class Options(msgspec.Struct, frozen=True):
    edit_discount: float = 0.25
    shown: int = 1


def test_options_are_read_with_defaults_for_the_rest() -> None:
    assert parse_options({"shown": 3}, Options) == Options(edit_discount=0.25, shown=3)


def test_an_unknown_option_is_an_error_that_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"environment\.options\.edit_discont: .*edit_discount"):
        parse_options({"edit_discont": 0.1}, Options)


def test_a_value_of_the_wrong_type_is_an_error_that_names_the_field() -> None:
    with pytest.raises(ConfigError, match=r"environment\.options: .*int.*shown"):
        parse_options({"shown": "many"}, Options)


def test_short_output_stays_as_it_is() -> None:
    assert shorten("abc", 3) == ("abc", 0)


def test_long_output_keeps_head_and_tail_and_says_how_much_is_missing() -> None:
    assert shorten("abcdefghij", 5) == ("abc[... 5 characters dropped ...]ij", 5)


@given(st.text(max_size=60), st.integers(0, 40))
def test_what_is_kept_and_what_is_dropped_add_up(text: str, max_chars: int) -> None:
    shown, num_dropped = shorten(text, max_chars)
    kept = shown.replace(f"[... {num_dropped} characters dropped ...]", "", 1) if num_dropped else shown
    assert len(kept) == min(len(text), max_chars)
    assert len(kept) + num_dropped == len(text)
    assert text.startswith(kept[: (len(kept) + 1) // 2])
    assert text.endswith(kept[(len(kept) + 1) // 2 :])
