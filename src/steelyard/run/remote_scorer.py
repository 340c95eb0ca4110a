"""A scorer as a process of its own, on any machine: jobs over HTTP, artifacts from the store, graders as children here.

::

    key, configuration -> own folder, swept -> does it fit the run? -> grader processes -> grade until told to stop
"""

import asyncio
import os
from pathlib import Path

from steelyard.config import Config
from steelyard.coordinator.capability import Role
from steelyard.durable import storage_errors
from steelyard.run import joining
from steelyard.run.children import start_child
from steelyard.run.describing import require_fit
from steelyard.run.patience import PatientScores
from steelyard.run.rollouts import grader_settings
from steelyard.run.scorer_process import ScorerOptions as GraderOptions
from steelyard.run.scratch import scratch_folder
from steelyard.scoring.base import GraderHandle
from steelyard.scoring.pool import GraderPool
from steelyard.scoring.process import ChildGrader
from steelyard.scoring.worker import ScoringWorker, WorkerSettings

_POLL_S = 1.0
_DRAIN_GRACE_S = 5.0


class ScorerOptions(joining.JoinOptions, frozen=True, kw_only=True):
    """``num_processes``: grader processes; None takes ``scoring.num_workers``, at least one."""

    num_processes: int | None = None


async def run_scorer(config: Config, options: ScorerOptions) -> None:
    """Grade until SIGTERM or Ctrl-C. Raises as of :func:`joining.join_and_work`."""
    await joining.join_and_work(Role.SCORER, config, options, _join)


class _Scorer:
    """A scoring worker with the lines that it says."""

    def __init__(self, worker: ScoringWorker, scores: PatientScores) -> None:
        self._worker = worker
        self._scores = scores

    async def run(self, stop: asyncio.Event) -> None:
        await self._worker.run(stop)

    def news(self) -> str:
        return f"{self._scores.num_scored} scores delivered, {self._worker.num_live} gradings under way"


class _Graders:
    """Starts grader processes, each with a socket of its own."""

    def __init__(self, config: Config, home: Path, sockets: Path) -> None:
        self._config = config
        self._home = home
        self._sockets = sockets
        self._num_started = 0

    async def start(self, name: str) -> GraderHandle:
        self._num_started += 1
        config = self._config
        options = GraderOptions(
            name=name,
            socket_path=str(self._sockets / f"{name}-{self._num_started}.sock"),
            parent_pid=os.getpid(),
            environment=config.environment.kind,
            environment_options=config.environment.options,
            sandbox=config.sandbox,
            registry_dir=str(self._home / "sandboxes" / name),
        )
        child = await start_child("steelyard.run.scorer_process", options, log_folder=self._home / "logs")
        return await ChildGrader.start(child, Path(options.socket_path), config.runtime.start_deadline_s)


async def _join(own: joining.Joining[ScorerOptions]) -> _Scorer | None:
    """Look at the run, then open everything; None where the stop came first."""
    config, options, home = own.config, own.options, own.home
    own.say(f"asking {' or '.join(options.coordinators)}")
    run = await joining.unless_stopped(own.look(), own.stop)
    if run is None:
        return None
    require_fit(config, own.environment, run)
    artifacts = own.artifacts(run)
    with storage_errors(str(home)):
        (home / "logs").mkdir(exist_ok=True)
    num_processes = max(1, config.scoring.num_workers) if options.num_processes is None else options.num_processes
    graders = _Graders(config, home, own.stack.enter_context(scratch_folder()))
    pool = GraderPool(graders.start, grader_settings(config, own.environment.grader(), num_processes), own.counters)
    own.stack.push_async_callback(pool.close)
    await pool.open()
    client = await own.client()
    scores = PatientScores(client, own.patience())
    settings = WorkerSettings(
        worker_id=client.worker_id,
        alarm_failure_frac=config.scoring.alarm_failure_frac,
        poll_s=_POLL_S,
        drain_deadline_s=config.scoring.deadline_s + _DRAIN_GRACE_S if options.drain_s is None else options.drain_s,
    )
    own.say(f"joined: verifier {run.verifier_version}, {pool.capacity} gradings at a time in {num_processes} processes")
    return _Scorer(ScoringWorker(scores, artifacts, pool, settings, own.counters), scores)
