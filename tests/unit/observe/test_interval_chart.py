"""The plot of shares before and after."""

from steelyard.observe.interval_chart import Comparison, interval_chart
from steelyard.observe.statistics import wilson_interval

BEFORE, AFTER = wilson_interval(147, 400), wilson_interval(329, 400)


def test_both_shares_are_drawn_with_their_intervals_and_told_in_words() -> None:
    chart = interval_chart("Success", [Comparison(name="held-out, sampled", before=BEFORE, after=AFTER)])
    assert chart is not None
    assert [shape.css for shape in chart.shapes] == [
        "link",
        "whisker before",
        "dot before",
        "whisker after",
        "dot after",
    ]
    assert chart.alt == "Success. held-out, sampled: before 0.37 (0.32 to 0.42), after 0.82 (0.78 to 0.86)."


def test_one_side_alone_has_no_link_and_neither_side_no_line() -> None:
    chart = interval_chart(
        "Success",
        [Comparison(name="a", before=BEFORE, after=None), Comparison(name="b", before=None, after=None)],
    )
    assert chart is not None
    assert [shape.css for shape in chart.shapes] == ["whisker before", "dot before"]
    assert [label.text for label in chart.labels] == ["a"]


def test_nothing_to_compare_gives_no_chart() -> None:
    assert interval_chart("Success", []) is None
    assert interval_chart("Success", [Comparison(name="a", before=None, after=None)]) is None


def test_the_picture_grows_with_its_lines() -> None:
    one = Comparison(name="a", before=BEFORE, after=AFTER)
    single, double = interval_chart("Success", [one]), interval_chart("Success", [one, one])
    assert single is not None and double is not None
    assert double.height > single.height and double.bottom <= double.height
