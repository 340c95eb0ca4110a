"""Does the quickstart learn to repair? Three seeds, a negative control, time and memory of the whole run.

    python benchmarks/quickstart.py            # about half an hour
    python benchmarks/quickstart.py --check    # beside the floors; exit code 1 under one of them
    python benchmarks/quickstart.py --quick    # two steps on a few tasks, within a minute once the policy is cached

Each run is the command that a user types: ``steelyard train examples/quickstart.yaml run.seed=N``, in a process of its
own. Memory is the proportional set size of the whole process tree, sampled every second.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path

import msgspec
import psutil

from steelyard.observe.rows import (
    EvaluationLabel,
    EvaluationMode,
    EvaluationRow,
    EvaluationSplit,
    StageName,
    StageRow,
    StepRow,
    of_type,
    read_rows,
)
from steelyard.observe.statistics import paired_gain, wilson_interval
from steelyard.types import Record

ROOT = Path(__file__).parents[1]
QUICK = (
    "train.max_steps=2",
    "train.batch_size=32",
    "eval.num_tasks=16",
    "eval.num_unseen_templates=0",
    "model.max_context_tokens=512",
)
RUN_DEADLINE_S = 1500.0


class Outcome(Record, frozen=True, kw_only=True):
    """One run. ``prepare_s``: until the starting policy was there; other times from the start of the command."""

    seed: int
    is_control: bool
    prepare_s: float
    rows: tuple[EvaluationRow, ...]
    total_s: float
    first_step_s: float
    peak_pss_bytes: int


def run_once(seed: int, *, is_control: bool, cache_dir: Path, extra: tuple[str, ...]) -> Outcome:
    """Run the quickstart once."""
    with tempfile.TemporaryDirectory(prefix="quickstart-") as folder:
        run = Path(folder) / "run"
        control = ("algorithm.permute_rewards=true",) if is_control else ()
        command = [
            *(sys.executable, "-m", "steelyard.cli", "train", str(ROOT / "examples" / "quickstart.yaml")),
            *("--cache-dir", str(cache_dir), f"run.dir={run}", f"run.seed={seed}", "observe.display=quiet"),
            *(*control, *extra),
        ]
        started_s, started_at_s = time.perf_counter(), time.time()
        peak = watch(command)
        total_s = time.perf_counter() - started_s
        rows = read_rows(run / "metrics.jsonl").rows
        steps = of_type(rows, StepRow)
        return Outcome(
            seed=seed,
            is_control=is_control,
            prepare_s=prepare_s(of_type(rows, StageRow)),
            rows=tuple(of_type(rows, EvaluationRow)),
            total_s=total_s,
            first_step_s=steps[0].at_s - started_at_s if steps else float("inf"),
            peak_pss_bytes=peak,
        )


def prepare_s(stages: Sequence[StageRow]) -> float:
    """How long the stage took in which the policy is found in the cache, or built."""
    began_at_s = next(row.at_s for row in stages if row.name is StageName.PREPARE_POLICY)
    return next(row.at_s for row in stages if row.name is not StageName.PREPARE_POLICY) - began_at_s


def watch(command: list[str]) -> int:
    """Run a command to its end; the peak memory of its process tree, in bytes."""
    peak = 0
    with subprocess.Popen(command, cwd=ROOT) as process:
        deadline_s = time.perf_counter() + RUN_DEADLINE_S
        while True:
            try:
                code = process.wait(timeout=1.0)
                break
            except subprocess.TimeoutExpired:
                peak = max(peak, tree_pss_bytes(process.pid))
                if time.perf_counter() > deadline_s:
                    process.kill()  # its children die with it
                    raise SystemExit(
                        f"a run must end within {RUN_DEADLINE_S:.0f} s, this did not: {' '.join(command)}"
                    ) from None
    if code:
        raise SystemExit(f"the run ended with exit code {code}: {' '.join(command)}")
    return peak


def tree_pss_bytes(pid: int) -> int:
    """Proportional set size of a process and all below it; what has just ended counts nothing."""
    total = 0
    try:
        family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0
    for member in family:
        try:
            total += member.memory_full_info().pss
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return total


def success(outcome: Outcome, label: EvaluationLabel, mode: EvaluationMode) -> float:
    """Share of held-out tasks solved."""
    row = find(outcome, label, mode)
    return row.num_success / row.num_tasks


def valid_share(outcome: Outcome, mode: EvaluationMode) -> float:
    """The share of the gain that comes from episodes whose calls were all valid at version 0 too; 0 without a gain."""
    before, after = (find(outcome, label, mode) for label in (EvaluationLabel.BEFORE, EvaluationLabel.AFTER))
    return paired_gain(before.solved, before.all_calls_valid, after.solved).valid_share or 0.0


def find(outcome: Outcome, label: EvaluationLabel, mode: EvaluationMode) -> EvaluationRow:
    """The row of one evaluation on held-out tasks."""
    return next(
        row for row in outcome.rows if (row.label, row.mode, row.split) == (label, mode, EvaluationSplit.HELDOUT)
    )


def figures(outcomes: list[Outcome]) -> dict[str, float]:
    """The figures that have floors."""
    before, after = EvaluationLabel.BEFORE, EvaluationLabel.AFTER
    real = [outcome for outcome in outcomes if not outcome.is_control]
    controls = [outcome for outcome in outcomes if outcome.is_control]
    found = {
        "max_before": max(success(one, before, mode) for one in real for mode in EvaluationMode),
        "max_total_s": max(one.total_s for one in real),
        "max_first_step_s": max(one.first_step_s for one in real),
        "max_peak_pss_bytes": float(max(one.peak_pss_bytes for one in real)),
    }
    for mode in EvaluationMode:
        found[f"min_mean_after_{mode}"] = statistics.fmean(success(one, after, mode) for one in real)
        found[f"min_each_after_{mode}"] = min(success(one, after, mode) for one in real)
        shares = [valid_share(one, mode) for one in real]
        found[f"min_valid_share_of_gain_{mode}"] = min(shares)
        gains = [success(one, after, mode) - success(one, before, mode) for one in controls]
        if gains:
            found[f"max_control_gain_{mode}"] = max(gains)
    return found


def show(outcome: Outcome) -> None:
    """Print one run."""
    kind = "control, rewards permuted" if outcome.is_control else "run"
    print(
        f"seed {outcome.seed} ({kind}): {outcome.total_s:.0f} s, first step after {outcome.first_step_s:.0f} s, "
        f"peak memory {outcome.peak_pss_bytes / 2**30:.2f} GiB"
    )
    for row in outcome.rows:
        interval = wilson_interval(row.num_success, row.num_tasks)
        bounds = f" ({interval.low:.2f} to {interval.high:.2f})" if interval is not None else ""
        causes = ", ".join(f"{cause} {count}" for cause, count in sorted(row.causes.items(), key=lambda item: -item[1]))
        print(
            f"  {row.label} {row.split} {row.mode}: {row.num_success} of {row.num_tasks}{bounds}; "
            f"all calls valid in {row.num_all_calls_valid}; failures: {causes or 'none'}"
        )


def judge(found: dict[str, float]) -> bool:
    """Print each figure beside its floor; whether all hold."""
    floors = tomllib.loads((ROOT / "benchmarks" / "floors.toml").read_text())["quickstart"]
    is_good = True
    for name, floor in floors.items():
        value = found.get(name)
        if value is None:
            print(f"{name}: not measured, floor {floor}")
            is_good = False
            continue
        holds = value >= floor if name.startswith("min_") else value <= floor
        is_good = is_good and holds
        print(f"{name}: {value:.3f}, floor {floor} {'ok' if holds else 'MISSED'}")
    return is_good


def main() -> int:
    """Run, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="print figures beside floors, exit 1 under one")
    parser.add_argument("--quick", action="store_true", help="a small load, within a minute once the policy is cached")
    parser.add_argument(
        "--cache-dir", help="where policies are kept (default: a new one, so that the policy is built; --quick: yours)"
    )
    parser.add_argument("--json", metavar="FILE", help="write all outcomes there too")
    options = parser.parse_args()
    seeds, controls, extra = ((0,), (), QUICK) if options.quick else ((0, 1, 2), (0,), ())
    print(f"machine: {psutil.cpu_count()} cores, {psutil.virtual_memory().total / 2**30:.0f} GiB")
    with tempfile.TemporaryDirectory(prefix="quickstart-cache-") as new:
        own = str(Path.home() / ".cache" / "steelyard") if options.quick else new
        cache_dir = Path(options.cache_dir or own)
        outcomes: list[Outcome] = []
        found: dict[str, float] = {}
        if not options.quick:
            # Builds the policy. The times of the runs below are of commands that find it, as all but a user's first do.
            found["max_warm_up_s"] = run_once(0, is_control=False, cache_dir=cache_dir, extra=QUICK).prepare_s
            print(f"the starting policy was there after {found['max_warm_up_s']:.0f} s")
        for is_control, wanted in ((False, seeds), (True, controls)):
            for seed in wanted:
                outcome = run_once(seed, is_control=is_control, cache_dir=cache_dir, extra=extra)
                outcomes.append(outcome)
                show(outcome)
    if options.json:
        Path(options.json).write_bytes(msgspec.json.encode(outcomes))
    found |= figures(outcomes)
    if options.check:
        return 0 if judge(found) else 1
    for name, value in found.items():
        print(f"{name}: {value:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
