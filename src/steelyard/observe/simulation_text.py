"""What a simulation came to, as lines for people and as JSON for programs."""

from collections.abc import Sequence

import msgspec

from steelyard.allocation.snapshot import Split
from steelyard.observe.wording import duration
from steelyard.sim.from_config import Assumed
from steelyard.sim.scenario import Scenario
from steelyard.sim.setup import SimSetup
from steelyard.sim.simulation import SimResult

_BINDING = {
    "work": "the devices' arithmetic and memory traffic",
    "lag": "places within the lag bound, each held for the slowest member of its group",
    "path": "the longest trajectories, steps and publications that wait for each other",
    "trainer": "training steps one after the other",
    "slots": "slots of tools or graders",
    "joint": "device time and places at once: the batch that saves one costs the other",
}

_MOST_FAULTS = 20


def binding_words(name: str) -> str:
    """What a term of the bound stands for."""
    return _BINDING[name]


def header_lines(assumed: Assumed, setup: SimSetup) -> list[str]:
    """What is simulated, and what was assumed for it."""
    scenario, split = assumed.scenario, assumed.scenario.split
    return [
        f"{scenario.name}: {scenario.devices.total} {setup.device.name}, {setup.model.name}, "
        f"policy {scenario.policy.kind}, rollout={split.rollout} ({_pool(split)}) train={split.train} "
        f"reward={split.reward}",
        *(f"  note: {note}" for note in assumed.notes),
    ]


def _pool(split: Split) -> str:
    return split.pool if split.replicas else f"tp {split.rollout_tp}"


def decision_lines(result: SimResult) -> list[str]:
    """A line for each time that the policy had to decide; the last state where it never had to."""
    due = [decision.line for decision in result.decisions if decision.is_due]
    return due or [decision.line for decision in result.decisions[-1:]]


def result_lines(scenario: Scenario, result: SimResult) -> list[str]:
    """What came of it, with the share of the bound."""
    idle = ", ".join(f"{role} {share:.0%}" for role, share in result.idle_frac.items())
    return [
        f"  {len(result.steps)} steps in {result.makespan_s:,.1f} s: {result.trajectories_per_s:,.3f} trajectories/s, "
        f"{result.generated_tokens / result.makespan_s:,.0f} sampled tokens/s",
        f"  {result.bound_share:.1%} of the proven bound ({result.bound.makespan_s:,.1f} s, by {result.bound.binding}, "
        f"{binding_words(result.bound.binding)})",
        f"  idle: {idle}",
        f"  lag at consumption {result.mean_lag:.2f} of {scenario.max_policy_lag} steps; "
        f"{result.recomputed_tokens:,} tokens computed again",
        *_fault_lines(result),
    ]


def _fault_lines(result: SimResult) -> list[str]:
    """Devices that died and returned; of very many the first."""
    shown = [f"  {line}" for line in result.faults[:_MOST_FAULTS]]
    num_more = len(result.faults) - len(shown)
    return [*shown, f"  and {num_more:,} more like these"] if num_more else shown


def comparison_lines(results: Sequence[tuple[str, SimResult]]) -> list[str]:
    """A table, one line for each policy."""
    rows = [("policy", "steps in", "trajectories/s", "of the bound", "idle rollout", "idle train", "lag", "moves")]
    for name, result in results:
        idle = [f"{result.idle_frac[role]:.0%}" if role in result.idle_frac else "" for role in ("rollout", "train")]
        moves = sum(decision.is_change for decision in result.decisions)
        rows.append(
            (
                name,
                duration(result.makespan_s),
                f"{result.trajectories_per_s:,.3f}",
                f"{result.bound_share:.1%}",
                *(idle[0], idle[1]),
                f"{result.mean_lag:.2f}",
                str(moves),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  " + "  ".join(cell.ljust(width) if not at else cell.rjust(width) for at, (cell, width) in enumerate(pairs))
        for pairs in (list(zip(row, widths, strict=True)) for row in rows)
    ]


def to_json(assumed: Assumed, result: SimResult) -> str:
    """All of it, with what is computed from it: the share of the bound and the rates."""
    made = msgspec.to_builtins(result)
    made["bound"] |= {"makespan_s": result.bound.makespan_s, "binding": result.bound.binding}
    made |= {
        "policy": assumed.scenario.policy.kind,
        "bound_share": result.bound_share,
        "trajectories_per_s": result.trajectories_per_s,
        "notes": assumed.notes,
    }
    return msgspec.json.encode(made).decode()
