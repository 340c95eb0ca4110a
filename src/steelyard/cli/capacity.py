"""``steelyard capacity``: how many slots a stage needs, by Little's law and what comes on top of it."""

import argparse
import sys

import msgspec

from steelyard.allocation.capacity import CapacityAnswer, CapacityQuestion, answer
from steelyard.cli.train import Subparsers


def add_parser(commands: "Subparsers[argparse.ArgumentParser]") -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "capacity",
        help="how many slots a stage needs: on average, for waits, bursts and failures",
        description=(
            "A slot serves one request at a time: a sandbox, a grader, a sequence in an engine. Says how many are "
            "busy on average, and how many it takes so that requests seldom wait and hosts may fail."
        ),
    )
    parser.add_argument("--rate", type=float, required=True, metavar="R", help="requests per second, on average")
    parser.add_argument("--time", type=float, required=True, metavar="S", help="mean seconds that one takes a slot")
    for name, default, metavar, text in (
        ("cv", 1.0, "X", "spread of that time over its mean"),
        ("wait", 1.0, "S", "seconds that few may wait longer than"),
        ("quantile", 0.99, "Q", "share of the requests that must not"),
        ("burst", 1.0, "F", "arrivals in a burst over the average"),
        ("burst-s", 0.0, "S", "how long a burst lasts"),
        ("slots-per-host", 1, "N", "slots that fail together"),
        ("failures", 0, "N", "hosts that may be down"),
    ):
        kind, words = type(default), f"{text} ({default:g})"
        parser.add_argument(f"--{name}", type=kind, default=default, metavar=metavar, help=words)
    parser.add_argument("--json", action="store_true", help="print the answer as JSON")
    parser.set_defaults(run_command=run)


def run(options: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    question = CapacityQuestion(
        rate_per_s=options.rate,
        service_s=options.time,
        service_cv=options.cv,
        wait_s=options.wait,
        quantile=options.quantile,
        burst_factor=options.burst,
        burst_s=options.burst_s,
        slots_per_host=options.slots_per_host,
        failed_hosts=options.failures,
    )
    found = answer(question)
    if options.json:
        sys.stdout.write(msgspec.json.encode(found).decode() + "\n")
    else:
        sys.stdout.write("\n".join(_lines(question, found)) + "\n")
    return 0


def _lines(question: CapacityQuestion, found: CapacityAnswer) -> list[str]:
    percent = f"p{question.quantile * 100:g}"
    lines = [
        f"{found.busy_slots:,.6g} slots are busy on average "
        f"({question.rate_per_s:g} requests/s of {question.service_s:g} s)",
        f"{found.slots_for_wait:,} so that the {percent} wait is at most {question.wait_s:g} s "
        f"(it is {found.wait_quantile_s:.3g} s; {found.wait_prob:.0%} wait at all)",
    ]
    if question.burst_factor > 1.0 and question.burst_s > 0.0:
        lines.append(
            f"{found.slots_for_burst:,} so that it is after a burst of {question.burst_s:g} s at "
            f"{question.burst_factor:g} times the rate, too"
        )
    if question.slots_per_host > 1 or question.failed_hosts:
        lines.append(
            f"{found.num_slots:,} on {found.num_hosts:,} hosts of {question.slots_per_host:,}, of which "
            f"{question.failed_hosts:,} may be down"
        )
    lines.append(f"{found.utilisation:.0%} of them are busy on average")
    return lines
