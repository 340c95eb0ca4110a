"""``steelyard check-template``: do the turns of a tokenizer's chat template extend each other, and what if not."""

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec

from steelyard.cli.train import Subparsers
from steelyard.errors import InputError
from steelyard.gateway.renderer import Renderer
from steelyard.gateway.template_check import Break, CaseResult, Report, check
from steelyard.gateway.tool_calls.choice import PARSERS
from steelyard.testing.families import families, write_family

_BUILTIN = "builtin:"
_WIDTH = 34
_MAX_SHOWN_CHARS = 60
_EXIT_BROKEN = 1
_REASONS = {
    "history_changed": "earlier messages are written in another way",
    "prompt_changed": "what asked for the reply is not what heads it later",
    "reasoning_dropped": "the reasoning is left out",
    "reply_changed": "the reply is written in other words",
    "no_end_of_turn": "the reply is not ended",
}


def add_parser(commands: "Subparsers[argparse.ArgumentParser]") -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "check-template",
        help="do the turns of a chat template extend each other, and what does it cost if not",
        description=(
            "Play conversations with the tokenizer and chat template of MODEL, without the model, and say where the "
            "prompt of a turn does not begin with all tokens of the turn before it. There a new segment starts: its "
            "prompt is computed and trained again. Exit code 0: all turns extend each other; 1: some do not."
        ),
    )
    names = ", ".join(_BUILTIN + name for name in families())
    parser.add_argument("models", metavar="MODEL", nargs="+", help=f"model directory, or one of {names}")
    parser.add_argument("--tool-parser", choices=list(PARSERS), help="as gateway.tool_parser (default: what fits)")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--table", action="store_true", help="print a Markdown table with a line for each MODEL")
    form.add_argument("--json", action="store_true", help="print a JSON object for each MODEL, one a line")
    parser.set_defaults(run_command=run)


def run(options: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    reports = [_report(model, options.tool_parser) for model in options.models]
    if options.json:
        shown = [msgspec.json.encode(report).decode("utf-8") for report in reports]
    elif options.table:
        shown = table(reports)
    else:
        shown = ["\n".join(lines(report)) + ("\n" if report is not reports[-1] else "") for report in reports]
    sys.stdout.write("\n".join(shown) + "\n")
    return 0 if all(report.is_whole for report in reports) else _EXIT_BROKEN


def _report(model: str, tool_parser: str | None) -> Report:
    if not model.startswith(_BUILTIN):
        directory = Path(model)
        if not directory.is_dir():
            raise InputError(f"MODEL must be a model directory or {_BUILTIN}NAME, and there is no directory {model}")
        return check(Renderer.load(directory, tool_parser), model)
    family = families().get(model.removeprefix(_BUILTIN))
    if family is None:
        raise InputError(f"{_BUILTIN}NAME must be one of {', '.join(families())}, got {model!r}")
    with tempfile.TemporaryDirectory() as scratch:
        return check(Renderer.load(write_family(Path(scratch), family), tool_parser), model)


def lines(report: Report) -> list[str]:
    """The report for people."""
    return [verdict(report), "", *_traits(report), "", *_cases(report), *_cost(report)]


def verdict(report: Report) -> str:
    """One sentence that says it all."""
    broken = [case for case in report.cases if case.breaks]
    if report.injections:
        return f"{report.model}: content can write control tokens"
    if not broken:
        return f"{report.model}: every turn extends the one before it"
    return f"{report.model}: turns break in {len(broken)} of {len(report.cases)} conversations"


def _traits(report: Report) -> list[str]:
    after = f", then {report.after_end!r}, which is never sampled and not trained" if report.after_end else ""
    others = [text for text in report.stop_texts if text != report.end_of_turn]
    rows = [
        ("tokenizer", f"{report.num_tokens} tokens, {len(report.control_texts)} of them control tokens"),
        ("end of a turn", report.end_of_turn + after),
        *([("also ends a turn", " ".join(others))] if others else []),
        ("tools", "shown to the model" if report.shows_tools else "NOT shown to the model: the template ignores them"),
        ("tool calls", _calls(report)),
        ("reasoning", _reasoning(report)),
        ("control strings", _injections(report)),
    ]
    return [f"{name:<17} {text}" for name, text in rows]


def _calls(report: Report) -> str:
    if report.calls_refusal is not None:
        return f"refused by the template: {report.calls_refusal}"
    how = f"parser {report.tool_parser}"
    if not report.writes_calls:
        return f"{how}, by default: the template writes no calls, so they are kept as text of the reply"
    how += ", which reads what the template writes" if report.is_parser_sure else ", which does NOT read what it writes"
    return how if report.takes_parallel_calls else how + "; one call in a message, more stay text"


def _reasoning(report: Report) -> str:
    if report.reasoning is None:
        return "not known to the template"
    off = "" if report.asks_for_reasoning else ", switched off: the prompt ends with the latter"
    return f"between {report.reasoning[0]} and {report.reasoning[1]}{off}"


def _injections(report: Report) -> str:
    if report.injections:
        return "become control tokens: " + "; ".join(report.injections)
    return f"stay text in all {report.num_injections_tried} places tried"


def _cases(report: Report) -> list[str]:
    found = [f"{'conversation':<{_WIDTH}} turns  segments"]
    explained: set[str] = set()
    for case in report.cases:
        found.append(f"{case.name:<{_WIDTH}} {case.num_turns:>5}  {case.num_segments:>8}  {_outcome(case)}".rstrip())
        for example in case.breaks:
            if example.reason not in explained:
                found += _example(example)
            explained.add(example.reason)
    return found


def _outcome(case: CaseResult) -> str:
    if case.refusal is not None:
        return f"refused in turn {case.num_turns + 1}: {case.refusal}"
    reasons = Counter(found.reason for found in case.breaks)
    text = "; ".join(_REASONS[reason] + (f" ({count} times)" if count > 1 else "") for reason, count in reasons.items())
    if case.num_malformed:
        text += ("; " if text else "") + "calls that cannot be read stay text"
    return text


def _example(found: Break) -> list[str]:
    place = f"      turn {found.turn}, token {found.position}:"
    return [f"{place} was {_short(found.before)}", f"{'':<{len(place)}} now {_short(found.after)}"]


def _short(text: str) -> str:
    shown = repr(text)
    return shown if len(shown) <= _MAX_SHOWN_CHARS else shown[: _MAX_SHOWN_CHARS - 4] + "...'"


def _cost(report: Report) -> list[str]:
    cost = report.cost
    if cost is None:
        return ["", "A typical episode cannot be played: the template refuses it."]
    return [
        "",
        f"A typical episode ({cost.num_turns} turns: two questions, three calls before each answer):",
        f"  segments                       {cost.num_segments}",
        f"  prompt tokens computed again   {cost.num_again} of {cost.num_computed} ({cost.again_frac:.0%})",
        f"  tokens in training sequences   {cost.num_trained}, {cost.trained_ratio:.1f} times those of one segment",
    ]


def table(reports: Sequence[Report]) -> list[str]:
    """A Markdown table with a line for each report."""
    head = (
        *("template", "after the end of a turn", "tool calls", "reasoning", "conversations whole", "why turns break"),
        *("segments of 8 turns", "prompt tokens computed again", "training tokens"),
    )
    return [_row(head), _row(["---"] * len(head)), *(_row(_cells(report)) for report in reports)]


def _cells(report: Report) -> list[str]:
    num_whole = sum(not case.breaks for case in report.cases)
    reasons = dict.fromkeys(found.reason for case in report.cases for found in case.breaks)
    calls = report.tool_parser if report.writes_calls else f"{report.tool_parser}, as text"
    cost = report.cost
    return [
        f"`{report.model}`",
        f"`{report.after_end!r}`" if report.after_end else "nothing",
        calls if report.takes_parallel_calls else f"{calls}, one a message",
        "unknown" if report.reasoning is None else f"`{report.reasoning[0]}`" if report.asks_for_reasoning else "off",
        f"{num_whole} of {len(report.cases)}",
        ", ".join(f"`{reason}`" for reason in reasons) or "they do not",
        *(["refused"] * 3 if cost is None else [str(cost.num_segments), f"{cost.again_frac:.0%}"]),
        *([] if cost is None else [f"{cost.trained_ratio:.1f}x"]),
    ]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
