"""Evaluation on held-out tasks: the same tasks for every seed, sampled and greedy, through the same path as training.

::

    consumes      READY versions
    waits for     the rollouts of its labels (deadline, culprits named)
    produces      one metrics row for each version, split and mode
"""

import operator
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from steelyard.clock import Clock
from steelyard.config import Config
from steelyard.coordinator.records import EvaluationResult
from steelyard.coordinator.service import Coordinator
from steelyard.environments.base import Environment
from steelyard.observe.rows import EvaluationLabel, EvaluationMode, EvaluationRow, EvaluationSplit
from steelyard.run.stores import Stores
from steelyard.types import Outcome, Sampling

_DEADLINE_S = 3600.0


class Series(NamedTuple):
    """One evaluation of one version."""

    label: EvaluationLabel
    split: EvaluationSplit
    mode: EvaluationMode
    num_tasks: int

    @property
    def name(self) -> str:
        """Its label in the journal."""
        return f"{self.label}/{self.split}/{self.mode}"


def planned_series(config: Config, label: EvaluationLabel) -> Iterator[Series]:
    """What the configuration asks for, for one version."""
    modes = [
        mode for mode, wanted in zip(EvaluationMode, (config.eval.sampled, config.eval.greedy), strict=True) if wanted
    ]
    sizes = {
        EvaluationSplit.HELDOUT: config.eval.num_tasks,
        EvaluationSplit.UNSEEN_TEMPLATES: config.eval.num_unseen_templates,
    }
    for split, num_tasks in sizes.items():
        if num_tasks:
            for mode in modes:
                yield Series(label, split, mode, num_tasks)


def num_planned(config: Config) -> int:
    """How many series a whole run evaluates."""
    labels = [EvaluationLabel.BEFORE] * config.eval.before + [EvaluationLabel.AFTER] * config.eval.after
    return sum(len(list(planned_series(config, label))) for label in labels)


class Evaluator:
    """Evaluates versions. ``on_row`` gets each finished series."""

    def __init__(
        self,
        config: Config,
        coordinator: Coordinator,
        environment: Environment,
        stores: Stores,
        clock: Clock,
        on_row: Callable[[EvaluationRow], None],
    ) -> None:
        self._config = config
        self._coordinator = coordinator
        self._environment = environment
        self._stores = stores
        self._clock = clock
        self._on_row = on_row

    def is_planned(self, label: EvaluationLabel) -> bool:
        """Whether the configuration asks for it."""
        wanted = self._config.eval.before if label is EvaluationLabel.BEFORE else self._config.eval.after
        return wanted and any(planned_series(self._config, label))

    def is_missing(self, label: EvaluationLabel) -> bool:
        """Whether it is planned and not all sampled yet, so that its version is needed."""
        known = self._coordinator.state.evaluations
        return self.is_planned(label) and any(
            one.name not in known or self._coordinator.evaluation_progress(one.name) != (one.num_tasks, one.num_tasks)
            for one in planned_series(self._config, label)
        )

    async def evaluate(self, label: EvaluationLabel, version: int) -> None:
        """Run all series of a READY version side by side. After a crash only what is missing is sampled.

        Raises:
            DeadlineExceeded: names the missing rollouts.
        """
        series = list(planned_series(self._config, label))
        for one in series:
            task_ids = tuple(self._environment.task_id(one.split, index) for index in range(one.num_tasks))
            await self._coordinator.admit_evaluation(
                task_ids, version=version, sampling=self._sampling(one.mode), label=one.name
            )
        await self.report(label)

    async def report(self, label: EvaluationLabel) -> None:
        """Wait for all series of a label, which are admitted, and give out their rows.

        Raises:
            DeadlineExceeded: names the missing rollouts.
        """
        for one in planned_series(self._config, label):
            results = await self._coordinator.evaluation_results(one.name, _DEADLINE_S)
            self._on_row(await self._row(one, results))

    def _sampling(self, mode: EvaluationMode) -> Sampling:
        rollout = self._config.rollout
        temperature = 0.0 if mode is EvaluationMode.GREEDY else rollout.temperature
        # The seed is that of the held-out tasks, not of the run: every run draws the same randomness.
        return Sampling(temperature=temperature, top_p=rollout.top_p, max_tokens=rollout.max_tokens, seed=0)

    async def _row(self, series: Series, results: Sequence[EvaluationResult]) -> EvaluationRow:
        causes: Counter[str] = Counter()
        solved = [result.is_success for result in results]
        valid = [await self._all_calls_valid(result) for result in results]
        for result in results:
            if not result.is_success:
                causes[await self._cause(result)] += 1
        traces = [result.trace for result in results if result.trace is not None]
        return EvaluationRow(
            at_s=self._clock.now_s(),
            label=series.label,
            mode=series.mode,
            split=series.split,
            num_tasks=len(results),
            num_success=sum(solved),
            num_all_calls_valid=sum(valid),
            num_success_all_calls_valid=sum(map(operator.and_, solved, valid)),
            causes=dict(causes),
            mean_turns=_mean([trace.num_turns for trace in traces]),
            mean_tokens=_mean([trace.num_tokens for trace in traces]),
            solved=_marks(solved),
            all_calls_valid=_marks(valid),
        )

    async def _all_calls_valid(self, result: EvaluationResult) -> bool:
        if result.attempt_id is None or result.trace is None:
            return False
        trace, _ = await self._stores.traces.read(result.attempt_id)
        return bool(trace.tools) and all(tool.is_valid for tool in trace.tools)

    async def _cause(self, result: EvaluationResult) -> str:
        """Why it failed: the environment's word where the agent did, else the outcome."""
        if result.outcome is not Outcome.SCORED or result.artifact_digest is None or result.trace is None:
            return str(result.outcome)
        artifact = await self._stores.artifacts.get(result.artifact_digest)
        return self._environment.failure_cause(result.task_id, artifact, result.trace.end_reason)


def _marks(flags: Sequence[bool]) -> str:
    return "".join("01"[flag] for flag in flags)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
