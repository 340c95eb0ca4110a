"""Elastic training: the same update whoever computes it, and what a join or a leave costs the running steps.

Same update: five steps by the trainer alone, with one and with two helper processes, with a helper that joins and one
that leaves in the middle, and with a helper that is killed (SIGKILL) in mid-gradient. Each is compared with the trainer
alone: norm(D - D') / norm(D) over the change D of all parameters, and bit by bit. As a control, the update of a batch
is made once without one of its units. And the losses of a core of two ranks are compared with those of one process.

Join and leave: trainer and helper are pinned to a core each. A turn has four steps over like batches: alone; alone,
while a helper joins (its load, and its leaving once it has proven its weights, so that its help does not hide what it
costs); with the helper from the first unit on; and with the helper leaving in the middle. Ratios are of the second and
of the fourth step to the first of the same turn; medians are of ratios.

    python benchmarks/elastic.py            the quick policy's shape, 7 turns
    python benchmarks/elastic.py --check    the same; exit code 1 where a floor of floors.toml is missed
    python benchmarks/elastic.py --quick    a small decoder, 3 turns, not two helpers from the first step on
"""

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
import tomllib
from collections.abc import Awaitable, Callable
from pathlib import Path

import torch

from steelyard.assembly.batch import build_step_batch
from steelyard.errors import Refused
from steelyard.processes.child import pin_to_core
from steelyard.processes.faults import FaultPlan
from steelyard.processes.supervision import end_all
from steelyard.testing.elastic_rig import ElasticRig, elastic_rig, moved_apart
from steelyard.testing.parallel_ranks import one_process, run_ranks
from steelyard.testing.tiny_model import write_tiny_model
from steelyard.testing.tokenizer import chatml_hermes_template
from steelyard.testing.training_data import random_samples
from steelyard.trainer.loss import LossSums
from steelyard.trainer.quick_policy import new_quick_module
from steelyard.trainer.quick_recipe import QuickPolicyRecipe, write_quick_tokenizer
from steelyard.trainer.records import LossSettings
from steelyard.trainer.step import accumulate_gradients, unit_gradient, units_of
from steelyard.trainer.unit_sums import UnitSums
from steelyard.types import StepBatch

FLOORS = Path(__file__).parent / "floors.toml"
NUM_STEPS = 5
HELPER_CORE = 1
DROPPED_UNIT = 2

Plot = Callable[[ElasticRig, int], Awaitable[None]]


def main() -> int:
    """Run, print, and compare with the floors."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="exit with 1 where a floor is missed")
    parser.add_argument("--quick", action="store_true", help="a small decoder, fewer turns")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="sy-") as directory:
        root = Path(directory)
        model_dir = write_tiny_model(root / "model") if arguments.quick else write_quick_model(root / "model")
        found = same_update(root, model_dir, arguments.quick)
        found |= two_ranks(root / "ranks", model_dir)
        found |= asyncio.run(join_and_leave(root / "turns", model_dir, arguments.quick))
    is_good = True
    for name, floor in tomllib.loads(FLOORS.read_text())["elastic"].items():
        reached = found[name] <= floor if name.startswith("max_") else found[name] >= floor
        is_good &= reached
        print(f"{name}: {found[name]:.4g}, floor {floor:.4g}: {'reached' if reached else 'MISSED'}")
    return 0 if is_good or not arguments.check else 1


def write_quick_model(directory: Path) -> Path:
    """The quick policy's shape, untrained."""
    directory.mkdir()
    recipe = QuickPolicyRecipe()
    num_tokens = write_quick_tokenizer(directory, ["a b c"], chatml_hermes_template(), recipe.vocab_size)
    module = new_quick_module(recipe, max(num_tokens, recipe.vocab_size))
    module.save_pretrained(directory)  # type: ignore[operator]
    return directory


def make_batch(step: int, *, is_quick: bool) -> StepBatch:
    """Sequences of 64 to 512 tokens; about 11,000 tokens, a quarter of that where it is quick."""
    samples = random_samples(step, 10 if is_quick else 40, vocab_size=512, min_tokens=64, max_tokens=512)
    return build_step_batch(step, step, samples, 2048)


# --- the same update ------------------------------------------------------------------------------


def same_update(root: Path, model_dir: Path, is_quick: bool) -> dict[str, float]:
    """How far the updates of all plots are from that of the trainer alone."""

    def run(name: str, plot: Plot) -> tuple[torch.Tensor, torch.Tensor]:
        return asyncio.run(five_steps(root / name, model_dir, plot, is_quick))

    start, alone = run("alone", nothing)
    apart, num_same = [], 0
    plots = {
        "1 helper": with_helpers(1),
        "2 helpers": with_helpers(2),
        "join and leave": join_and_leave_plot(),
        "kill -9": kill_plot,
    }
    if is_quick:
        # Starting processes is most of it; two helpers are in the third plot, too.
        del plots["2 helpers"]
    for name, plot in plots.items():
        _, other = run(name.replace(" ", "-"), plot)
        is_same = torch.equal(alone, other)
        apart.append(moved_apart(start, alone, other))
        num_same += is_same
        print(f"{name}: norm(D - D') / norm(D) = {apart[-1]:.3g}, {'the same bits' if is_same else 'other bits'}")
    return {
        "max_update_apart": max(apart),
        "min_bitwise_frac": num_same / len(plots),
        "min_apart_without_one_unit": without_one_unit(make_batch(0, is_quick=is_quick)),
    }


async def five_steps(root: Path, model_dir: Path, plot: Plot, is_quick: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights before and after."""
    async with elastic_rig(root, model_dir) as rig:
        start = await rig.weights()
        num_elsewhere = num_again = 0
        for step in range(NUM_STEPS):
            await plot(rig, step)
            report = await rig.step(make_batch(step, is_quick=is_quick))
            num_elsewhere += report.num_units_elsewhere
            num_again += report.num_units_leased_again
        print(f"{root.name}: {num_elsewhere} units by helpers, {num_again} leased again")
        return start, await rig.weights()


async def nothing(_rig: ElasticRig, _step: int) -> None:
    """The trainer is alone."""


def with_helpers(num_helpers: int) -> Plot:
    """Helpers from the first step on."""
    names = [f"helper-{index}" for index in range(num_helpers)]

    async def plot(rig: ElasticRig, step: int) -> None:
        if step == 0:
            for name, path in zip(names, await asyncio.gather(*map(rig.start_helper, names)), strict=True):
                await rig.attach(name, path)
        await rig.ready(*names)

    return plot


def join_and_leave_plot() -> Plot:
    """One is there from the first step on and leaves within step 3; another joins within step 2."""
    leaving: list[asyncio.Task[None]] = []

    async def plot(rig: ElasticRig, step: int) -> None:
        if step == 0:
            paths.extend(await asyncio.gather(rig.start_helper("first"), rig.start_helper("second")))
            await rig.attach("first", paths[0])
            await rig.ready("first")
        if step == 2:
            await rig.attach("second", paths[1])
        if step == 3:
            leaving.append(asyncio.create_task(rig.trainer.detach("first")))

    paths: list[Path] = []
    return plot


async def kill_plot(rig: ElasticRig, step: int) -> None:
    """A helper that dies in its third micro-batch, in step 1."""
    if step == 1:
        fault = FaultPlan(process="doomed", point="micro_batch", occurrence=3)
        await rig.attach("doomed", await rig.start_helper("doomed", fault))
        await rig.ready("doomed")


def without_one_unit(batch: StepBatch) -> float:
    """norm(G - G') / norm(G) of a gradient that lacks one unit: what the comparison would show."""
    module = new_quick_module(QuickPolicyRecipe(num_layers=1), 512)
    accumulate_gradients(module, batch, LossSettings())
    whole = torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])
    units = units_of(batch, LossSettings()).units
    sums = UnitSums(len(units))
    for unit in units:
        gradients, _ = unit_gradient(module, unit, LossSettings())
        sums.deliver(unit.index, {} if unit.index == DROPPED_UNIT else gradients, LossSums())
    total, _ = sums.finish()
    lacking = torch.cat([total[name].flatten() for name, _ in module.named_parameters() if name in total])
    return float((whole - lacking).norm() / whole.norm())


def two_ranks(root: Path, model_dir: Path) -> dict[str, float]:
    """How far the losses of a core of two ranks (FSDP2 over gloo) are from those of one process, over 3 steps."""
    root.mkdir()
    wanted, _ = one_process(model_dir, 3)
    found = run_ranks(root, model_dir, 2, num_steps=3, limit_s=600.0)
    error = max(abs(one - other) for one, other in zip(wanted.losses, found.losses, strict=True))
    print(f"two ranks: losses {found.losses}, of one process {wanted.losses}")
    return {"max_two_rank_loss_error": error}


# --- join and leave -------------------------------------------------------------------------------


async def join_and_leave(root: Path, model_dir: Path, is_quick: bool) -> dict[str, float]:
    """Medians over turns of the steps in which a helper joins, and leaves, over steps alone."""
    joins, leaves, helped = [], [], []
    async with elastic_rig(root, model_dir) as rig:
        path = await rig.start_helper("helper", core=HELPER_CORE)
        pin_to_core(0)
        await timed_step(rig, 0, is_quick)  # warms up
        for turn in range(3 if is_quick else 7):
            step = 1 + 4 * turn
            alone_s = await timed_step(rig, step, is_quick)
            joining = asyncio.create_task(join_and_go(rig, path))
            join_s = await timed_step(rig, step + 1, is_quick)
            await joining
            await rig.attach("helper", path)
            await rig.ready("helper")
            helped_s = await timed_step(rig, step + 2, is_quick)
            await rig.ready("helper")
            leaving = asyncio.create_task(leave_after(rig, helped_s / 2))
            leave_s = await timed_step(rig, step + 3, is_quick)
            await leaving
            joins.append(join_s / alone_s)
            leaves.append(leave_s / alone_s)
            helped.append(alone_s / helped_s)
            print(f"alone {alone_s:.2f} s, join {join_s:.2f} s, helped {helped_s:.2f} s, leave {leave_s:.2f} s")
    print(f"one helper makes a step {statistics.median(helped):.2f}x as fast")
    return {"max_join_of_step": statistics.median(joins), "max_leave_of_step": statistics.median(leaves)}


async def timed_step(rig: ElasticRig, step: int, is_quick: bool) -> float:
    """Seconds of a step; all of them over the same sequences."""
    batch = build_step_batch(step, step, make_batch(0, is_quick=is_quick).samples, 2048)
    started_s = time.perf_counter()
    await rig.step(batch)
    return time.perf_counter() - started_s


async def join_and_go(rig: ElasticRig, path: Path) -> None:
    """Join while a step runs, and leave as soon as all is loaded and proven."""
    await rig.attach("helper", path)
    ready = asyncio.create_task(rig.ready("helper"))
    try:
        await ready
    finally:
        await end_all((ready,))
        await rig.trainer.detach("helper")


async def leave_after(rig: ElasticRig, delay_s: float) -> None:
    """Leave in the middle of a step. The middle is a moment of the clock: what is measured is time."""
    await asyncio.sleep(delay_s)
    try:
        await rig.trainer.detach("helper")
    except Refused:
        print("the helper had gone before")


if __name__ == "__main__":
    sys.exit(main())
