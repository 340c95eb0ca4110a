import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.gateway.dialects.thinking import ThinkingSplitter, joined, signature_of

PIECES = st.sampled_from(["<think>", "</think>", "\n", "\n\n", " ", "why", "<", "think>", "</th", "é"])


def split(text: str, cuts: list[int], *, is_open: bool = False) -> list[tuple[str, str]]:
    splitter = ThinkingSplitter(is_open=is_open)
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    parts = [part for start, end in itertools.pairwise(bounds) for part in splitter.push(text[start:end])]
    merged: list[tuple[str, str]] = []
    for kind, piece in (*parts, *splitter.finish()):
        if merged and merged[-1][0] == kind:
            merged[-1] = (kind, merged[-1][1] + piece)
        else:
            merged.append((kind, piece))
    return merged


def sampled(parts: list[tuple[str, str]]) -> str:
    """The text that a client's blocks mean when they come back."""
    text, thinking = "", ""
    for kind, piece in parts:
        if kind == "thinking":
            thinking = piece
        elif kind == "signature":
            text += joined(thinking, piece)
        else:
            text += piece
    return text


@pytest.mark.parametrize(
    ("text", "is_open", "parts"),
    [
        ("<think>\nwhy\n</think>\n\nyes", False, [("thinking", "why"), ("text", "yes")]),
        ("why</think>yes", True, [("thinking", "why"), ("text", "yes")]),
        ("<think>cut off", False, [("thinking", "cut off")]),
        ("<think>\n\n</think>\n\nyes", False, [("text", "yes")]),
        ("yes</think>", False, [("text", "yes</think>")]),
        (" <b>", False, [("text", " <b>")]),
        ("", False, []),
    ],
)
def test_reasoning_is_told_from_the_answer(text: str, is_open: bool, parts: list[tuple[str, str]]) -> None:
    assert [part for part in split(text, [], is_open=is_open) if part[0] != "signature"] == parts


@given(st.lists(PIECES, max_size=12).map("".join), st.lists(st.integers(0, 60), max_size=8), st.booleans())
def test_parts_are_exactly_what_was_sampled_however_it_was_cut(text: str, cuts: list[int], is_open: bool) -> None:
    assert split(text, cuts, is_open=is_open) == split(text, [], is_open=is_open)
    assert sampled(split(text, cuts, is_open=is_open)) == text


@pytest.mark.parametrize("signature", ["", "EqQBCgIYAh", "é", "bm90IGpzb24="])
def test_reasoning_that_is_not_ours_gets_the_usual_marks(signature: str) -> None:
    assert joined("why", signature) == "<think>\nwhy\n</think>\n\n"


def test_a_signature_holds_the_marks() -> None:
    assert joined("why", signature_of("<think>", "</think>")) == "<think>why</think>"
