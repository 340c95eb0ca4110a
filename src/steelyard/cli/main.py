"""``steelyard``: parses the command line and turns errors into messages and exit codes.

Exit codes: 0 done, 1 a check failed, 2 bad input, 3 the run failed and can be resumed, 130 interrupted.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence

from steelyard import __version__
from steelyard.cli import (
    audit,
    calibrate,
    cancel,
    capacity,
    check_template,
    coordinator,
    doctor,
    evaluate,
    key,
    plan,
    scorer,
    show,
    simulate,
    sweep,
    train,
    whatif,
    worker,
)
from steelyard.errors import InputError, SteelyardError

EXIT_DONE = 0
EXIT_CHECK_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_RUN_FAILED = 3
EXIT_INTERRUPTED = 130

_COMMANDS = (
    *(train, evaluate, audit, show, doctor, sweep, cancel, check_template),
    *(coordinator, key, worker, scorer),
    *(capacity, plan, simulate, whatif, calibrate),
)

_DESCRIPTION = """\
Train LLM agents that call tools, and prove where every trained token came from.

  steelyard train examples/quickstart.yaml      the whole loop, on a plain CPU
  steelyard show RUN                            what the agent did, one rollout at a time
  steelyard audit RUN                           prove the run from its journal and stores alone
  steelyard plan run.yaml                       how to share out the devices
  steelyard simulate run.yaml                   what an allocation would achieve, without any device
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. Never raises for bad input or a failed run."""
    parser = _parser()
    options = _parse(parser, arguments)
    if options.command is None:
        parser.print_help()
        return EXIT_BAD_INPUT
    command: Callable[[argparse.Namespace], int] = options.run_command
    return exit_code(lambda: command(options))


def exit_code(command: Callable[[], int]) -> int:
    """The exit code of ``command``; what it raises on purpose is one line on standard error."""
    try:
        code = command()
        sys.stdout.flush()
        return code
    except InputError as error:
        return _complain(str(error), EXIT_BAD_INPUT)
    except SteelyardError as error:
        return _complain(str(error), EXIT_RUN_FAILED)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader (head, less) has seen enough; the interpreter must not complain while it flushes the rest.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_DONE


def _parse(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse; overrides may stand behind options, where argparse takes no more positional arguments."""
    options, rest = parser.parse_known_args(arguments)
    if rest:
        if "overrides" not in options or any(word.startswith("-") for word in rest):
            parser.error(f"unrecognized arguments: {' '.join(rest)}")
        options.overrides = [*options.overrides, *rest]
    return options


def _complain(message: str, code: int) -> int:
    sys.stderr.write(f"steelyard: {message}\n")
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="steelyard", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"steelyard {__version__}")
    commands = parser.add_subparsers(dest="command", title="commands", metavar="COMMAND")
    for module in _COMMANDS:
        module.add_parser(commands)
    return parser
