"""``steelyard check-template``, as it is typed."""

from pathlib import Path

import msgspec
import pytest

from steelyard.cli.main import main
from steelyard.testing.families import families, write_family
from steelyard.testing.tokenizer import write_tokenizer

DOCS = Path(__file__).parents[3] / "docs" / "templates.md"
BUILTINS = [f"builtin:{name}" for name in families()]


def test_a_template_whose_turns_extend_each_other_is_whole(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["check-template", str(write_tokenizer(tmp_path))]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"{tmp_path}: every turn extends the one before it\n")
    assert "<|im_end|>, then '\\n', which is never sampled and not trained" in shown
    assert "parser hermes, which reads what the template writes" in shown
    assert "stay text in all" in shown
    assert "computed again   0 of" in shown


def test_where_turns_break_is_shown_with_the_tokens_that_differ(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-template", "builtin:qwen3"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "builtin:qwen3: turns break in 2 of 15 conversations"
    at = next(number for number, line in enumerate(lines) if line.startswith("reasoning  ") and "4         4" in line)
    assert lines[at].endswith("the reasoning is left out (3 times)")
    assert "turn 2, token" in lines[at + 1]
    assert "was '<think>\\nFirst" in lines[at + 1]
    assert "now 'It is a - b.<|im_end|>" in lines[at + 2]


def test_the_json_says_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-template", "--json", "builtin:chatml", "builtin:deepseek_r1"]) == 1
    whole, broken = [msgspec.json.decode(line) for line in capsys.readouterr().out.splitlines()]
    assert (whole["model"], whole["after_end"], whole["cost"]["num_segments"]) == ("builtin:chatml", "\n", 1)
    assert not any(case["breaks"] for case in whole["cases"])
    assert all(case["breaks"] for case in broken["cases"])
    assert broken["tool_parser"] == "deepseek"
    cost = broken["cost"]
    assert 0 < cost["num_again"] < cost["num_computed"]
    assert cost["num_trained"] > cost["num_once"]


def test_a_template_that_writes_no_calls_and_shows_no_tools_is_said_to(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-template", "builtin:chatml_plain"]) == 0
    shown = capsys.readouterr().out
    assert "NOT shown to the model: the template ignores them" in shown
    assert "the template writes no calls, so they are kept as text of the reply" in shown


def test_what_the_template_refuses_is_said_in_its_words(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    source = families()["chatml"].template.replace(
        "{%- set system", "{%- if tools %}{{ raise_exception('no tools here') }}{%- endif %}{%- set system", 1
    )
    family = msgspec.structs.replace(families()["chatml"], template=source)
    assert main(["check-template", str(write_family(tmp_path, family))]) == 0
    shown = capsys.readouterr().out
    assert "refused by the template: the chat template refuses these messages: no tools here" in shown
    assert "refused in turn 1: the chat template refuses these messages: no tools here" in shown
    assert "A typical episode cannot be played: the template refuses it." in shown


def test_another_parser_can_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-template", "--tool-parser", "llama3", "--json", "builtin:chatml"]) == 0
    (report,) = [msgspec.json.decode(line) for line in capsys.readouterr().out.splitlines()]
    assert (report["tool_parser"], report["is_parser_sure"]) == ("llama3", False)


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("nowhere", "there is no directory nowhere"),
        ("builtin:gpt", "must be one of chatml, chatml_plain, llama3"),
        (".", "a model directory must hold tokenizer.json"),
    ],
)
def test_a_model_that_is_none_is_bad_input(
    model: str, says: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["check-template", model]) == 2
    captured = capsys.readouterr()
    assert says in captured.err
    assert captured.out == ""
    assert "Traceback" not in captured.err


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{% if %}", "cannot be compiled"),
        ("{{ raise_exception('never') }}", "the chat template refuses these messages: never"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "must end an assistant message with a control token"),
    ],
)
def test_a_template_that_cannot_be_used_is_bad_input(
    template: str, says: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["check-template", str(write_tokenizer(tmp_path, template))]) == 2
    assert says in capsys.readouterr().err


def test_the_table_of_the_docs_is_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-template", "--table", *BUILTINS]) == 1
    assert capsys.readouterr().out in DOCS.read_text("utf-8")
