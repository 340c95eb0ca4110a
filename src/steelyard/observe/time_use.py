"""Where the time of the steps went, and which stage sets the pace."""

from collections.abc import Sequence
from typing import Literal

import msgspec

from steelyard.observe.rows import EngineRow, StepRow
from steelyard.observe.statistics import mean
from steelyard.observe.wording import percent

Part = Literal["wait", "assemble", "train", "publish", "load", "checkpoint"]
PARTS: tuple[Part, ...] = ("wait", "assemble", "train", "publish", "load", "checkpoint")
PART_NAMES: dict[Part, str] = {
    "wait": "waiting for rollouts",
    "assemble": "assembling",
    "train": "training",
    "publish": "publishing weights",
    "load": "loading weights",
    "checkpoint": "checkpoint",
}
_ENGINE_IS_BUSY = 0.7


class TimeUse(msgspec.Struct, frozen=True, kw_only=True):
    """Mean seconds of one step, in all and by part; ``other_s`` is what no part accounts for.

    Parts that overlap may sum to more than ``wall_s``; then ``other_s`` is 0.
    """

    wall_s: float
    parts_s: dict[Part, float]
    other_s: float

    def frac(self, part: Part) -> float:
        """The part's share of the step, at most 1."""
        return min(1.0, self.parts_s[part] / self.wall_s) if self.wall_s > 0 else 0.0


class Bottleneck(msgspec.Struct, frozen=True, kw_only=True):
    """The stage that sets the pace, and the numbers that say so."""

    name: Literal["rollouts", "tools or scoring", "training", "publication"]
    reason: str


def part_s(step: StepRow, part: Part) -> float:
    """Seconds that ``step`` spent in ``part``."""
    seconds: dict[Part, float] = {
        "wait": step.wait_s,
        "assemble": step.assemble_s,
        "train": step.train_s,
        "publish": step.publish_s,
        "load": step.load_s,
        "checkpoint": step.checkpoint_s,
    }
    return seconds[part]


def time_use(steps: Sequence[StepRow]) -> TimeUse | None:
    """Mean time use over ``steps``; None without steps."""
    wall_s = mean([step.wall_s for step in steps])
    if wall_s is None:
        return None
    parts_s = {part: mean([part_s(step, part) for step in steps]) or 0.0 for part in PARTS}
    return TimeUse(wall_s=wall_s, parts_s=parts_s, other_s=max(0.0, wall_s - sum(parts_s.values())))


def mean_busy_frac(engines: Sequence[EngineRow]) -> float | None:
    """Mean over replicas of the share of time that they computed; None without replicas."""
    return mean([engine.busy_frac for engine in engines])


def name_bottleneck(use: TimeUse, busy_frac: float | None, is_synchronous: bool = False) -> Bottleneck:
    """Name the stage that sets the pace.

    ``busy_frac``: share of time that the replicas computed, None where unknown. ``is_synchronous``: nothing was
    sampled ahead (lag 0), so replicas could work only while the trainer waited, and are judged over that time.

    By the utilisation law (P. J. Denning and J. P. Buzen, "The operational analysis of queueing network models",
    ACM Computing Surveys 10 (1978)) the busiest station bounds the throughput. For the trainer that is the
    largest of waiting, computing and publishing; where it waits, the replicas' own busy share tells whether they
    compute or themselves wait, for tools and scores or for want of work.
    """
    trainer = use.frac("assemble") + use.frac("train")
    publication = use.frac("publish") + use.frac("load") + use.frac("checkpoint")
    waiting = use.frac("wait")
    if trainer >= waiting and trainer >= publication:
        return Bottleneck(name="training", reason=f"the trainer computes {percent(trainer)} of the time")
    if publication > waiting:
        return Bottleneck(name="publication", reason=f"publishing and loading take {percent(publication)} of the time")
    waited = f"the trainer waits {percent(waiting)} of the time"
    if busy_frac is None:
        return Bottleneck(name="rollouts", reason=waited)
    if is_synchronous and waiting > 0:
        busy_frac = min(1.0, busy_frac / waiting)
        waited = f"{waited} at lag 0"
    if busy_frac >= _ENGINE_IS_BUSY:
        return Bottleneck(name="rollouts", reason=f"{waited}, replicas are {percent(busy_frac)} busy")
    return Bottleneck(name="tools or scoring", reason=f"{waited}, yet replicas are only {percent(busy_frac)} busy")
