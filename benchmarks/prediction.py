"""What is left of a trajectory: how well it is predicted on real traces, and how fast a look-up is.

Tasks are split at random into five folds; what is said of a fold is learnt from the other four, so that no task was
seen before. Before every model call each predictor gives quantiles of the tokens that the trajectory will still sample:

    turn    the turn index alone
    tree    the prefix tree of tool results (the causal tree of arXiv 2606.03077)
    ours    steelyard.allocation.remaining_work

Siblings, that is samples of the same task, come one after the other (all before it have ended), or side by side (those
have ended that were no longer than the trajectory is already). Printed are the mean quantile losses in tokens (five
levels; at the median alone it would be the absolute error), the loss of ours over that of the others with the 95%
interval of a bootstrap over tasks, and the share of truths that each quantile of ours covers.

Then, without a ceiling, the processor time of a prediction and of learning from an instant, on the mean.

    python benchmarks/prediction.py               the files of examples/traces
    python benchmarks/prediction.py FILE...       other files of the same form
    python benchmarks/prediction.py --check       the same; exit code 1 over a ceiling of floors.toml
    python benchmarks/prediction.py --quick       the first 60 tasks of each file
"""

import argparse
import random
import sys
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from steelyard.allocation.causal_tree import CausalTree
from steelyard.allocation.remaining_work import BY_TURN, LEVELS, RemainingAmount, Seen, pinball
from steelyard.allocation.workload import ToolResult, TrajectoryWork
from steelyard.cli.simulation_input import read_workload
from steelyard.sim.scenario import TracesPart

FLOORS = Path(__file__).parent / "floors.toml"
TRACES = Path(__file__).parents[1] / "examples" / "traces"
NUM_FOLDS, NUM_RESAMPLES, QUICK_TASKS = 5, 1000, 60
BASELINES = ("turn", "tree")


@dataclass(frozen=True)
class Point:
    """One instant before a model call: what is known, all results so far, and what was left in truth."""

    seen: Seen
    results: tuple[ToolResult, ...]
    left: float


@dataclass
class TaskLoss:
    """Of one task: summed losses by predictor, and how many truths lay below each quantile of ours."""

    losses: dict[str, float]
    covered: list[int]
    num_points: int = 0


def points_of(members: Sequence[TrajectoryWork], index: int, *, one_by_one: bool) -> Iterator[Point]:
    """All instants of one of a task's trajectories."""
    totals = [float(one.generated_tokens) for one in members]
    done, results = 0.0, tuple(turn.result for turn in members[index].turns)
    for turn, work in enumerate(members[index].turns):
        if one_by_one:
            ended = totals[:index]
        else:
            ended = [total for place, total in enumerate(totals) if place != index and total <= done]
        seen = Seen(
            turn=turn,
            done=done,
            last_results=results[max(0, turn - 2) : turn],
            num_siblings=len(ended),
            sibling_mean=sum(ended) / len(ended) if ended else 0.0,
        )
        yield Point(seen, results[:turn], totals[index] - done)
        done += work.generated_tokens


class Rivals:
    """The three predictors, taught alike."""

    def __init__(self) -> None:
        self._turn, self._tree, self._ours = RemainingAmount((BY_TURN,)), CausalTree(), RemainingAmount()

    def learn(self, points: Sequence[Point]) -> None:
        """One trajectory."""
        pairs = [(point.seen, point.left) for point in points]
        self._turn.learn(pairs)
        self._ours.learn(pairs)
        self._tree.learn(points[-1].results, [point.left for point in points])

    def judge(self, point: Point, into: TaskLoss) -> None:
        """Add the losses at one instant."""
        found = {
            "turn": self._turn.quantiles(point.seen),
            "tree": self._tree.quantiles(point.results),
            "ours": self._ours.quantiles(point.seen),
        }
        for name, quantiles in found.items():
            assert quantiles is not None, "something was learnt before"
            into.losses[name] += pinball(quantiles, point.left)
        ours = found["ours"] or ()
        for place, quantile in enumerate(ours):
            into.covered[place] += point.left <= quantile
        into.num_points += 1


def losses_of(tasks: dict[str, list[TrajectoryWork]], *, one_by_one: bool) -> list[TaskLoss]:
    """The losses of every task, each learnt from the tasks of other folds."""
    names = sorted(tasks)
    random.Random(0).shuffle(names)
    found = list[TaskLoss]()
    for fold in range(NUM_FOLDS):
        rivals = Rivals()
        for name in [name for place, name in enumerate(names) if place % NUM_FOLDS != fold]:
            for index in range(len(tasks[name])):
                rivals.learn(list(points_of(tasks[name], index, one_by_one=one_by_one)))
        for name in names[fold::NUM_FOLDS]:
            loss = TaskLoss({"turn": 0.0, "tree": 0.0, "ours": 0.0}, [0] * len(LEVELS))
            for index in range(len(tasks[name])):
                for point in points_of(tasks[name], index, one_by_one=one_by_one):
                    rivals.judge(point, loss)
            found.append(loss)
    return found


def interval(tasks: Sequence[TaskLoss], baseline: str) -> tuple[float, float, float]:
    """Loss of ours over that of a baseline, and the 95% interval of a bootstrap over tasks."""
    rng = random.Random(0)
    pairs = [(task.losses["ours"], task.losses[baseline]) for task in tasks]
    ratios = list[float]()
    for _ in range(NUM_RESAMPLES):
        drawn = rng.choices(pairs, k=len(pairs))
        ratios.append(sum(ours for ours, _ in drawn) / sum(other for _, other in drawn))
    ratios.sort()
    whole = sum(ours for ours, _ in pairs) / sum(other for _, other in pairs)
    return whole, ratios[NUM_RESAMPLES * 25 // 1000], ratios[NUM_RESAMPLES * 975 // 1000 - 1]


def read_tasks(path: Path, *, quick: bool) -> dict[str, list[TrajectoryWork]]:
    """All trajectories by task."""
    workload = read_workload(TracesPart(path=path.name, group_size=1, tool_s=0.0), path.parent)
    tasks = dict[str, list[TrajectoryWork]]()
    for group in workload.groups:
        tasks.setdefault(group.task_id, []).extend(group.trajectories)
    return {name: tasks[name] for name in sorted(tasks)[: QUICK_TASKS if quick else None]}


def print_times(tasks: dict[str, list[TrajectoryWork]]) -> None:
    """What learning and asking take; both in the order in which the trajectories come."""
    ours, num_points, learn_s, ask_s = RemainingAmount(), 0, 0.0, 0.0
    for members in tasks.values():
        for index in range(len(members)):
            pairs = [(point.seen, point.left) for point in points_of(members, index, one_by_one=True)]
            num_points += len(pairs)
            begun_s = time.process_time()
            for seen, _ in pairs:
                ours.quantiles(seen)
            asked_s = time.process_time()
            ours.learn(pairs)
            ask_s += asked_s - begun_s
            learn_s += time.process_time() - asked_s
    ask_us, learn_us = (seconds / num_points * 1e6 for seconds in (ask_s, learn_s))
    print(f"a prediction: {ask_us:.0f} us, learning from an instant: {learn_us:.0f} us")


def row(path: Path, tasks: dict[str, list[TrajectoryWork]], *, one_by_one: bool) -> dict[str, float]:
    """Print one row of the table; the ratios by baseline."""
    found = losses_of(tasks, one_by_one=one_by_one)
    num_points = sum(task.num_points for task in found)
    means = [f"{sum(task.losses[name] for task in found) / num_points:.1f}" for name in (*BASELINES, "ours")]
    ratios = {name: interval(found, name) for name in BASELINES}
    cells = [f"{whole:.3f} ({low:.3f} to {high:.3f})" for whole, low, high in ratios.values()]
    covered = " ".join(f"{sum(t.covered[place] for t in found) / num_points:.2f}" for place in range(len(LEVELS)))
    name, order = path.name.split(".")[0], "one by one" if one_by_one else "side by side"
    print(f"| {name} | {order} | {' | '.join(means)} | {' | '.join(cells)} | {covered} |", flush=True)
    return {baseline: ratio[0] for baseline, ratio in ratios.items()}


def main() -> int:
    """Print the table and the times."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="normalised traces; examples/traces")
    parser.add_argument("--check", action="store_true", help="exit with 1 over a ceiling of floors.toml")
    parser.add_argument("--quick", action="store_true", help=f"the first {QUICK_TASKS} tasks of each file")
    arguments = parser.parse_args()
    ceilings = tomllib.loads(FLOORS.read_text())["prediction"]
    print("| traces | siblings | loss: turn | tree | ours | ours / turn | ours / tree | covered |")
    print("|---|---|---|---|---|---|---|---|")
    worst = dict.fromkeys(BASELINES, 0.0)
    all_tasks = dict[str, list[TrajectoryWork]]()
    for path in arguments.files or sorted(TRACES.glob("*.jsonl.gz")):
        tasks = read_tasks(path, quick=arguments.quick)
        all_tasks |= tasks
        for one_by_one in (True, False):
            for name, ratio in row(path, tasks, one_by_one=one_by_one).items():
                worst[name] = max(worst[name], ratio)
    print_times(all_tasks)
    figures = {f"max_loss_of_{name}": worst[name] for name in BASELINES}
    missed = False
    for name, figure in figures.items():
        is_kept = figure <= ceilings[name]
        missed = missed or not is_kept
        print(f"{name}: {figure:.3f}, ceiling {ceilings[name]}: {'reached' if is_kept else 'MISSED'}")
    return 1 if missed and arguments.check else 0


if __name__ == "__main__":
    sys.exit(main())
