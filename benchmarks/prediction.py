"""What is left of a trajectory: how well it is predicted on real traces, and how long a prediction takes.

Tasks are split at random into five folds; what is said of a fold is learnt from the other four, so that no task was
seen before. Before every model call each predictor gives quantiles of the tokens that the trajectory will still sample:

    turn    the turn index alone
    tree    the prefix tree of tool results (the causal tree of arXiv 2606.03077)
    ours    steelyard.allocation.remaining_work

Siblings, that is samples of the same task, come one after the other (all before it have ended), or side by side (those
have ended that were no longer than the trajectory is already). Printed for each are the mean quantile loss in tokens
(five levels; at the median alone it would be the absolute error), the loss of ours over that of the others with the 95%
interval of a bootstrap over tasks, and the share of truths that each quantile of ours covers.

    python benchmarks/prediction.py               the files of examples/traces
    python benchmarks/prediction.py FILE...       other files of the same form
    python benchmarks/prediction.py --check       the same; exit code 1 where a floor of floors.toml is missed
    python benchmarks/prediction.py --quick       one fold of at most 60 tasks a file
"""

import argparse
import gzip
import random
import statistics
import sys
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from steelyard.allocation.causal_tree import CausalTree
from steelyard.allocation.remaining_work import BY_TURN, LEVELS, Quantiles, RemainingAmount, Seen, pinball, points_of
from steelyard.allocation.trace_lines import read_traces
from steelyard.allocation.workload import GroupWork, TrajectoryWork

FLOORS = Path(__file__).parent / "floors.toml"
TRACES = Path(__file__).parents[1] / "examples" / "traces"
NUM_FOLDS, NUM_RESAMPLES, QUICK_TASKS, NUM_LOOKUPS = 5, 1000, 60, 20_000
PREDICTORS = ("turn", "tree", "ours")
ORDERS = ("in turn", "side by side")


class Predictors:
    """All three, taught the same."""

    def __init__(self) -> None:
        self.turn = RemainingAmount(views=(BY_TURN,))
        self.tree = CausalTree()
        self.ours = RemainingAmount()

    def learn(self, trajectory: TrajectoryWork, points: Sequence[tuple[Seen, float]]) -> None:
        self.turn.learn(points)
        self.ours.learn(points)
        self.tree.learn([turn.result for turn in trajectory.turns], [left for _, left in points])

    def answers(self, seen: Seen, trajectory: TrajectoryWork) -> dict[str, Quantiles]:
        results = [turn.result for turn in trajectory.turns[: seen.turn]]
        found = self.turn.quantiles(seen), self.tree.quantiles(results), self.ours.quantiles(seen)
        return {name: one for name, one in zip(PREDICTORS, found, strict=True) if one is not None}


@dataclass
class TaskLoss:
    """Sums over the points of one task."""

    num_points: int
    loss: dict[str, float]
    covered: list[int]


def questions(group: GroupWork, order: str) -> list[tuple[TrajectoryWork, list[tuple[Seen, float]]]]:
    """Each trajectory with what is known and left before each of its calls."""
    found = []
    totals = [float(one.generated_tokens) for one in group.trajectories]
    for index, trajectory in enumerate(group.trajectories):
        if order == "in turn":
            found.append((trajectory, points_of(trajectory, totals[:index])))
        else:
            others = totals[:index] + totals[index + 1 :]
            found.append((trajectory, points_of(trajectory, others, only_shorter=True)))
    return found


def by_task(groups: Sequence[GroupWork]) -> list[list[GroupWork]]:
    tasks: dict[str, list[GroupWork]] = {}
    for group in groups:
        tasks.setdefault(group.task_id, []).append(group)
    return list(tasks.values())


def losses(tasks: Sequence[list[GroupWork]], order: str, num_folds: int, rng: random.Random) -> list[TaskLoss]:
    """The loss of every task, each judged by predictors that have not seen it."""
    shuffled = list(tasks)
    rng.shuffle(shuffled)
    folds = [shuffled[index::NUM_FOLDS] for index in range(NUM_FOLDS)]
    found = list[TaskLoss]()
    for judged in range(num_folds):
        predictors = Predictors()
        for fold in (one for index, one in enumerate(folds) if index != judged):
            for task in fold:
                for group in task:
                    for trajectory, points in questions(group, order):
                        predictors.learn(trajectory, points)
        found += [_loss(predictors, task, order) for task in folds[judged]]
    return found


def _loss(predictors: Predictors, task: Sequence[GroupWork], order: str) -> TaskLoss:
    total = TaskLoss(0, dict.fromkeys(PREDICTORS, 0.0), [0] * len(LEVELS))
    for group in task:
        for trajectory, points in questions(group, order):
            for seen, left in points:
                answers = predictors.answers(seen, trajectory)
                total.num_points += 1
                for name, quantiles in answers.items():
                    total.loss[name] += pinball(quantiles, left)
                for index, quantile in enumerate(answers["ours"]):
                    total.covered[index] += left <= quantile
    return total


def ratio(found: Sequence[TaskLoss], other: str) -> float:
    return sum(one.loss["ours"] for one in found) / sum(one.loss[other] for one in found)


def interval(found: Sequence[TaskLoss], other: str, rng: random.Random) -> tuple[float, float]:
    """95%, over tasks drawn with replacement."""
    drawn = sorted(ratio(rng.choices(found, k=len(found)), other) for _ in range(NUM_RESAMPLES))
    return drawn[int(0.025 * len(drawn))], drawn[int(0.975 * len(drawn)) - 1]


def lookup_us(tasks: Sequence[list[GroupWork]]) -> float:
    """Microseconds of a prediction, the median over real situations."""
    ours, situations = RemainingAmount(), list[Seen]()
    for task in tasks:
        for group in task:
            for _, points in questions(group, "in turn"):
                ours.learn(points)
                situations += [seen for seen, _ in points]
    took = list[float]()
    for index in range(NUM_LOOKUPS):
        seen = situations[index % len(situations)]
        begun_s = time.perf_counter()
        ours.quantiles(seen)
        took.append(time.perf_counter() - begun_s)
    return 1e6 * statistics.median(took)


def report(name: str, order: str, found: Sequence[TaskLoss], rng: random.Random) -> dict[str, float]:
    """A line of the table; the low end of each ratio's interval: above 1 ours is shown to be worse."""
    num = sum(one.num_points for one in found)
    means = {one: sum(task.loss[one] for task in found) / num for one in PREDICTORS}
    ratios = {other: ratio(found, other) for other in PREDICTORS[:2]}
    words, lows = list[str](), dict[str, float]()
    for other, value in ratios.items():
        lows[other], high = interval(found, other, rng)
        words.append(f"{value:.3f} ({lows[other]:.3f} to {high:.3f})")
    covered = [sum(task.covered[index] for task in found) / num for index in range(len(LEVELS))]
    cells = [name, order, str(num), *(f"{means[one]:.1f}" for one in PREDICTORS), *words]
    print("| " + " | ".join([*cells, " ".join(f"{share:.2f}" for share in covered)]) + " |", flush=True)
    return lows


def read(path: Path) -> list[list[GroupWork]]:
    with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
        return by_task(read_traces(file, path.name, default_tool_s=1.0).groups)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, help="(default: all of examples/traces)")
    parser.add_argument("--check", action="store_true", help="print figures beside floors, exit 1 under one")
    parser.add_argument("--quick", action="store_true", help="a smaller load, within a minute")
    options = parser.parse_args()
    floors = tomllib.loads(FLOORS.read_text())["prediction"]
    levels = " ".join(str(level) for level in LEVELS)
    print("| trace | siblings | calls | turn | tree | ours | ours/turn | ours/tree | covered at " + levels + " |")
    print("|---|---|---|---|---|---|---|---|---|")
    worst, slowest_us = {"turn": 0.0, "tree": 0.0}, 0.0
    for path in options.files or sorted(TRACES.glob("*.jsonl.gz")):
        tasks = read(path)
        if options.quick:
            tasks = tasks[:QUICK_TASKS]
        for order in ORDERS:
            found = losses(tasks, order, 1 if options.quick else NUM_FOLDS, random.Random(0))
            for other, value in report(path.name.split(".")[0], order, found, random.Random(1)).items():
                worst[other] = max(worst[other], value)
        slowest_us = max(slowest_us, lookup_us(tasks))
    print(f"\na prediction takes {slowest_us:.1f} microseconds at the median")
    lines = [(f"max_loss_of_{other}", value) for other, value in worst.items()]
    reached = [value <= floors[name] for name, value in lines]
    for (name, value), is_reached in zip(lines, reached, strict=True):
        print(f"{name}: {value:.3f}, ceiling {floors[name]}: {'reached' if is_reached else 'MISSED'}")
    return 0 if all(reached) or not options.check else 1


if __name__ == "__main__":
    sys.exit(main())
