"""A plan as lines for people and as JSON for programs."""

import msgspec

from steelyard.allocation.plan_report import PlanReport
from steelyard.allocation.planner import words_of
from steelyard.allocation.split_search import Planned
from steelyard.allocation.stage_rates import STAGES
from steelyard.observe.simulation_text import binding_words
from steelyard.sim.bound import Bound

_STAGE_WORDS = {
    "rollout": "the pool samples a batch",
    "path": "the longest trajectory of a batch, within the lag bound",
    "train": "an optimizer step",
    "tools": "tools, over their slots",
    "reward": "scoring",
    "publish": "weights written, loaded, taken in",
    "live": "attempts under way, at most so many",
}


def plan_lines(report: PlanReport, bound: Bound, num_steps: int) -> list[str]:
    """The plan, the stages, the bound, the runner-ups and what one more device would bring."""
    periods, batch = report.planned.periods, report.batch_trajectories
    return [
        f"plan: {_words(report.planned)}",
        f"  {_rate(periods.period_s, batch)}; {periods.bottleneck} takes longest",
        f"  trainer: {_layout(report)}",
        *_stage_lines(report),
        _bound_line(report, bound, num_steps),
        *([f"the split in the file: {_compared(report.given, report)}"] if report.given is not None else []),
        "runner-ups:",
        *(f"  {_compared(one, report)}" for one in report.runner_ups),
        "one more device:",
        *(f"  {one.role:8} {one.gain_frac:+6.1%}{_to(one.planned)}" for one in report.more),
    ]


def _stage_lines(report: PlanReport) -> list[str]:
    """Each stage by itself: what it would achieve if no other held it up."""
    periods = report.planned.periods
    rows = [(name, float(getattr(periods, f"{name}_s"))) for name in STAGES]
    return [
        f"  {name:8} {seconds:9.1f} s a batch {report.batch_trajectories / seconds:12,.3f} trajectories/s"
        f" {seconds / periods.period_s:5.0%}  {_STAGE_WORDS[name]}"
        for name, seconds in rows
        if seconds > 0.0
    ]


def _bound_line(report: PlanReport, bound: Bound, num_steps: int) -> str:
    per_batch_s = bound.makespan_s / num_steps
    share = per_batch_s / report.planned.periods.period_s
    return (
        f"  {share:.1%} of the proven bound ({per_batch_s:,.1f} s a batch over {num_steps} steps, by {bound.binding}, "
        f"{binding_words(bound.binding)})"
    )


def _compared(one: Planned, report: PlanReport) -> str:
    slower = one.periods.period_s / report.planned.periods.period_s - 1.0
    rate = _rate(one.periods.period_s, report.batch_trajectories)
    return f"{_words(one)}: {rate} ({slower:+.1%} time), {one.periods.bottleneck} takes longest"


def _to(planned: Planned | None) -> str:
    return "  does not fit" if planned is None else f"  {_words(planned)}"


def _words(planned: Planned) -> str:
    return words_of(planned.split)


def _rate(period_s: float, batch: int) -> str:
    return f"{period_s:,.1f} s a batch, {batch / period_s:,.3f} trajectories/s"


def _layout(report: PlanReport) -> str:
    layout = report.train_layout
    parts = [("tp", layout.tp), ("pp", layout.pp), ("dp", layout.dp), ("cp", layout.cp), ("ep", layout.ep)]
    words = " x ".join(f"{name} {number}" for name, number in parts if number > 1) or "one device"
    idle = report.planned.split.train - layout.num_devices
    recompute = "activations computed again" if layout.recompute else "activations kept"
    spare = f", {idle} devices idle" if idle else ""
    return f"{words}, micro-batches of {layout.micro_batch_tokens:,} tokens, {recompute}{spare}"


def plan_json(report: PlanReport, bound: Bound, num_steps: int) -> str:
    """All of it; ``bound_s`` is the bound's share of one batch."""
    made = msgspec.to_builtins(report)
    made["bottleneck"] = report.planned.periods.bottleneck
    made["trajectories_per_s"] = report.batch_trajectories / report.planned.periods.period_s
    made["bound_s"] = bound.makespan_s / num_steps
    made["bound_by"] = bound.binding
    return msgspec.json.encode(made).decode()
