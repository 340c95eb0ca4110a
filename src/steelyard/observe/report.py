"""The report of a run: one static HTML file that needs nothing but itself, from whatever rows there are."""

from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import msgspec

from steelyard.observe import report_tables
from steelyard.observe.books import BookTable, prompt_table, token_table
from steelyard.observe.interval_chart import interval_chart
from steelyard.observe.page import moment, page_template, write_page
from steelyard.observe.report_tables import Fact
from steelyard.observe.rows import BooksRow, RunRows, of_type, surviving_steps
from steelyard.observe.run_charts import chart_groups
from steelyard.observe.wording import integer, words

_LIBRARIES = ("steelyard", "torch", "transformers", "tokenizers", "numpy", "aiohttp", "msgspec")


class ReportInput(msgspec.Struct, frozen=True, kw_only=True):
    """All that goes into a report.

    Args:
        rows: the run's ``metrics.jsonl``.
        run_name: the run's name.
        run_path: the run directory as a user would type it.
        config_text: the resolved configuration, as YAML.
        versions: version of each library by name, the interpreter and the platform among them.
        made_at_s: when the report is made, in seconds since the Unix epoch.
    """

    rows: RunRows
    run_name: str
    run_path: str
    config_text: str
    versions: Mapping[str, str]
    made_at_s: float


def render_report(report: ReportInput) -> str:
    """The report as HTML. The same input gives the same text."""
    rows = report.rows.rows
    steps = surviving_steps(rows)
    evaluations = report_tables.newest_evaluations(rows)
    books = of_type(rows, BooksRow)
    return page_template("report.html.jinja").render(
        report=report,
        status=report_tables.status(rows),
        headline=report_tables.headline(evaluations, steps),
        started=moment(rows[0].at_s) if rows else "",
        made=moment(report.made_at_s),
        verdicts=report_tables.verdicts(evaluations),
        intervals=interval_chart("Success before and after", report_tables.comparisons(evaluations)),
        facts=report_tables.facts(rows),
        causes=report_tables.cause_tables(evaluations),
        groups=chart_groups(rows),
        books=_books(books[-1]) if books else (),
        refused=_refused(books[-1]) if books else (),
        steps=report_tables.step_table(steps),
        integer=integer,
    )


def write_report(path: Path, report: ReportInput) -> None:
    """Render and put the report in place in one move, so that an old one is never half replaced.

    Raises:
        StorageFailed: the disk refuses.
    """
    write_page(path, render_report(report))


def installed_versions(python: str, platform: str) -> dict[str, str]:
    """Versions of what a run stands on, without importing any of it.

    Args:
        python: version of the interpreter.
        platform: name of the machine's system.
    """
    versions = {}
    for name in _LIBRARIES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return {**versions, "Python": python, "system": platform}


def _books(row: BooksRow) -> tuple[BookTable, ...]:
    return (prompt_table(row.prompts), token_table(row.tokens))


def _refused(row: BooksRow) -> tuple[Fact, ...]:
    reasons = sorted(row.refused.items(), key=lambda item: (-item[1], item[0]))
    return tuple(Fact(name=words(reason), value=integer(count)) for reason, count in reasons if count)
