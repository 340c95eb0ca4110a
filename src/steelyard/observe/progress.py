"""What is known of a run so far, gathered row by row for the displays. Pure: rows and times come in."""

from collections.abc import Sequence

import msgspec

from steelyard.observe.progress_estimate import TimeLeft, WorkLeft, estimate_time_left
from steelyard.observe.rows import (
    AnyRow,
    BooksRow,
    EngineRow,
    EnvironmentRow,
    EvaluationLabel,
    EvaluationMode,
    EvaluationRow,
    EvaluationSplit,
    StageName,
    StageRow,
    StepRow,
    surviving_steps,
)
from steelyard.observe.statistics import mean
from steelyard.observe.time_use import Bottleneck, TimeUse, mean_busy_frac, name_bottleneck, time_use

RECENT_STEPS = 10
"""Over how many steps "lately" reaches."""
_NUM_RATE_ROWS = 5
_NUM_BUSY_ROWS = 20

EvaluationKey = tuple[EvaluationSplit, EvaluationMode, EvaluationLabel]


class RunPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What a run is going to do. ``num_evaluations``: evaluation rows still to come when the display starts."""

    run_name: str = "run"
    max_steps: int = 0
    num_evaluations: int = 0


class Progress:
    """Everything seen so far. Rows may come in any order of kinds; a resumed step supersedes its old self."""

    def __init__(self, plan: RunPlan, started_at_s: float) -> None:
        self.plan = plan
        self.started_at_s = started_at_s
        self.has_ended = False
        self.stage = StageName.PREPARE_POLICY
        self.stage_detail = ""
        self.stages_seen: set[StageName] = set()
        self.steps: tuple[StepRow, ...] = ()
        self.engines: dict[str, tuple[EngineRow, ...]] = {}
        self.environment: EnvironmentRow | None = None
        self.books: BooksRow | None = None
        self.evaluations: dict[EvaluationKey, EvaluationRow] = {}
        self._pace_mark_s = started_at_s
        self._evaluation_times_s: tuple[float, ...] = ()

    def take(self, row: AnyRow) -> None:
        """Add one row. State is replaced, never changed in place: another thread may be reading it."""
        if isinstance(row, StageRow):
            self.stage, self.stage_detail = row.name, row.detail
            self.stages_seen = self.stages_seen | {row.name}
            self._pace_mark_s = row.at_s
        elif isinstance(row, StepRow):
            self.steps = tuple(surviving_steps((*self.steps, row)))
            self._pace_mark_s = row.at_s
        elif isinstance(row, EngineRow):
            rows = (*self.engines.get(row.replica_id, ()), row)[-_NUM_BUSY_ROWS:]
            self.engines = {**self.engines, row.replica_id: rows}
        elif isinstance(row, EnvironmentRow):
            self.environment = row
        elif isinstance(row, BooksRow):
            self.books = row
        elif isinstance(row, EvaluationRow):
            self._evaluation_times_s = (*self._evaluation_times_s, row.at_s - self._pace_mark_s)
            self._pace_mark_s = row.at_s
            self.evaluations = {**self.evaluations, (row.split, row.mode, row.label): row}

    @property
    def last_step(self) -> StepRow | None:
        """The newest step, if any."""
        return self.steps[-1] if self.steps else None

    @property
    def recent_steps(self) -> Sequence[StepRow]:
        """The last few steps."""
        return self.steps[-RECENT_STEPS:]

    @property
    def max_steps(self) -> int:
        """How many steps the run is to have; 0 where nobody said yet."""
        return self.last_step.max_steps if self.last_step else self.plan.max_steps

    @property
    def num_steps_done(self) -> int:
        """Steps that are behind the run, those before a resume included."""
        return self.last_step.step + 1 if self.last_step else 0

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Sampled tokens a second lately, over all replicas; None before any replica spoke."""
        if not self.engines:
            return None
        recent = [rows[-_NUM_RATE_ROWS:] for rows in self.engines.values()]
        return sum(mean([row.decode_tokens_per_s for row in rows]) or 0.0 for rows in recent)

    @property
    def newest_engines(self) -> list[EngineRow]:
        """The newest row of each replica."""
        return [rows[-1] for rows in self.engines.values()]

    @property
    def is_under_way(self) -> bool:
        """Steps or evaluations may still come: neither is the run done nor has its display been closed."""
        return not self.has_ended and self.stage not in (StageName.REPORT, StageName.DONE)

    @property
    def num_evaluations_left(self) -> int:
        """Evaluations that the plan still has to come."""
        return max(0, self.plan.num_evaluations - len(self._evaluation_times_s))

    def time_use(self) -> TimeUse | None:
        """Where the time of recent steps went."""
        return time_use(self.recent_steps)

    def bottleneck(self) -> Bottleneck | None:
        """Which stage sets the pace; None before the first step."""
        use = self.time_use()
        if use is None:
            return None
        busy_frac = mean_busy_frac([row for rows in self.engines.values() for row in rows])
        return name_bottleneck(use, busy_frac, is_synchronous=all(step.lag_max == 0 for step in self.recent_steps))

    def success_change(self) -> float | None:
        """Mean success of the recent steps less that of as many before them; None while there are too few."""
        known = [step.success_frac for step in self.steps if step.success_frac is not None]
        late, early = mean(known[-RECENT_STEPS:]), mean(known[-2 * RECENT_STEPS : -RECENT_STEPS])
        return late - early if late is not None and early is not None else None

    def time_left(self, now_s: float) -> TimeLeft | None:
        """Estimate of what is left; None while too little is known."""
        if not self.is_under_way or not self.max_steps:
            return None
        work = WorkLeft(
            num_steps=self.max_steps - self.num_steps_done,
            since_last_step_s=max(0.0, now_s - self._pace_mark_s),
            num_evaluations=self.num_evaluations_left,
            evaluation_s=mean(self._evaluation_times_s),
        )
        return estimate_time_left([step.wall_s for step in self.steps], work)
