"""The page of a simulation: one static HTML file that needs nothing but itself."""

from pathlib import Path
from typing import Self

import msgspec
import yaml

from steelyard.observe.charts import Chart
from steelyard.observe.page import moment, page_template, write_page
from steelyard.observe.report_tables import Fact
from steelyard.observe.simulation_charts import device_chart, other_charts
from steelyard.observe.simulation_text import binding_words
from steelyard.observe.wording import duration, integer, percent, significant
from steelyard.sim.from_config import Assumed
from steelyard.sim.setup import SimSetup
from steelyard.sim.simulation import Decision, SimResult

_MOST_DECISIONS = 200


class BoundLine(msgspec.Struct, frozen=True, kw_only=True):
    """One term of the bound, as a row of a table."""

    name: str
    time: str
    words: str
    is_binding: bool


class SimulationReport(msgspec.Struct, frozen=True, kw_only=True):
    """All that the page shows. ``decisions``: the newest of those that had to be made; ``num_left_out`` came before."""

    name: str
    subtitle: str
    headline: str
    notes: tuple[str, ...]
    facts: tuple[Fact, ...]
    devices: Chart | None
    charts: tuple[Chart, ...]
    bound: tuple[BoundLine, ...]
    decisions: tuple[Decision, ...]
    num_left_out: int
    scenario_text: str
    made_at_s: float

    @classmethod
    def of(cls, assumed: Assumed, setup: SimSetup, result: SimResult, made_at_s: float) -> Self:
        """The page of one result. ``made_at_s``: seconds since the Unix epoch."""
        scenario, split = assumed.scenario, assumed.scenario.split
        due = [decision for decision in result.decisions if decision.is_due]
        return cls(
            name=scenario.name,
            subtitle=(
                f"{scenario.devices.total} {setup.device.name}, {setup.model.name}, policy {scenario.policy.kind}, "
                f"rollout {split.rollout} ({split.pool}), train {split.train}, reward {split.reward}"
            ),
            headline=(
                f"{result.bound_share:.1%} of the proven bound: {len(result.steps)} steps in "
                f"{duration(result.makespan_s)}, {significant(result.trajectories_per_s)} trajectories per second."
            ),
            notes=assumed.notes,
            facts=_facts(result, scenario.max_policy_lag),
            devices=device_chart(result, setup.num_devices),
            charts=other_charts(result, scenario.max_policy_lag, setup.groups_per_batch * setup.group_size),
            bound=_bound(result),
            decisions=tuple(due[-_MOST_DECISIONS:]),
            num_left_out=max(0, len(due) - _MOST_DECISIONS),
            scenario_text=str(yaml.safe_dump(msgspec.to_builtins(scenario), sort_keys=False, allow_unicode=True)),
            made_at_s=made_at_s,
        )


def render_simulation(report: SimulationReport) -> str:
    """The page as HTML. The same input gives the same text."""
    template = page_template("simulation.html.jinja")
    return str(template.render(report=report, made=moment(report.made_at_s), duration=duration))


def write_simulation_report(path: Path, report: SimulationReport) -> None:
    """Render and put the page in place in one move.

    Raises:
        StorageFailed: the disk refuses.
    """
    write_page(path, render_simulation(report))


def _facts(result: SimResult, max_policy_lag: int) -> tuple[Fact, ...]:
    idle = tuple(
        Fact(
            name=f"Idle {role}" if role != "moving" else "Changing roles",
            value=percent(share),
            detail="of its device-seconds" if role != "moving" else "of all device-seconds",
        )
        for role, share in result.idle_frac.items()
    )
    moves = sum(decision.is_change for decision in result.decisions)
    return (
        Fact(name="Share of the bound", value=f"{result.bound_share:.1%}", detail=f"by {result.bound.binding}"),
        Fact(
            name="Trajectories",
            value=integer(result.num_trajectories),
            detail=f"{significant(result.trajectories_per_s)} per second",
        ),
        Fact(
            name="Sampled tokens",
            value=integer(result.generated_tokens),
            detail=f"{integer(result.generated_tokens / result.makespan_s)} per second",
        ),
        Fact(
            name="Computed again",
            value=integer(result.recomputed_tokens),
            detail="tokens whose KV was lost to new weights, moves or lack of room",
        ),
        *idle,
        Fact(name="Lag at consumption", value=f"{result.mean_lag:.2f}", detail=f"of at most {max_policy_lag} steps"),
        Fact(
            name="Moves of devices",
            value=integer(moves),
            detail=f"in {integer(result.num_events)} events of the simulation",
        ),
    )


def _bound(result: SimResult) -> tuple[BoundLine, ...]:
    bound = result.bound
    seconds = {"work": bound.work_s, "lag": bound.lag_s, "path": bound.path_s, "trainer": bound.trainer_s}
    seconds["slots"] = bound.slots_s
    return tuple(
        BoundLine(name=name, time=duration(value), words=binding_words(name), is_binding=name == bound.binding)
        for name, value in seconds.items()
    )
