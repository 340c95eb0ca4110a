"""The report is one well-formed, self-contained page, whatever the run left."""

import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest

from steelyard.errors import StorageFailed
from steelyard.observe.report import ReportInput, installed_versions, render_report, write_report
from steelyard.observe.rows import AnyRow, RunRows
from steelyard.testing.metrics_rows import START_S, make_books, make_step, sample_run


def input_of(rows: list[AnyRow], **more: object) -> ReportInput:
    values: dict[str, object] = {
        "rows": RunRows(rows=tuple(rows)),
        "run_name": "quickstart-003",
        "run_path": "runs/quickstart-003",
        "config_text": "train:\n  max_steps: 60\n",
        "versions": {"torch": "2.13"},
        "made_at_s": START_S + 900,
    }
    return ReportInput(**{**values, **more})  # type: ignore[arg-type]


class Page(HTMLParser):
    """Checks nesting while reading and collects what the tests ask for."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == [], f"still open at the end: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes.append((tag, dict(attrs)))
        if tag not in ("meta", "link", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> inside {self.open}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.attributes if name == tag]

    @property
    def words(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.text))


RUNS: dict[str, list[AnyRow]] = {
    "whole": sample_run(replicas=("rep_a", "rep_b")),
    "crashed": sample_run(num_steps=23),
    "one step": sample_run(num_steps=1),
    "no step": sample_run(num_steps=0),
    "no evaluation": [make_step(step, at_s=START_S + step) for step in range(3)],
    "only started": sample_run(num_steps=0)[:1],
    "nothing": [],
}


@pytest.mark.parametrize("name", RUNS)
def test_every_run_gives_a_well_formed_page_with_headings_and_alternatives(name: str) -> None:
    page = Page(render_report(input_of(RUNS[name])))
    assert page.tags["h1"] == 1 and page.tags["main"] == 1 and page.tags["title"] >= 1
    pictures = [one for one in page.all("svg") if one.get("role") == "img"]
    assert all(one["aria-label"] for one in pictures)
    assert page.tags["figure"] == len(pictures) == page.tags["figcaption"]
    assert all(one.get("scope") in ("col", "row") for one in page.all("th"))
    assert not re.search(r"\b(nan|inf|None|Undefined)\b", page.words)


@pytest.mark.parametrize("name", RUNS)
def test_the_page_needs_nothing_but_itself(name: str) -> None:
    text = render_report(input_of(RUNS[name]))
    page = Page(text)
    assert not re.search(r"https?:|@import|url\(|<script", text)
    assert [one.get("href") for one in page.all("link")] == ["data:,"]
    assert all((one.get("href") or "").startswith("#") for one in page.all("a"))
    identifiers = [one["id"] for _, one in page.attributes if one.get("id")]
    assert len(identifiers) == len(set(identifiers))
    assert {(one.get("href") or "")[1:] for one in page.all("a")} <= set(identifiers)


def test_a_whole_run_shows_its_result_its_books_and_how_to_look_further() -> None:
    words = Page(render_report(input_of(RUNS["whole"]))).words
    for part in (
        "Success on held-out tasks, sampled, rose from 0.37 to 0.82.", "finished", "Wrong text", "Prompts ✓ closes",
        "Tokens ✓ closes", "Learning", "Stability of training", "max_steps: 60", "torch", "late",
        "steelyard show runs/quickstart-003", "steelyard audit runs/quickstart-003", "2026-09-21 14:28 UTC",
    ):  # fmt: skip
        assert part in words, part
    assert "not finished" not in words


def test_a_crashed_run_says_where_it_stood_and_how_to_go_on() -> None:
    words = Page(render_report(input_of(RUNS["crashed"]))).words
    assert "This run has not finished. It was in the stage train, after step 23 of 60" in words
    assert "steelyard train --resume runs/quickstart-003" in words


def test_books_that_do_not_close_are_an_alarm_at_the_top() -> None:
    words = Page(render_report(input_of([*RUNS["whole"], make_books(tokens_missing=12)]))).words
    assert words.index("The book of tokens does not close: 12 tokens unaccounted for.") < words.index("Why attempts")


def test_rows_that_could_not_be_read_are_mentioned() -> None:
    whole = input_of(RUNS["one step"])
    rows = msgspec.structs.replace(whole.rows, num_skipped=2, first_problem="line 9: truncated")
    text = render_report(msgspec.structs.replace(whole, rows=rows))
    assert "2 could not be read (line 9: truncated)" in Page(text).words


def test_text_from_outside_is_text_and_never_markup() -> None:
    hostile = "<script>alert(1)</script>\"'&"
    report = input_of(
        [msgspec.structs.replace(row, causes={hostile: 3}) if hasattr(row, "causes") else row for row in RUNS["whole"]],
        run_name=hostile,
        run_path=hostile,
        config_text=hostile,
        versions={hostile: hostile},
    )
    page = Page(render_report(report))
    assert page.tags["script"] == 0
    assert page.words.count("alert(1)") >= 8


def test_the_same_input_gives_the_same_page() -> None:
    assert render_report(input_of(RUNS["whole"])) == render_report(input_of(RUNS["whole"]))


def test_a_very_long_run_gives_a_page_of_bounded_size() -> None:
    rows: list[AnyRow] = [make_step(step, at_s=START_S + step, max_steps=5000) for step in range(5000)]
    text = render_report(input_of(rows))
    assert len(text) < 600_000
    assert "steps between these are left out here" in text


def test_writing_replaces_the_old_report_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text("old")
    write_report(path, input_of(RUNS["one step"]))
    assert path.read_text(encoding="utf-8") == render_report(input_of(RUNS["one step"]))
    assert list(tmp_path.iterdir()) == [path]


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(StorageFailed, match=r"gone/report\.html must be writable, got: No such file"):
        write_report(tmp_path / "gone" / "report.html", input_of([]))


def test_versions_are_found_without_loading_the_libraries() -> None:
    versions = installed_versions("3.11.7", "Linux")
    assert versions["steelyard"] and versions["msgspec"] == msgspec.__version__
    assert versions["Python"] == "3.11.7" and versions["system"] == "Linux"
