"""Which plots a report has, from the rows of a run."""

from collections.abc import Callable, Sequence

import msgspec

from steelyard.observe.charts import Chart, Frame, Merge, Series, line_chart, stacked_chart
from steelyard.observe.mismatch import steps_by_engine
from steelyard.observe.rows import AnyRow, EngineRow, EnvironmentRow, StepRow, of_type, surviving_steps
from steelyard.observe.statistics import moving_mean, share
from steelyard.observe.time_use import PART_NAMES, PARTS, part_s

_MEAN_WINDOW = 5
_ENGINE_WINDOW = 10
_MAX_REPLICAS = 7
_PART_COLOURS = {"wait": 0, "assemble": 5, "train": 3, "publish": 1, "load": 2, "checkpoint": 4}


class ChartGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Plots that belong together. ``anchor`` names the group inside the page."""

    anchor: str
    title: str
    charts: tuple[Chart, ...]


def chart_groups(rows: Sequence[AnyRow]) -> tuple[ChartGroup, ...]:
    """All groups that have something to show."""
    steps = surviving_steps(rows)
    groups = (
        ("learning", "Learning", _learning(steps)),
        ("trajectories", "Trajectories", _trajectories(steps)),
        ("speed", "Where the time goes", _speed(steps, rows)),
        ("stability", "Stability of training", _stability(steps)),
    )
    return tuple(
        ChartGroup(anchor=anchor, title=title, charts=kept)
        for anchor, title, charts in groups
        if (kept := tuple(chart for chart in charts if chart is not None))
    )


def _learning(steps: Sequence[StepRow]) -> list[Chart | None]:
    success = _of(steps, "success", lambda step: step.success_frac)
    first_try = _of(steps, "first try", lambda step: step.first_try_frac, colour=1)
    reward = _of(steps, "reward", lambda step: step.reward_mean, colour=3)
    useful = _of(steps, "useful", lambda step: share(step.num_useful_groups, step.num_groups), colour=2)
    whole = (0.0, 1.0)
    return [
        _lines(
            steps,
            Frame(title="Success while training", note="share of attempts", bounds=whole),
            *_with_mean(success),
            *_with_mean(first_try),
        ),
        _lines(steps, Frame(title="Mean reward"), *_with_mean(reward)),
        _lines(
            steps, Frame(title="Groups that teach", note="rewards not all equal", bounds=whole), *_with_mean(useful)
        ),
    ]


def _trajectories(steps: Sequence[StepRow]) -> list[Chart | None]:
    return [
        _lines(
            steps,
            Frame(title="Sampled tokens", note="by trajectory, logarithmic", scale="log"),
            _of(steps, "median", lambda step: step.tokens_p50),
            _of(steps, "99th percentile", lambda step: step.tokens_p99, colour=1),
            _of(steps, "longest", lambda step: step.tokens_max, colour=4, merge="max"),
        ),
        _lines(
            steps,
            Frame(title="Policy lag", note="steps from sampling to training"),
            _of(steps, "mean", lambda step: step.lag_mean),
            _of(steps, "highest", lambda step: float(step.lag_max), colour=4, merge="max"),
        ),
        _lines(
            steps,
            Frame(title="Turns", note="mean of a trajectory"),
            _of(steps, "turns", lambda step: step.turns_mean, colour=2),
        ),
    ]


def _speed(steps: Sequence[StepRow], rows: Sequence[AnyRow]) -> list[Chart | None]:
    parts = [
        Series(
            name=PART_NAMES[part],
            values=tuple(part_s(step, part) for step in steps),
            colour=_PART_COLOURS[part],
            look="bar",
        )
        for part in PARTS
    ]
    whole = _of(steps, "whole step", lambda step: step.wall_s, colour=6)
    return [
        stacked_chart(Frame(title="Time of a step", note="seconds by stage"), _numbers(steps), parts, whole),
        *_engine_charts(rows),
        _tool_chart(rows),
    ]


def _engine_charts(rows: Sequence[AnyRow]) -> list[Chart | None]:
    engines = of_type(rows, EngineRow)
    minutes = _minutes(engines, rows)
    names = list(dict.fromkeys(engine.replica_id for engine in engines))
    which = f"{_MAX_REPLICAS} of {len(names)} replicas" if len(names) > _MAX_REPLICAS else "by replica"
    names = names[:_MAX_REPLICAS]

    def by_replica(frame: Frame, value: Callable[[EngineRow], float]) -> Chart | None:
        series = [_of_replica(engines, name, value, colour) for colour, name in enumerate(names)]
        return line_chart(frame, minutes, series)

    def frac(title: str) -> Frame:
        return Frame(title=title, note=f"share, {which}", x_name="minute", bounds=(0.0, 1.0))

    rate = Frame(title="Sampled tokens a second", note=which, x_name="minute", from_zero=True)
    return [
        by_replica(rate, lambda engine: engine.decode_tokens_per_s),
        by_replica(frac("Time at work"), lambda engine: engine.busy_frac),
        by_replica(frac("KV cache in use"), lambda engine: engine.kv_in_use_frac),
        by_replica(frac("Prompt tokens reused"), lambda engine: engine.cached_frac),
    ]


def _of_replica(engines: Sequence[EngineRow], name: str, value: Callable[[EngineRow], float], colour: int) -> Series:
    """One replica's moving mean; it goes on through the rows of other replicas, which are not gaps of this one."""
    own = [value(engine) for engine in engines if engine.replica_id == name]
    smooth = iter(moving_mean(own, _ENGINE_WINDOW))
    filled: list[float | None] = []
    for engine in engines:
        is_own = engine.replica_id == name
        filled.append(next(smooth) if is_own else filled[-1] if filled else None)
    return Series(name=name, values=tuple(filled), colour=colour)


def _tool_chart(rows: Sequence[AnyRow]) -> Chart | None:
    tools = of_type(rows, EnvironmentRow)
    frame = Frame(title="Tool calls", note="milliseconds, logarithmic", x_name="minute", scale="log")
    return line_chart(frame, _minutes(tools, rows), [
        Series(name="median", values=tuple(row.tool_p50_ms for row in tools)),
        Series(name="99th percentile", values=tuple(row.tool_p99_ms for row in tools), colour=1),
        Series(name="sandbox start, median", values=tuple(row.sandbox_start_p50_ms for row in tools), colour=5),
    ])  # fmt: skip


def _stability(steps: Sequence[StepRow]) -> list[Chart | None]:
    nats, clipped = "nats a token", "share of sampled tokens"
    return [
        _lines(steps, Frame(title="KL divergence", note=nats), _of(steps, "KL", lambda step: step.kl)),
        _lines(
            steps,
            Frame(title="Probability ratio", note="trained to sampling policy, logarithmic", scale="log"),
            _of(steps, "mean", lambda step: step.ratio_mean),
            _of(steps, "highest", lambda step: step.ratio_max, colour=4, merge="max"),
        ),
        *_mismatch(steps),
        _lines(
            steps,
            Frame(title="Gradient norm", note="before clipping"),
            _of(steps, "norm", lambda step: step.grad_norm, colour=3),
        ),
        _lines(steps, Frame(title="Entropy", note=nats), _of(steps, "entropy", lambda step: step.entropy, colour=2)),
        _lines(
            steps,
            Frame(title="Clipped tokens", note=clipped),
            _of(steps, "clipped", lambda step: step.clip_frac),
        ),
        _lines(steps, Frame(title="Loss"), _of(steps, "loss", lambda step: step.loss, colour=3)),
    ]


def _mismatch(steps: Sequence[StepRow]) -> list[Chart | None]:
    """One chart for each kind of engine, which is one unless a run was gone on with on another."""
    return [
        _lines(
            own,
            Frame(
                title=f"Mismatch of engine {engine} and trainer", note="nats, same weights, logarithmic", scale="log"
            ),
            _of(own, "median", lambda step: step.mismatch and step.mismatch.abs_p50),
            _of(own, "99th percentile", lambda step: step.mismatch and step.mismatch.abs_p99, colour=1),
            _of(own, "largest", lambda step: step.mismatch and step.mismatch.abs_max, colour=4, merge="max"),
        )
        for engine, own in steps_by_engine(steps).items()
    ]


def _lines(steps: Sequence[StepRow], frame: Frame, *series: Series) -> Chart | None:
    return line_chart(frame, _numbers(steps), series)


def _numbers(steps: Sequence[StepRow]) -> list[float]:
    return [float(step.step) for step in steps]


def _minutes(some: Sequence[EngineRow] | Sequence[EnvironmentRow], rows: Sequence[AnyRow]) -> list[float]:
    return [round((row.at_s - rows[0].at_s) / 60, 3) for row in some]


def _of(
    steps: Sequence[StepRow],
    name: str,
    value: Callable[[StepRow], float | None],
    *,
    colour: int = 0,
    merge: Merge = "mean",
) -> Series:
    return Series(name=name, values=tuple(value(step) for step in steps), colour=colour, merge=merge)


def _with_mean(series: Series) -> list[Series]:
    """The values, faint, and their moving mean, which is what one looks at."""
    window = max(_MEAN_WINDOW, len(series.values) // 40)
    smooth = tuple(moving_mean(series.values, window))
    faint = msgspec.structs.replace(series, name=f"{series.name} of one step", look="faint", is_hidden_in_legend=True)
    return [faint, msgspec.structs.replace(series, name=f"{series.name}, mean of {window}", values=smooth)]
