"""What a report says in words and tables, from the rows of a run. Pure."""

from collections.abc import Mapping, Sequence

import msgspec

from steelyard.observe.interval_chart import Comparison
from steelyard.observe.mismatch import mismatch_alarm, steps_by_engine
from steelyard.observe.rows import (
    AnyRow,
    EngineRow,
    EvaluationLabel,
    EvaluationMode,
    EvaluationRow,
    EvaluationSplit,
    PredictionRow,
    RouterRow,
    StageName,
    StageRow,
    StepRow,
    of_type,
    surviving_steps,
)
from steelyard.observe.statistics import Interval, difference_interval, share, wilson_interval
from steelyard.observe.time_use import mean_busy_frac, name_bottleneck, time_use
from steelyard.observe.wording import (
    MISSING,
    decimals,
    duration,
    integer,
    percent,
    signed,
    significant,
    split_name,
    words,
)

EvaluationTable = Mapping[tuple[EvaluationSplit, EvaluationMode, EvaluationLabel], EvaluationRow]
_MAX_STEP_ROWS = 200


class Fact(msgspec.Struct, frozen=True, kw_only=True):
    """A number with its name, and what qualifies it."""

    name: str
    value: str
    detail: str = ""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """One evaluation setting: success before and after, each with its interval, and the gain."""

    name: str
    before: str
    after: str
    bounds: str
    counts: str
    gain: str


class CauseTable(msgspec.Struct, frozen=True, kw_only=True):
    """Failures by cause. A row is a name and one cell for each column; ``total_rows`` count other things."""

    name: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[str, ...]], ...]
    total_rows: tuple[tuple[str, tuple[str, ...]], ...]


class StepTable(msgspec.Struct, frozen=True, kw_only=True):
    """Steps as rows of text. ``num_left_out``: steps between the rows that are not shown."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    num_left_out: int


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """How far the run came. ``is_finished`` is False for a run that stopped early or still goes on."""

    is_finished: bool
    name: str
    detail: str


def newest_evaluations(rows: Sequence[AnyRow]) -> EvaluationTable:
    """The last evaluation of each setting: one that a resumed run did again replaces its old self."""
    return {(row.split, row.mode, row.label): row for row in of_type(rows, EvaluationRow)}


def status(rows: Sequence[AnyRow]) -> Status:
    """Whether the run came to its end, and where it stood at its last row."""
    stages, steps = of_type(rows, StageRow), surviving_steps(rows)
    if not rows:
        return Status(is_finished=False, name="not finished", detail="It wrote no rows.")
    stage = stages[-1].name if stages else None
    if stage in (StageName.REPORT, StageName.DONE):
        return Status(is_finished=True, name="finished", detail="")
    where = f"in the stage {words(stage)}" if stage else "before its first stage"
    done = f"after step {steps[-1].step + 1} of {steps[-1].max_steps}" if steps else "before its first step"
    return Status(is_finished=False, name="not finished", detail=f"It was {where}, {done}, at its last row.")


def headline(evaluations: EvaluationTable, steps: Sequence[StepRow]) -> str:
    """The result of the run as one sentence, as strong as its rows allow."""
    for mode in EvaluationMode:
        before = _interval(evaluations.get((EvaluationSplit.HELDOUT, mode, EvaluationLabel.BEFORE)))
        after = _interval(evaluations.get((EvaluationSplit.HELDOUT, mode, EvaluationLabel.AFTER)))
        if before and after:
            return f"Success on held-out tasks, {mode}, {_moved(before, after)}."
    known = [step.success_frac for step in steps if step.success_frac is not None]
    if known:
        return f"Success while training went from {decimals(known[0])} to {decimals(known[-1])}; not evaluated after."
    return "No step has finished, so there is no result yet."


def verdicts(evaluations: EvaluationTable) -> tuple[Verdict, ...]:
    """One verdict for each mode and split that was evaluated."""
    return tuple(
        _verdict(f"{_capital(split_name(split))}, {mode}", before, after)
        for split, mode, before, after in _settings(evaluations)
    )


def comparisons(evaluations: EvaluationTable) -> tuple[Comparison, ...]:
    """The same as :func:`verdicts`, for the plot."""
    return tuple(
        Comparison(name=f"{split_name(split)}, {mode}", before=_interval(before), after=_interval(after))
        for split, mode, before, after in _settings(evaluations)
    )


def cause_tables(evaluations: EvaluationTable) -> tuple[CauseTable, ...]:
    """Failures by cause, one table for each split."""
    tables = []
    for split in EvaluationSplit:
        keys = [(mode, label) for mode in EvaluationMode for label in EvaluationLabel]
        found = [(f"{mode}, {label}", evaluations.get((split, mode, label))) for mode, label in keys]
        present = [(name, row) for name, row in found if row is not None]
        if present:
            tables.append(_cause_table(split, present))
    return tuple(tables)


def facts(rows: Sequence[AnyRow]) -> tuple[Fact, ...]:
    """The run in a few numbers."""
    steps = surviving_steps(rows)
    engines = of_type(rows, EngineRow)
    if not rows:
        return ()
    spent = max(row.at_s for row in rows) - min(row.at_s for row in rows)
    starts = sum(row.name is StageName.START for row in of_type(rows, StageRow))
    resumed = f"resumed {starts - 1} times, pauses included" if starts > 1 else "from first to last row"
    found = [Fact(name="time", value=duration(spent), detail=resumed)]
    if steps:
        found += _step_facts(steps)
    if routers := of_type(rows, RouterRow):
        found.append(_router_fact(routers))
    found += _prediction_facts(of_type(rows, PredictionRow))
    use = time_use(steps)
    if use is not None:
        is_synchronous = all(step.lag_max == 0 for step in steps)
        bottleneck = name_bottleneck(use, mean_busy_frac(engines), is_synchronous)
        found.append(Fact(name="bottleneck", value=bottleneck.name, detail=bottleneck.reason))
    return tuple(found)


def _prediction_facts(rows: Sequence[PredictionRow]) -> list[Fact]:
    """How far each term is from the calibration by now."""
    return [
        Fact(
            name=f"{row.term}, observed over calibrated",
            value=significant(row.factor, 3),
            detail=f"predictions with it were off by {percent(row.error_frac)} at the end, of {row.num_observed}",
        )
        for row in {row.term: row for row in rows}.values()
    ]


def _router_fact(routers: Sequence[RouterRow]) -> Fact:
    """The longest waits of any few seconds, and what the router did so far; a resumed run counts anew."""
    waits = [row.wait_p99_s for row in routers if row.wait_p99_s is not None]
    last = routers[-1]
    counts = (
        f"{last.num_moves} moves, {last.num_retries} retries, {last.num_hedges} hedges, "
        f"{last.num_queue_timeouts} queue timeouts"
    )
    return Fact(name="longest wait for a replica", value=f"{significant(max(waits, default=0.0), 2)} s", detail=counts)


def step_table(steps: Sequence[StepRow]) -> StepTable:
    """All steps as numbers; of a long run every n-th and the last."""
    stride = max(1, -(-len(steps) // _MAX_STEP_ROWS))
    chosen = [step for index, step in enumerate(steps) if index % stride == 0 or index == len(steps) - 1]
    columns = (
        "step", "version", "success", "first try", "reward", "useful groups", "lag mean", "lag max", "tokens p50",
        "tokens p99", "tokens max", "KL", "ratio max", "mismatch p99", "gradient norm", "entropy",
        "wait", "train", "step time",
    )  # fmt: skip
    return StepTable(columns=columns, rows=tuple(map(_step_cells, chosen)), num_left_out=len(steps) - len(chosen))


def _step_cells(step: StepRow) -> tuple[str, ...]:
    return (
        str(step.step),
        str(step.version),
        decimals(step.success_frac, 3),
        decimals(step.first_try_frac, 3),
        decimals(step.reward_mean, 3),
        f"{step.num_useful_groups} of {step.num_groups}",
        decimals(step.lag_mean),
        str(step.lag_max),
        integer(step.tokens_p50),
        integer(step.tokens_p99),
        integer(step.tokens_max),
        significant(step.kl, 2),
        significant(step.ratio_max),
        significant(step.mismatch.abs_p99 if step.mismatch else None, 2),
        significant(step.grad_norm),
        significant(step.entropy),
        duration(step.wait_s),
        duration(step.train_s),
        duration(step.wall_s),
    )


def _step_facts(steps: Sequence[StepRow]) -> list[Fact]:
    trajectories = sum(step.num_trajectories for step in steps)
    sampled = sum(step.num_loss_tokens for step in steps)
    groups = sum(step.num_groups for step in steps)
    useful = share(sum(step.num_useful_groups for step in steps), groups)
    wall_s = sum(step.wall_s for step in steps)
    return [
        Fact(name="optimizer steps", value=f"{steps[-1].step + 1} of {steps[-1].max_steps}"),
        Fact(name="trajectories", value=integer(trajectories), detail=f"in {integer(groups)} groups"),
        Fact(name="trained tokens", value=integer(sampled), detail="sampled ones, in the loss"),
        Fact(name="useful groups", value=percent(useful), detail="rewards not all equal"),
        Fact(name="highest lag", value=str(max(step.lag_max for step in steps)), detail="optimizer steps"),
        Fact(name="mean step", value=duration(share(wall_s, len(steps)))),
        *(_mismatch_fact(engine, own) for engine, own in steps_by_engine(steps).items()),
    ]


def _mismatch_fact(engine: str, steps: Sequence[StepRow]) -> Fact:
    """Engine and trainer on equal weights: the worst step, and how many were beyond the bound."""
    found = [step.mismatch for step in steps if step.mismatch is not None]
    num_alarms = sum(mismatch_alarm(step) is not None for step in steps)
    beyond = f"; beyond the bound in {num_alarms} steps" if num_alarms else ""
    return Fact(
        name=f"mismatch, engine {engine}",
        value=f"{significant(max(m.abs_p99 for m in found), 2)} nats",
        detail=f"highest 99th percentile of a step; KL at most {significant(max(m.kl_k3 for m in found), 2)}{beyond}",
    )


def _settings(
    evaluations: EvaluationTable,
) -> list[tuple[EvaluationSplit, EvaluationMode, EvaluationRow | None, EvaluationRow | None]]:
    settings = []
    for split in EvaluationSplit:
        for mode in EvaluationMode:
            before = evaluations.get((split, mode, EvaluationLabel.BEFORE))
            after = evaluations.get((split, mode, EvaluationLabel.AFTER))
            if before or after:
                settings.append((split, mode, before, after))
    return settings


def _interval(row: EvaluationRow | None) -> Interval | None:
    return wilson_interval(row.num_success, row.num_tasks) if row else None


def _verdict(name: str, before: EvaluationRow | None, after: EvaluationRow | None) -> Verdict:
    low, high = _interval(before), _interval(after)
    gain = difference_interval(low, high) if low and high else None
    return Verdict(
        name=name,
        before=decimals(low.estimate) if low else MISSING,
        after=decimals(high.estimate) if high else MISSING,
        bounds=f"{_bounds(low)} → {_bounds(high)}",
        counts=f"{_counts(before)} → {_counts(after)}",
        gain=f"{signed(gain.estimate)} ({signed(gain.low)} to {signed(gain.high)})" if gain else "",
    )


def _bounds(interval: Interval | None) -> str:
    return f"{decimals(interval.low)} to {decimals(interval.high)}" if interval else MISSING


def _counts(row: EvaluationRow | None) -> str:
    return f"{row.num_success} of {row.num_tasks}" if row else MISSING


def _moved(before: Interval, after: Interval) -> str:
    gain = difference_interval(before, after)
    numbers = f"from {decimals(before.estimate)} to {decimals(after.estimate)}"
    if gain.low > 0:
        return f"rose {numbers}"
    return f"fell {numbers}" if gain.high < 0 else f"went {numbers}, which may be chance"


def _cause_table(split: EvaluationSplit, present: Sequence[tuple[str, EvaluationRow]]) -> CauseTable:
    rows = [row for _, row in present]
    totals: dict[str, int] = {}
    for row in rows:
        for cause, count in row.causes.items():
            totals[cause] = totals.get(cause, 0) + count
    causes = sorted((cause for cause, total in totals.items() if total), key=lambda cause: (-totals[cause], cause))
    lines = [(_capital(words(cause)), tuple(_part(row.causes.get(cause, 0), row) for row in rows)) for cause in causes]
    unexplained = [row.num_tasks - row.num_success - sum(row.causes.values()) for row in rows]
    if any(unexplained):
        lines.append(("Without a cause", tuple(_part(n, row) for n, row in zip(unexplained, rows, strict=True))))
    valid = [wilson_interval(row.num_success_all_calls_valid, row.num_all_calls_valid) for row in rows]
    return CauseTable(
        name=_capital(split_name(split)),
        columns=tuple(_capital(name) for name, _ in present),
        rows=tuple(lines),
        total_rows=(
            ("Solved", tuple(_part(row.num_success, row) for row in rows)),
            ("Tasks", tuple(integer(row.num_tasks) for row in rows)),
            ("All calls valid", tuple(_part(row.num_all_calls_valid, row) for row in rows)),
            ("Solved, of those", tuple(decimals(one.estimate) if one else MISSING for one in valid)),
            ("Mean turns", tuple(decimals(row.mean_turns, 1) for row in rows)),
            ("Mean sampled tokens", tuple(integer(row.mean_tokens) for row in rows)),
        ),
    )


def _part(count: int, row: EvaluationRow) -> str:
    return f"{count} ({decimals(share(count, row.num_tasks))})"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
