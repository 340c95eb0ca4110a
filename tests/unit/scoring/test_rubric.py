import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.scoring.rubric import Part, weigh

PARTS = st.lists(
    st.builds(
        Part,
        name=st.sampled_from(["tests", "style"]),
        weight=st.floats(1e-6, 1e6),
        value=st.floats(0, 1),
    ),
    min_size=1,
    max_size=6,
)


def test_the_value_is_the_weighted_mean_and_the_line_shows_the_parts() -> None:
    parts = [Part(name="tests", weight=3, value=1.0), Part(name="short", weight=1, value=0.5)]
    assert weigh(parts) == (0.875, "tests=1 short=0.5")


@given(PARTS)
def test_the_value_lies_between_the_smallest_and_the_largest_part(parts: list[Part]) -> None:
    value, _ = weigh(parts)
    assert min(part.value for part in parts) - 1e-9 <= value <= max(part.value for part in parts) + 1e-9


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([], "at least one part"),
        ([Part(name="a", weight=0, value=1)], "'a': weight must be finite and > 0, got 0"),
        ([Part(name="a", weight=math.inf, value=1)], "'a': weight must be finite"),
        ([Part(name="a", weight=1, value=math.nan)], r"'a': value must lie in \[0, 1\], got nan"),
        ([Part(name="a", weight=1, value=1.5)], "got 1.5"),
    ],
)
def test_parts_that_make_no_sense_are_refused(parts: list[Part], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        weigh(parts)
