"""``python -m steelyard.testing.faultsim --seed N``: replay one seed and print its trace."""

import argparse
import sys
from collections.abc import Sequence

from steelyard.testing.faultsim.world import simulate


def main(arguments: Sequence[str] | None = None) -> int:
    """Replay; the exit code is 1 where the seed fails. ``arguments``: instead of those of the command line."""
    parser = argparse.ArgumentParser(prog="faultsim", description="Replay one seed of the fault simulation.")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--verbose", action="store_true", help="print each request, too")
    options = parser.parse_args(arguments)
    verdict = simulate(options.seed, is_verbose=options.verbose)
    lines = [*verdict.trace, f"{verdict.num_events} events, {verdict.num_callbacks} callbacks"]
    lines.append(f"seed {verdict.seed}: {verdict.failure or 'all invariants hold'}")
    sys.stdout.write("\n".join(lines) + "\n")
    return int(verdict.failure is not None)


if __name__ == "__main__":
    sys.exit(main())
