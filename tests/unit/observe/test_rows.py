"""Rows survive being written and read, and bad lines are skipped and counted."""

import re
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.metrics import MetricsFile
from steelyard.observe.rows import (
    AnyRow,
    BooksRow,
    EngineRow,
    EnvironmentRow,
    EvaluationRow,
    PredictionRow,
    PromptBook,
    StageRow,
    StepRow,
    TokenBook,
    decode_rows,
    kind_of,
    of_type,
    read_rows,
    surviving_steps,
    write_row,
)
from steelyard.testing.metrics_rows import START_S, make_step, sample_run

DOCS = Path(__file__).parents[3] / "docs" / "metrics.md"
KINDS: list[type[msgspec.Struct]] = [StageRow, StepRow, EngineRow, EnvironmentRow, BooksRow, EvaluationRow]


def written(path: Path, rows: list[AnyRow]) -> Path:
    file = MetricsFile(path)
    for row in rows:
        write_row(file, row)
    file.close()
    return path


def test_every_row_of_a_run_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    rows = sample_run(num_steps=7, max_steps=7)
    read = read_rows(written(tmp_path / "metrics.jsonl", rows))
    assert [msgspec.structs.replace(row, at_s=round(row.at_s, 3)) for row in rows] == list(read.rows)
    assert read.num_skipped == 0
    assert {type(row) for row in read.rows} == set(KINDS)


def test_a_torn_last_line_is_skipped_and_counted(tmp_path: Path) -> None:
    path = written(tmp_path / "metrics.jsonl", sample_run(num_steps=3))
    whole = read_rows(path)
    path.write_bytes(path.read_bytes()[:-20])
    torn = read_rows(path)
    assert torn.rows == whole.rows[:-1]
    assert torn.num_skipped == 1
    assert torn.first_problem.startswith(f"line {len(whole.rows)}:")


@settings(deadline=None)
@given(st.integers(min_value=0, max_value=2000))
def test_a_file_cut_at_any_byte_gives_the_rows_before_the_cut(length: int) -> None:
    rows = [make_step(step, at_s=START_S + step) for step in range(2)]
    lines = [msgspec.json.encode(row) for row in rows]
    data = b"\n".join(lines) + b"\n"
    read = decode_rows(data[:length])
    num_whole = sum(length >= sum(len(line) + 1 for line in lines[:count]) - 1 for count in (1, 2))
    assert list(read.rows) == rows[:num_whole]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b'{"kind":"weather","at_s":1.0}', "weather"),
        (b'{"kind":"stage","at_s":1.0}', "name"),
        (b'{"kind":"stage","at_s":1.0,"name":"lunch"}', "lunch"),
        (b"\xff\xfe", "line 1"),
        (b"[]", "line 1"),
    ],
)
def test_a_line_that_is_no_known_row_is_skipped_and_its_reason_kept(line: bytes, why: str) -> None:
    good = b'{"kind":"stage","at_s":1.0,"name":"train"}'
    read = decode_rows(line + b"\n\n" + good + b"\n")
    assert [kind_of(row) for row in read.rows] == ["stage"]
    assert read.num_skipped == 1
    assert why in read.first_problem


def test_fields_that_a_newer_version_added_are_ignored() -> None:
    read = decode_rows(b'{"kind":"stage","at_s":1.0,"name":"train","mood":"good"}\n')
    assert read.num_skipped == 0 and len(read.rows) == 1


def test_a_loss_that_is_not_a_number_is_written_and_read_as_missing(tmp_path: Path) -> None:
    row = msgspec.structs.replace(make_step(), loss=float("nan"), grad_norm=float("inf"))
    read = read_rows(written(tmp_path / "metrics.jsonl", [row]))
    (step,) = of_type(read.rows, StepRow)
    assert step.loss is None and step.grad_norm is None and step.kl is not None


def test_a_run_without_a_metrics_file_has_no_rows(tmp_path: Path) -> None:
    assert read_rows(tmp_path / "metrics.jsonl").rows == ()


def test_steps_that_a_resume_did_again_replace_all_that_came_after_them() -> None:
    first = [make_step(step, at_s=START_S + step) for step in range(6)]
    again = [make_step(step, at_s=START_S + 100 + step, seed=1) for step in range(3, 5)]
    assert surviving_steps([*first, *again]) == [*first[:3], *again]


def test_the_documentation_lists_every_field_of_every_row() -> None:
    text = DOCS.read_text()
    kinds: list[type[msgspec.Struct]] = [*KINDS, PredictionRow]
    for kind in kinds:
        name = str(kind.__struct_config__.tag)
        section = re.search(rf"^## `{name}`$(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
        assert section is not None, f"docs/metrics.md has no section on {name}"
        listed = set(re.findall(r"^\| `([a-z_0-9.]+)` \|", section[1], re.MULTILINE))
        fields = set(kind.__struct_fields__) - {"at_s"}
        if kind is BooksRow:
            fields = {"refused"}
            fields |= {f"prompts.{field}" for field in PromptBook.__struct_fields__}
            fields |= {f"tokens.{field}" for field in TokenBook.__struct_fields__}
        assert listed == fields, f"docs/metrics.md on {name}: {listed ^ fields}"
