"""A scorer as a process of its own, on any machine: jobs over HTTP, artifacts from the store, graders as children here.

::

    key, configuration -> own folder, swept -> does it fit the run? -> grader processes -> grade until told to stop
"""

import asyncio
import os
import random
from contextlib import AsyncExitStack
from pathlib import Path

from steelyard.clock import SystemClock
from steelyard.config import Config
from steelyard.coordinator.capability import Role, worker_of
from steelyard.coordinator.client import ClientSettings, CoordinatorClient
from steelyard.coordinator.description import read_description
from steelyard.durable import storage_errors
from steelyard.environments.base import Environment
from steelyard.ids import RandomIds
from steelyard.metrics import Counters
from steelyard.processes.http_requests import RetrySettings
from steelyard.run import joining
from steelyard.run.children import start_child
from steelyard.run.describing import require_fit
from steelyard.run.patience import Patience, PatientScores
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
    """Grade until SIGTERM or Ctrl-C.

    Raises:
        InputError: the key, the configuration or this machine does not fit; nothing was leased.
        RunError: the coordinator was lost for too long, or the run has failed.
    """
    stop = joining.watch_for_stop()
    key = joining.read_key(options.key_file, Role.SCORER)
    environment = joining.make_own_environment(config)
    say = joining.Lines(f"scorer {worker_of(key)}")
    with joining.own_home(options, key) as home, joining.own_log(home) as log:
        say(f"logs to {log}")
        async with AsyncExitStack() as stack:
            scorer = await _join(config, options, key, environment, home, say, stack, stop)
            if scorer is not None:
                await scorer.run(stop)
    say("stopped")


class _Scorer:
    """A scoring worker with the lines that it says."""

    def __init__(self, worker: ScoringWorker, scores: PatientScores, say: joining.Lines) -> None:
        self._worker = worker
        self._scores = scores
        self._say = say

    async def run(self, stop: asyncio.Event) -> None:
        await joining.work_with_news(self._worker.run(stop), stop, self._say, self._news)

    def _news(self) -> str:
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


async def _join(
    config: Config,
    options: ScorerOptions,
    key: str,
    environment: Environment,
    home: Path,
    say: joining.Lines,
    stack: AsyncExitStack,
    stop: asyncio.Event,
) -> _Scorer | None:
    """Look at the run, then open everything; None where the stop came first."""
    clock, counters, draw = SystemClock(), Counters(), random.Random()
    say(f"asking {' or '.join(options.coordinators)}")
    patient = RetrySettings(deadline_s=options.lost_after_s)
    looking = read_description(options.coordinators, key, counters=counters, draw=draw, settings=patient)
    run = await joining.unless_stopped(joining.accepted(looking), stop)
    if run is None:
        return None
    require_fit(config, environment, run)
    artifacts = joining.open_artifacts(options.artifacts or run.artifacts_url, config.blobs)
    stack.push_async_callback(artifacts.close)
    with storage_errors(str(home)):
        (home / "logs").mkdir(exist_ok=True)
    num_processes = max(1, config.scoring.num_workers) if options.num_processes is None else options.num_processes
    graders = _Graders(config, home, stack.enter_context(scratch_folder()))
    pool = GraderPool(graders.start, grader_settings(config, environment.grader(), num_processes), counters)
    stack.push_async_callback(pool.close)
    await pool.open()
    client = CoordinatorClient(
        options.coordinators,
        key,
        ids=RandomIds(),
        counters=counters,
        draw=draw,
        settings=ClientSettings(call_deadline_s=options.call_deadline_s),
    )
    await stack.enter_async_context(client)
    scores = PatientScores(client, Patience(options.lost_after_s, clock, say))
    settings = WorkerSettings(
        worker_id=client.worker_id,
        alarm_failure_frac=config.scoring.alarm_failure_frac,
        poll_s=_POLL_S,
        drain_deadline_s=config.scoring.deadline_s + _DRAIN_GRACE_S if options.drain_s is None else options.drain_s,
    )
    worker = ScoringWorker(scores, artifacts, pool, settings, counters)
    say(f"joined: verifier {run.verifier_version}, {pool.capacity} gradings at a time in {num_processes} processes")
    return _Scorer(worker, scores, say)
