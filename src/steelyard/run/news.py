"""What a run tells people: rows into metrics.jsonl and onto the display, samples of the parts now and then.

Nothing is decided here. A display that breaks does not break the run.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Protocol

from steelyard.allocation.run_prediction import RunPrediction
from steelyard.clock import Clock
from steelyard.coordinator.books import Books
from steelyard.coordinator.service import Coordinator
from steelyard.errors import RunError
from steelyard.inference.engine import Engine
from steelyard.inference.router import Router, RouterFigures
from steelyard.metrics import Counters, MetricsFile
from steelyard.observe.display import Display, show
from steelyard.observe.rows import (
    AnyRow,
    BooksRow,
    EngineRow,
    EnvironmentRow,
    PredictionRow,
    PromptBook,
    RouterRow,
    StageName,
    StageRow,
    StepRow,
    TokenBook,
    write_row,
)
from steelyard.observe.statistics import quantile
from steelyard.run.predicting import sampling_rows, step_rows
from steelyard.types import EngineStats

logger = logging.getLogger(__name__)

_EVERY_S = 2.0
_BOOKS_EVERY = 5
_KEPT_LATENCIES = 2000


class Recorded(Protocol):
    """The ledger of recorded tokens."""

    @property
    def by_attempt(self) -> Mapping[str, int]: ...


class ToolTimes:
    """Latencies since they were last taken, bounded."""

    def __init__(self) -> None:
        self._tool_s: deque[float] = deque(maxlen=_KEPT_LATENCIES)
        self._sandbox_s: deque[float] = deque(maxlen=_KEPT_LATENCIES)
        self._num_calls = self._num_failed = self._num_timed_out = 0

    def note_tool(self, latency_s: float, outcome: str) -> None:
        """One tool call."""
        self._tool_s.append(latency_s)
        self._num_calls += 1
        self._num_failed += outcome == "error"
        self._num_timed_out += outcome == "timeout"

    def note_sandbox(self, latency_s: float) -> None:
        """One sandbox handed out."""
        self._sandbox_s.append(latency_s)

    def take(self, at_s: float) -> EnvironmentRow:
        """The row since the last one."""
        tools, sandboxes = sorted(self._tool_s), sorted(self._sandbox_s)
        calls = max(1, self._num_calls)
        row = EnvironmentRow(
            at_s=at_s,
            tool_p50_ms=_ms(quantile(tools, 0.5)),
            tool_p99_ms=_ms(quantile(tools, 0.99)),
            sandbox_start_p50_ms=_ms(quantile(sandboxes, 0.5)),
            failure_frac=self._num_failed / calls,
            timeout_frac=self._num_timed_out / calls,
        )
        self._tool_s.clear()
        self._sandbox_s.clear()
        self._num_calls = self._num_failed = self._num_timed_out = 0
        return row


class News:
    """Rows for the file and the display."""

    def __init__(self, file: MetricsFile, display: Display, clock: Clock) -> None:
        self._file = file
        self._display = display
        self._clock = clock
        self._last_stats: dict[str, tuple[float, EngineStats]] = {}
        self._prediction: RunPrediction | None = None
        self.counters = Counters()
        self.tools = ToolTimes()

    def row(self, row: AnyRow) -> None:
        """Write and show a row."""
        write_row(self._file, row)
        show(self._display, row)
        if self._prediction is not None and isinstance(row, StepRow):
            self._write_all(step_rows(self._prediction, row))

    def compare_with(self, prediction: RunPrediction | None) -> None:
        """From now on write what each part takes beside what it should take."""
        self._prediction = prediction

    def stage(self, name: StageName, detail: str = "") -> None:
        """The run entered a stage."""
        self.row(StageRow(at_s=self._clock.now_s(), name=name, detail=detail))

    def note(self, text: str) -> None:
        """A message for the user."""
        self._display.note(text)

    async def watch(self, coordinator: Coordinator, router: Router, recorded: Recorded) -> None:
        """Sample the parts every few seconds, for ever.

        *Consumes* stats and books; *waits for* time; *unblocked by* time; *produces* rows.
        """
        round_number = 0
        try:
            while True:
                await asyncio.sleep(_EVERY_S)
                await self._sample_engines(router.replicas)
                self._sample_router(router)
                self.row(self.tools.take(self._clock.now_s()))
                if round_number % _BOOKS_EVERY == 0:
                    await self.books(coordinator, recorded)
                round_number += 1
        finally:
            # The counts of the whole run, though its last seconds are no full round.
            self._sample_router(router)

    def _sample_router(self, router: Router) -> None:
        self.row(router_row(router.take_figures(), self._clock.now_s(), self.counters.read()))

    async def books(self, coordinator: Coordinator, recorded: Recorded) -> None:
        """Write the books as they are now."""
        books = await coordinator.books(recorded.by_attempt)
        self.row(books_row(books, self._clock.now_s(), self.counters.read()))

    async def _sample_engines(self, engines: Mapping[str, Engine]) -> None:
        for name, engine in tuple(engines.items()):
            try:
                stats, now_s = await engine.stats(), self._clock.now_s()
            except RunError as error:
                # Its death is the fleet's business; figures of the one that takes its place begin at zero.
                self._last_stats.pop(name, None)
                logger.info("no figures of replica %s: %s", name, error)
                continue
            before_s, before = self._last_stats.get(name, (now_s - _EVERY_S, None))
            self._last_stats[name] = (now_s, stats)
            if before is not None:
                self.row(engine_row(stats, before, now_s, now_s - before_s))
                if self._prediction is not None:
                    self._write_all(sampling_rows(self._prediction, stats, before, now_s))

    def _write_all(self, rows: Sequence[PredictionRow]) -> None:
        for row in rows:
            write_row(self._file, row)


def engine_row(stats: EngineStats, before: EngineStats, at_s: float, elapsed_s: float) -> EngineRow:
    """Rates between two samples of one replica."""
    prefill = stats.prefill_tokens - before.prefill_tokens
    cached = stats.cached_tokens - before.cached_tokens
    return EngineRow(
        at_s=at_s,
        replica_id=stats.replica_id,
        decode_tokens_per_s=(stats.decode_tokens - before.decode_tokens) / elapsed_s,
        prefill_tokens_per_s=prefill / elapsed_s,
        cached_frac=cached / max(1, cached + prefill),
        num_running=stats.num_running,
        num_waiting=stats.num_waiting,
        kv_in_use_frac=stats.kv_tokens_in_use / max(1, stats.kv_tokens_capacity),
        busy_frac=min(1.0, (stats.busy_s - before.busy_s) / elapsed_s),
        num_evicted=stats.num_evicted - before.num_evicted,
    )


def router_row(figures: RouterFigures, at_s: float, counts: Mapping[str, int]) -> RouterRow:
    """The router in the form of the metrics."""
    waits_s = sorted(figures.waits_s)
    return RouterRow(
        at_s=at_s,
        num_waiting=figures.num_waiting,
        num_open=figures.num_open,
        wait_p50_s=quantile(waits_s, 0.5),
        wait_p99_s=quantile(waits_s, 0.99),
        num_moves=counts.get("router.moves", 0),
        num_retries=counts.get("router.retries", 0),
        num_hedges=counts.get("router.hedges", 0),
        num_queue_timeouts=counts.get("router.queue_timeouts", 0),
        weights=figures.weights,
        projected_kv_frac=figures.projected_kv_frac,
        draining=figures.draining,
    )


def books_row(books: Books, at_s: float, counts: Mapping[str, int]) -> BooksRow:
    """The books in the form of the metrics."""
    prompts, tokens = books.prompts, books.tokens
    prefix = "refused."
    return BooksRow(
        at_s=at_s,
        prompts=PromptBook(
            issued=prompts.issued, trained=prompts.trained, dropped=dict(prompts.dropped), live=prompts.live
        ),
        tokens=TokenBook(
            recorded=tokens.recorded,
            trained=tokens.trained,
            evaluated=tokens.evaluated,
            rejected=dict(tokens.rejected),
            in_flight=tokens.in_flight,
            lost=dict(tokens.lost),
        ),
        refused={name.removeprefix(prefix): count for name, count in counts.items() if name.startswith(prefix)},
    )


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1000.0 * seconds
