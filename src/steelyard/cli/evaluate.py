"""``steelyard eval``: evaluate a policy on held-out tasks, without training it."""

import argparse
from pathlib import Path

import msgspec

from steelyard import config_file
from steelyard.cli.train import Subparsers, default_cache_dir
from steelyard.config import Config
from steelyard.errors import InputError
from steelyard.run import launch
from steelyard.run.directory import existing_directory


def add_parser(commands: "Subparsers[argparse.ArgumentParser]") -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "eval",
        help="evaluate a policy on held-out tasks",
        description="Evaluate the policy of a configuration file, or a version of a run, on held-out tasks.",
    )
    parser.add_argument("target", metavar="CONFIG|RUN", help="configuration file, or run directory")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="overrides, such as eval.num_tasks=400")
    parser.add_argument("--policy-version", type=int, metavar="N", help="which version of RUN (default: the newest)")
    parser.add_argument(
        "--cache-dir", metavar="DIR", help="where built policies are kept (default: ~/.cache/steelyard)"
    )
    parser.set_defaults(run_command=run)


def run(options: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    target = Path(options.target)
    overrides = list(options.overrides)
    if target.is_dir():
        directory = existing_directory(options.target)
        version = newest_version(directory.weights) if options.policy_version is None else options.policy_version
        if not directory.version(version).is_dir():
            raise InputError(f"--policy-version must be a version that {target} still holds, got {version}")
        config = config_file.load(directory.config, [f"model.policy={directory.version(version)}", *overrides])
    elif options.policy_version is not None:
        raise InputError("--policy-version goes with a run directory, got a configuration file")
    else:
        config = config_file.load(target, overrides)
    return launch.start(evaluation_only(config), cache_dir=Path(options.cache_dir or default_cache_dir()))


def evaluation_only(config: Config) -> Config:
    """The same configuration with no step to train: a run that only evaluates version 0.

    Its journal lies in its own directory where that of the training is in a database, under a name that is taken.
    """
    if config.eval.num_tasks == 0:
        raise InputError("eval.num_tasks must be >= 1 to evaluate, got 0")
    replace = msgspec.structs.replace
    if config.journal.kind == "postgres":
        config = replace(config, journal=replace(config.journal, kind="sqlite", url=None, name=None))
    return replace(
        config,
        run=replace(config.run, name=f"{config.run.name}-eval", dir=None),
        train=replace(config.train, max_steps=0),
        eval=replace(config.eval, before=True, after=False),
    )


def newest_version(weights: Path) -> int:
    """The highest version with a manifest under ``weights``.

    Raises:
        InputError: there is none.
    """
    versions = [int(path.parent.name[1:]) for path in weights.glob("v*/manifest.json")]
    if not versions:
        raise InputError(f"RUN must hold at least one policy version, got none in {weights}")
    return max(versions)
