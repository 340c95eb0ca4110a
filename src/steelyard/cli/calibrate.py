"""``steelyard calibrate``: measure this machine, for the cost model."""

import argparse
import asyncio
import contextlib
import os
import sys
import tempfile
from pathlib import Path

from steelyard import config_file
from steelyard.allocation.calibration import Calibration, encode_calibration
from steelyard.cli.train import Subparsers, default_cache_dir
from steelyard.config import Config
from steelyard.durable import storage_errors, write_durably
from steelyard.errors import InputError
from steelyard.run import launch
from steelyard.run.calibrating import calibrate
from steelyard.run.directory import RunDirectory
from steelyard.run.policy import prepare_policy
from steelyard.run.scratch import scratch_folder

_NUM_ROUNDS = 5


def add_parser(commands: "Subparsers[argparse.ArgumentParser]") -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "calibrate",
        help="measure this machine for the cost model",
        description=(
            "Start one replica and one trainer as a run with CONFIG would, measure prompts by length, batches by size "
            "and context, training steps, publications and loads, and write a calibration file for `steelyard "
            "simulate --calibration`. Prints how far the fitted cost model is from points that it did not see."
        ),
    )
    parser.add_argument("config", metavar="CONFIG", help="configuration of a run (YAML)")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="overrides, in order")
    parser.add_argument("--output", required=True, metavar="FILE", help="the calibration file to write")
    parser.add_argument(
        "--rounds", type=int, default=_NUM_ROUNDS, metavar="N", help=f"measurements of each burst ({_NUM_ROUNDS})"
    )
    parser.add_argument("--cache-dir", metavar="DIR", help="where built policies are kept")
    parser.set_defaults(run_command=run)


def run(options: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    if options.rounds < 1:
        raise InputError(f"--rounds must be >= 1, got {options.rounds}")
    output = Path(options.output)
    if not output.absolute().parent.is_dir():
        raise InputError(f"--output must be in a folder that exists, got {output}")
    config = config_file.load(Path(options.config), options.overrides)
    launch.check_environment(config)
    cache_dir = Path(options.cache_dir) if options.cache_dir else default_cache_dir()
    calibration = asyncio.run(measured(config, cache_dir, options.rounds))
    with storage_errors(str(output)):
        temporary = output.with_name(f".{output.name}.{os.getpid()}")
        write_durably(temporary, encode_calibration(calibration))
        temporary.replace(output)
    sys.stdout.write("\n".join([*lines(calibration), f"written to {output}"]) + "\n")
    return 0


async def measured(config: Config, cache_dir: Path, num_rounds: int) -> Calibration:
    """The calibration of a run with this configuration. Weights and logs go to a temporary folder."""
    with contextlib.ExitStack() as stack:
        sockets = stack.enter_context(scratch_folder())
        directory = RunDirectory(Path(stack.enter_context(tempfile.TemporaryDirectory())))
        directory.make_folders()
        policy = await prepare_policy(config, cache_dir, sockets, os.getpid(), lambda _: None, _say)
        return await calibrate(config, policy, directory, sockets, num_rounds, _say)


def lines(calibration: Calibration) -> list[str]:
    """What was found, for people."""
    device, corrections, rates = calibration.device, calibration.corrections, calibration.rates
    found = [
        f"{calibration.engine} engine, {calibration.model.name} ({calibration.model.num_parameters / 1e6:,.1f}M "
        f"parameters) on {device.name}: {device.peak_flops_per_s / 1e9:,.1f} GFLOP/s, "
        f"{device.memory_bytes_per_s / 1e9:,.1f} GB/s, {calibration.busy_cores:.2f} cores busy",
        f"  slower than that by: prefill {corrections.prefill_compute:.2f}, decode {corrections.decode_compute:.2f}, "
        f"training {corrections.train_compute:.2f}, memory {corrections.memory:.2f}",
        f"  a step's fixed cost {device.launch_s * corrections.launch * calibration.model.num_layers * 1e3:.2f} ms, a "
        f"call's {calibration.limits.call_s * 1e3:.2f} ms; publication {rates.write_overhead_s:.3f} s and load "
        f"{rates.load_overhead_s:.3f} s beyond their bytes; start of a replica {rates.start_s:.1f} s",
        "  error on points that were not fitted to:",
    ]
    found += [
        f"    {error.term:<12} median {error.median_frac:6.1%}  worst {error.worst_frac:6.1%}  of {error.num_points}"
        for error in calibration.errors
    ]
    return found


def _say(text: str) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"  {text}\n")
