"""The live display's picture: lines of styled text for a given width and height. Pure."""

from collections.abc import Iterable

import msgspec
from rich.cells import cell_len
from rich.text import Text

from steelyard.observe.books import open_books
from steelyard.observe.mismatch import mismatch_alarm
from steelyard.observe.progress import RECENT_STEPS, EvaluationKey, Progress
from steelyard.observe.rows import (
    EvaluationLabel,
    EvaluationMode,
    EvaluationRow,
    EvaluationSplit,
    StageName,
    StepRow,
)
from steelyard.observe.sparkline import sparkline
from steelyard.observe.statistics import wilson_interval
from steelyard.observe.time_use import TimeUse
from steelyard.observe.wording import (
    decimals,
    duration,
    integer,
    one_line,
    percent,
    signed,
    significant,
    split_name,
    stopwatch,
    time_left,
    words,
)

MAX_WIDTH = 110
_LABEL_WIDTH = 11
_VALUE_WIDTH = 7
_MAX_SPARK = 60
_STAGES = {
    StageName.PREPARE_POLICY: "policy",
    StageName.START: "start",
    StageName.TRAIN: "train",
    StageName.EVALUATE: "evaluate",
    StageName.REPORT: "report",
}


class _Line(msgspec.Struct, frozen=True):
    """A line, and how early it goes where there is no room: the highest ``rank`` first."""

    rank: int
    text: Text


_BLANK_RANK = 9


def frame(progress: Progress, now_s: float, width: int, height: int) -> list[Text]:
    """At most ``height`` lines of at most ``width`` cells. What matters least goes first where there is no room."""
    width = max(1, min(width, MAX_WIDTH))
    lines = [
        *_head(progress, now_s, width),
        *_learning(progress, width),
        *_flow(progress),
        *_time(progress, width),
        *_evaluations(progress, width),
        *_alarms(progress),
    ]
    kept = _fit(_without_double_blanks(lines), max(1, height))
    for line in kept:
        line.truncate(width, overflow="ellipsis")
    return kept


def _without_double_blanks(lines: list[_Line]) -> list[_Line]:
    pairs = zip(lines, [*lines[1:], _blank()], strict=True)
    return [line for line, following in pairs if line.text or following.text]


def _fit(lines: list[_Line], height: int) -> list[Text]:
    while len(lines) > height:
        worst = max(range(len(lines)), key=lambda index: (lines[index].rank, index))
        del lines[worst]
    return [line.text for line in lines]


def _blank() -> _Line:
    return _Line(_BLANK_RANK, Text(""))


def _labelled(label: str, *parts: str | tuple[str, str]) -> Text:
    return Text.assemble((f"{label:<{_LABEL_WIDTH}}", "dim"), *parts)


def _head(progress: Progress, now_s: float, width: int) -> Iterable[_Line]:
    name = one_line(progress.plan.run_name)
    elapsed = stopwatch(now_s - progress.started_at_s)
    title = Text.assemble(("Steelyard", "bold cyan"), "  ", (name, "bold"))
    gap = width - title.cell_len - cell_len(elapsed)
    if gap >= 2:
        title.append(" " * gap).append(elapsed, "dim")
    yield _Line(0, title)
    yield _Line(3, _stages(progress))
    if progress.stage_detail and progress.stage is not StageName.TRAIN:
        yield _Line(5, _labelled(words(progress.stage), one_line(progress.stage_detail)))
    if progress.max_steps:
        yield _Line(0, _step_bar(progress, width))
        if progress.is_under_way:
            yield _Line(1, _labelled("", time_left(progress.time_left(now_s))))


def _stages(progress: Progress) -> Text:
    text = Text()
    for stage, name in _STAGES.items():
        if stage is progress.stage:
            text.append(f"● {name}  ", "bold cyan")
        elif stage in progress.stages_seen and not (stage is StageName.EVALUATE and progress.num_evaluations_left):
            text.append(f"✓ {name}  ", "green")
        else:
            text.append(f"○ {name}  ", "dim")
    if progress.stage is StageName.DONE:
        text.append("✓ done", "bold green")
    return text


def _step_bar(progress: Progress, width: int) -> Text:
    done, whole = progress.num_steps_done, progress.max_steps
    count = f"{done}/{whole}"
    share = f" {percent(done / whole)}"
    room = min(50, width - _LABEL_WIDTH - len(count) - len(share) - 1)
    text = _labelled("step", (count, "bold"), " ")
    if room >= 8:
        filled = min(room, round(room * done / whole))
        text.append("━" * filled, "cyan").append("━" * (room - filled), "dim")
    return text.append(share)


def _learning(progress: Progress, width: int) -> Iterable[_Line]:
    last = progress.last_step
    yield _blank()
    if last is None:
        if progress.stage is StageName.TRAIN:
            yield _Line(1, _labelled("success", ("waiting for the first batch", "dim")))
        return
    change = progress.success_change()
    lately = f" {signed(change)}" if change is not None else ""
    if lately and width >= 72:
        lately += f" in {RECENT_STEPS} steps"
    successes = [step.success_frac for step in progress.steps]
    rewards = [step.reward_mean for step in progress.steps]
    yield _Line(0, _series("success", successes, width, "green", lately))
    yield _Line(2, _series("reward", rewards, width, "blue"))
    yield _Line(4, _labelled("first try", decimals(last.first_try_frac), ("  right at the first edit", "dim")))
    yield _Line(5, _groups(last))


def _series(label: str, values: list[float | None], width: int, style: str, after: str = "") -> Text:
    text = _labelled(label, (f"{decimals(values[-1]):<{_VALUE_WIDTH}}", "bold"))
    room = min(_MAX_SPARK, width - _LABEL_WIDTH - _VALUE_WIDTH - len(after))
    if room >= 5:
        text.append(sparkline(values, room), style)
    return text.append(after, "dim")


def _groups(step: StepRow) -> Text:
    share = f"{step.num_useful_groups} of {step.num_groups}"
    return _labelled("groups", share, (" had rewards that differ", "dim"))


def _flow(progress: Progress) -> Iterable[_Line]:
    last = progress.last_step
    if last is not None:
        worst = f"{last.lag_max} at most"
        yield _Line(2, _labelled("lag", (f"{decimals(last.lag_mean, 1):<{_VALUE_WIDTH}}", "bold"), (worst, "dim")))
        lengths = f"{integer(last.tokens_p50)} median, {integer(last.tokens_p99)} p99, {integer(last.tokens_max)} max"
        yield _Line(6, _labelled("lengths", lengths, (" tokens sampled", "dim")))
    if last is not None and last.mismatch is not None:
        size = f"{significant(last.mismatch.abs_p99, 2):<{_VALUE_WIDTH}}"
        yield _Line(8, _labelled("mismatch", size, (f"nats at p99, engine {last.engine} to trainer", "dim")))
    engines = progress.newest_engines
    if engines:
        rate = f"{integer(progress.decode_tokens_per_s):<{_VALUE_WIDTH}}"
        running, waiting = sum(e.num_running for e in engines), sum(e.num_waiting for e in engines)
        kv_in_use = percent(max(engine.kv_in_use_frac for engine in engines))
        state = f"{running} running, {waiting} waiting, KV {kv_in_use}"
        yield _Line(1, _labelled("tokens/s", (rate, "bold"), (state, "dim")))
    tools = progress.environment
    if tools is not None and tools.tool_p50_ms is not None:
        times = f"{significant(tools.tool_p50_ms, 2)} ms median, {significant(tools.tool_p99_ms, 2)} ms p99"
        failed = tools.failure_frac + tools.timeout_frac
        yield _Line(
            7, _labelled("tool calls", times, (f", {percent(failed)} failed", "red" if failed > 0.05 else "dim"))
        )


def _time(progress: Progress, width: int) -> Iterable[_Line]:
    use, bottleneck = progress.time_use(), progress.bottleneck()
    if use is None or bottleneck is None:
        return
    yield _blank()
    shares = _grouped(use)
    yield _Line(3, _labelled("step time", (f"{duration(use.wall_s):<{_VALUE_WIDTH}} ", "bold"), *_bar(shares, width)))
    legend = Text.assemble(
        (" " * _LABEL_WIDTH, ""),
        *(
            part
            for name, glyph, style, share in shares
            if share >= 0.005
            for part in _legend(name, glyph, style, share)
        ),
    )
    yield _Line(4, legend)
    yield _Line(1, _labelled("bottleneck", (bottleneck.name, "bold yellow"), (f"  {bottleneck.reason}", "dim")))


def _grouped(use: TimeUse) -> list[tuple[str, str, str, float]]:
    train = use.frac("assemble") + use.frac("train")
    publish = use.frac("publish") + use.frac("load") + use.frac("checkpoint")
    other = use.other_s / use.wall_s if use.wall_s > 0 else 0.0
    return [
        ("rollouts", "█", "cyan", use.frac("wait")),
        ("training", "▓", "magenta", train),
        ("publishing", "▒", "yellow", publish),
        ("other", "░", "dim", other),
    ]


def _bar(shares: list[tuple[str, str, str, float]], width: int) -> list[tuple[str, str]]:
    room = min(50, width - _LABEL_WIDTH - _VALUE_WIDTH - 1)
    whole = max(1.0, sum(share for *_, share in shares))
    if room < 8:
        return []
    return [(glyph * round(room * share / whole), style) for _, glyph, style, share in shares]


def _legend(name: str, glyph: str, style: str, share: float) -> list[tuple[str, str]]:
    return [(f"{glyph} ", style), (f"{name} {percent(share)}  ", "")]


def _evaluations(progress: Progress, width: int) -> Iterable[_Line]:
    if not progress.evaluations:
        return
    yield _blank()
    rank = 1
    for split in EvaluationSplit:
        for mode in EvaluationMode:
            before, after = (
                progress.evaluations.get(_key(split, mode, label))
                for label in (EvaluationLabel.BEFORE, EvaluationLabel.AFTER)
            )
            if before or after:
                yield _Line(rank, _evaluation(split, mode, before, after, width))
                rank += 1


def _key(split: EvaluationSplit, mode: EvaluationMode, label: EvaluationLabel) -> EvaluationKey:
    return (split, mode, label)


def _evaluation(
    split: EvaluationSplit,
    mode: EvaluationMode,
    before: EvaluationRow | None,
    after: EvaluationRow | None,
    width: int,
) -> Text:
    with_bounds = width >= 72
    name = f"{split_name(split)}, {mode}"
    text = _labelled("evaluated", f"{name:<26}") if width >= 60 else Text(f"{words(split)[:7]} {mode} ")
    text.append(_rate(before, with_bounds)).append(" → ", "dim")
    return text.append(_rate(after, with_bounds), "bold green" if after else "dim")


def _rate(row: EvaluationRow | None, with_bounds: bool) -> str:
    interval = wilson_interval(row.num_success, row.num_tasks) if row else None
    if interval is None:
        return "…"
    bounds = f" ({decimals(interval.low)} to {decimals(interval.high)})" if with_bounds else ""
    return decimals(interval.estimate) + bounds


def _alarms(progress: Progress) -> Iterable[_Line]:
    for problem in open_books(progress.books) if progress.books else []:
        yield _Line(0, Text(problem, "bold red"))
    alarm = mismatch_alarm(progress.last_step) if progress.last_step else None
    if alarm is not None:
        yield _Line(0, Text(alarm, "bold red"))
