"""Projected lengths of answers."""

from hypothesis import given
from hypothesis import strategies as st

from steelyard.inference.forecast import AnswerForecast


def test_all_that_is_asked_for_is_projected_until_there_are_enough_answers() -> None:
    forecast = AnswerForecast()
    for _ in range(15):
        forecast.note(1, 100)
    assert forecast.tokens(100) == 100
    forecast.note(1, 100)
    assert forecast.tokens(100) == 1
    assert forecast.tokens(1000) == 10


def test_four_of_five_answers_stay_within_their_projection() -> None:
    forecast = AnswerForecast()
    for used in range(1, 101):
        forecast.note(used, 100)
    assert 79 <= forecast.tokens(100) <= 81


def test_old_answers_are_forgotten() -> None:
    forecast = AnswerForecast()
    for _ in range(300):
        forecast.note(1, 100)
    for _ in range(300):
        forecast.note(90, 100)
    assert forecast.tokens(100) == 90


@given(answers=st.lists(st.tuples(st.integers(1, 50), st.integers(50, 60)), max_size=400), asked=st.integers(1, 10_000))
def test_a_projection_is_at_least_one_token_and_at_most_what_is_asked(
    answers: list[tuple[int, int]], asked: int
) -> None:
    forecast = AnswerForecast()
    for used, limit in answers:
        forecast.note(used, limit)
    assert 1 <= forecast.tokens(asked) <= asked
