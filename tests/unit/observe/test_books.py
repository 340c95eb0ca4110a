"""The books are shown as they are: closing, or by how much not."""

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.observe.books import open_books, prompt_table, token_table
from steelyard.observe.rows import PromptBook, TokenBook
from steelyard.testing.metrics_rows import make_books

counts = st.integers(0, 10**9)
reasons = st.dictionaries(st.sampled_from(["stale", "ratio", "lease_expired", "incomplete"]), counts)


def test_books_that_close_raise_no_alarm() -> None:
    assert open_books(make_books()) == []


def test_a_missing_token_is_named_with_its_number() -> None:
    assert open_books(make_books(tokens_missing=12)) == ["the book of tokens does not close: 12 tokens unaccounted for"]


def test_a_prompt_in_two_places_is_counted_twice() -> None:
    row = make_books()
    row = msgspec.structs.replace(row, prompts=msgspec.structs.replace(row.prompts, trained=row.prompts.trained + 1))
    assert open_books(row) == ["the book of prompts does not close: 1 prompts counted twice"]


@settings(deadline=None)
@given(counts, counts, counts, reasons)
def test_the_gap_of_the_prompts_is_what_the_right_side_lacks(
    issued: int, trained: int, live: int, dropped: dict[str, int]
) -> None:
    table = prompt_table(PromptBook(issued=issued, trained=trained, dropped=dropped, live=live))
    assert table.gap == issued - trained - live - sum(dropped.values())
    assert table.closes == (table.gap == 0)


@settings(deadline=None)
@given(counts, counts, reasons, reasons)
def test_reasons_are_listed_below_their_sum_and_not_added_again(
    trained: int, in_flight: int, rejected: dict[str, int], lost: dict[str, int]
) -> None:
    recorded = trained + 5 + in_flight + sum(rejected.values()) + sum(lost.values())
    book = TokenBook(recorded=recorded, trained=trained, evaluated=5, rejected=rejected, in_flight=in_flight, lost=lost)
    table = token_table(book)
    assert table.closes and table.total == recorded
    assert [line.name for line in table.lines if not line.is_reason] == [
        "trained", "evaluated", "rejected", "in flight", "lost",
    ]  # fmt: skip
    assert sum(line.count for line in table.lines if line.is_reason) == sum(rejected.values()) + sum(lost.values())
