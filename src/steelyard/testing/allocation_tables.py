"""Tables and floors of benchmarks/allocation.py, from what was played."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]
Found = dict[str, dict[str, dict[str, Row]]]
"""By scenario, seed and label."""

_T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
"""Student's t, two-sided 95%, for 1 to 15 degrees of freedom."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """A figure beside its floor; None: it was not played."""

    name: str
    figure: float | None
    floor: float
    detail: str = ""

    @property
    def is_reached(self) -> bool:
        """A figure that was not played is missed."""
        return self.figure is not None and self.figure >= self.floor

    def line(self) -> str:
        """As it is printed."""
        words = "not played" if self.figure is None else f"{self.figure:.3f}"
        verdict = "reached" if self.is_reached else "MISSED"
        return f"{self.name}: {words}, floor {self.floor:g}: {verdict}{f' ({self.detail})' if self.detail else ''}"


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The mean and the half width of its 95% interval (Student); 0 wide where there is one value."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return mean, 0.0
    t = _T_95[min(len(values) - 1, len(_T_95)) - 1]
    return mean, t * statistics.stdev(values) / math.sqrt(len(values))


def shares(seeds: dict[str, dict[str, Row]], label: str) -> list[float]:
    """Of the bound, by seed, where it was played."""
    return [rows[label]["bound_s"] / rows[label]["makespan_s"] for rows in seeds.values() if label in rows]


def ratios(seeds: dict[str, dict[str, Row]], label: str, other: str) -> list[float]:
    """How many times as fast as another, on the same work, by seed where both were played."""
    return [
        rows[other]["makespan_s"] / rows[label]["makespan_s"]
        for rows in seeds.values()
        if label in rows and other in rows
    ]


def geometric(values: Sequence[float]) -> float:
    """The geometric mean."""
    return math.exp(statistics.fmean(math.log(value) for value in values))


def tables(found: Found, policies: Sequence[str], ablations: Sequence[str]) -> str:
    """Shares of the bound, and the planner against the others, as Markdown."""
    labels = ["given", "fixed", *policies, "oracle"]
    blocks = [
        "Share of the proven bound, mean over draws with its 95% interval.",
        _table(found, labels, shares),
        "`planner` against each: how many times as fast on the same draws.",
        _table(
            found, [one for one in labels if one != "planner"], lambda seeds, label: ratios(seeds, "planner", label)
        ),
    ]
    if ablations:
        blocks += [
            "Parts alone: how many times as fast as the best fixed split.",
            _table(found, [*ablations, "planner"], lambda seeds, label: ratios(seeds, label, "fixed")),
        ]
    return "\n\n".join(blocks)


def _table(
    found: Found, labels: Sequence[str], values_of: Callable[[dict[str, dict[str, Row]], str], list[float]]
) -> str:
    lines = [f"| scenario | {' | '.join(f'`{label}`' for label in labels)} |", "|---" * (len(labels) + 1) + "|"]
    columns: dict[str, list[float]] = {label: [] for label in labels}
    for name, seeds in found.items():
        cells = list[str]()
        for label in labels:
            values = values_of(seeds, label)
            if values:
                columns[label].append(geometric(values))
                mean, half = interval(values)
                cells.append(f"{mean:.3f} ± {half:.3f}" if len(values) > 1 else f"{mean:.3f}")
            else:
                cells.append("-")
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    means = [f"{geometric(column):.3f}" if column else "-" for column in columns.values()]
    lines.append(f"| geometric mean | {' | '.join(means)} |")
    return "\n".join(lines)


@dataclass(frozen=True, kw_only=True)
class Kinds:
    """Scenarios by what is asked of them: ``steady`` have a lag bound of 2 or more and work that does not change."""

    steady: tuple[str, ...]
    drifting: tuple[str, ...]


def figures(
    found: Found, floors: dict[str, float], policies: Sequence[str], names: Sequence[str], kinds: Kinds
) -> list[Verdict]:
    """Every figure beside its floor, of those whose scenarios are among ``names``."""

    def share(seeds: dict[str, dict[str, Row]]) -> list[float]:
        return shares(seeds, "planner")

    def over(other: str) -> Callable[[dict[str, dict[str, Row]]], list[float]]:
        return lambda seeds: ratios(seeds, "planner", other)

    wanted = (
        ("min_planner_of_oracle", over("oracle"), names),
        ("min_steady_share", share, kinds.steady),
        ("min_drifting_share", share, kinds.drifting),
        ("min_drift_over_fixed", over("fixed"), ("drift",)),
        ("min_swe48_over_fixed", over("fixed"), ("swe48",)),
        ("min_over_wrong", over("given"), ("wrong_split",)),
        ("min_over_fixed", over("fixed"), names),
    )
    verdicts = [
        _worst(name, found, floors[name], values_of, asked)
        for name, values_of, asked in wanted
        if asked and set(asked) <= set(names)
    ]
    for baseline in policies:
        if baseline != "planner":
            verdicts += _over_baseline(baseline, found, floors)
    return verdicts


def _worst(
    name: str,
    found: Found,
    floor: float,
    values_of: Callable[[dict[str, dict[str, Row]]], list[float]],
    names: Sequence[str],
) -> Verdict:
    """The mean over draws in the worst of some scenarios; None where one of them was not played."""
    means = {one: statistics.fmean(values_of(found[one])) for one in names if one in found and values_of(found[one])}
    if len(means) < len(names) or not means:
        return Verdict(name=name, figure=None, floor=floor)
    worst = min(means, key=means.__getitem__)
    return Verdict(name=name, figure=means[worst], floor=floor, detail=worst)


def _over_baseline(baseline: str, found: Found, floors: dict[str, float]) -> list[Verdict]:
    """On the geometric mean of the scenarios; where a baseline is near the bound already, near the bound ourselves."""
    near, over = floors["baseline_is_near_above"], list[float]()
    shares_there = list[float]()
    for seeds in found.values():
        theirs, ratio = shares(seeds, baseline), ratios(seeds, "planner", baseline)
        if not theirs or not ratio:
            return [Verdict(name=f"min_over_{baseline}", figure=None, floor=floors["min_over_baselines"])]
        if statistics.fmean(theirs) > near:
            shares_there.append(statistics.fmean(shares(seeds, "planner")))
        else:
            over.append(geometric(ratio))
    verdicts = list[Verdict]()
    if over:
        name = f"min_over_{baseline}"
        verdicts.append(Verdict(name=name, figure=geometric(over), floor=floors["min_over_baselines"]))
    if shares_there:
        name = f"min_share_where_{baseline}_is_near"
        verdicts.append(Verdict(name=name, figure=min(shares_there), floor=floors["min_share_where_near"]))
    return verdicts
