"""A harness worker as a process of its own, on any machine: coordinator and gateway over HTTP, sandboxes here.

::

    key, configuration -> own folder, swept -> does it fit the run? -> sandboxes -> work until told to stop

What is handed in is durable before the coordinator hears of it: the trace at the gateway, the artifact in the store.
"""

import asyncio
import logging
import random
from contextlib import AsyncExitStack
from pathlib import Path

from steelyard.clock import SystemClock
from steelyard.config import Config
from steelyard.coordinator.capability import Role, worker_of
from steelyard.coordinator.client import ClientSettings, CoordinatorClient
from steelyard.coordinator.description import RunDescription, read_description
from steelyard.environments.base import Environment
from steelyard.gateway.client import GatewayClient
from steelyard.harness.base import Services, WorkerSettings
from steelyard.harness.worker import HarnessWorker
from steelyard.ids import RandomIds
from steelyard.metrics import Counters
from steelyard.processes.http_requests import RetrySettings
from steelyard.run import joining
from steelyard.run.describing import require_fit
from steelyard.run.patience import Patience, PatientLeases
from steelyard.run.rollouts import worker_settings
from steelyard.sandbox.opening import open_pool

_LOG = logging.getLogger(__name__)
_DRAIN_S = 30.0


class WorkerOptions(joining.JoinOptions, frozen=True, kw_only=True):
    """``gateway``: base URL, with or without ``/v1``."""

    gateway: str


async def run_worker(config: Config, options: WorkerOptions) -> None:
    """Work until SIGTERM or Ctrl-C.

    Raises:
        InputError: the key, the configuration or this machine does not fit; nothing was leased.
        RunError: the coordinator was lost for too long, or the run has failed.
    """
    stop = joining.watch_for_stop()
    key = joining.read_key(options.key_file, Role.WORKER)
    environment = joining.make_own_environment(config)
    say = joining.Lines(f"worker {worker_of(key)}")
    with joining.own_home(options, key) as home, joining.own_log(home) as log:
        say(f"logs to {log}")
        async with AsyncExitStack() as stack:
            worker = await _join(config, options, key, environment, home, say, stack, stop)
            if worker is not None:
                await worker.run(stop)
    say("stopped")


class _Worker:
    """A harness worker with the lines that it says."""

    def __init__(self, harness: HarnessWorker, leases: PatientLeases, say: joining.Lines) -> None:
        self._harness = harness
        self._leases = leases
        self._say = say

    async def run(self, stop: asyncio.Event) -> None:
        await joining.work_with_news(self._harness.run(stop), stop, self._say, self._news)

    def _news(self) -> str:
        leases = self._leases
        return (
            f"{leases.num_handed_in} attempts handed in, {leases.num_failed} failed, {self._harness.num_live} running"
        )


async def _join(
    config: Config,
    options: WorkerOptions,
    key: str,
    environment: Environment,
    home: Path,
    say: joining.Lines,
    stack: AsyncExitStack,
    stop: asyncio.Event,
) -> _Worker | None:
    """Look at the run, then open everything; None where the stop came first."""
    clock, counters, draw = SystemClock(), Counters(), random.Random()
    retry = RetrySettings(deadline_s=options.call_deadline_s)
    gateway = GatewayClient(options.gateway, key, clock=clock, counters=counters, draw=draw, settings=retry)
    await stack.enter_async_context(gateway)
    say(f"asking {' or '.join(options.coordinators)}")
    run = await joining.unless_stopped(_look(options, key, gateway, counters, draw), stop)
    if run is None:
        return None
    require_fit(config, environment, run)
    artifacts = joining.open_artifacts(options.artifacts or run.artifacts_url, config.blobs)
    stack.push_async_callback(artifacts.close)
    sandboxes = await open_pool(config.sandbox, home / "sandboxes" / "rollout")
    stack.push_async_callback(sandboxes.close)
    client = CoordinatorClient(
        options.coordinators,
        key,
        ids=RandomIds(),
        counters=counters,
        draw=draw,
        settings=ClientSettings(call_deadline_s=options.call_deadline_s),
    )
    await stack.enter_async_context(client)
    leases = PatientLeases(client, Patience(options.lost_after_s, clock, say))
    services = Services(
        leases=leases, chat=gateway, sandboxes=sandboxes, traces=gateway, artifacts=artifacts, tasks=environment
    )
    settings = _settings(config, run, options)
    harness = HarnessWorker(client.worker_id, settings, services, clock, counters)
    say(
        f"joined: environment {run.environment} {run.environment_version}, {settings.max_concurrent} attempts at a time"
    )
    return _Worker(harness, leases, say)


async def _look(
    options: WorkerOptions, key: str, gateway: GatewayClient, counters: Counters, draw: random.Random
) -> RunDescription:
    """What the run says of itself; coordinator and gateway are there and take the key."""
    patient = RetrySettings(deadline_s=options.lost_after_s)
    run = await joining.accepted(
        read_description(options.coordinators, key, counters=counters, draw=draw, settings=patient)
    )
    await joining.accepted(gateway.check())
    return run


def _settings(config: Config, run: RunDescription, options: WorkerOptions) -> WorkerSettings:
    """Those of a worker inside a run, with deadlines that leave the clients of the network room to try again."""
    own = worker_settings(config)
    if run.lease_s <= 2 * options.call_deadline_s:
        _LOG.warning("leases of %.0f s leave a heartbeat little time to be tried again", run.lease_s)
    return WorkerSettings(
        max_concurrent=own.max_concurrent,
        heartbeat_every_s=run.lease_s / 4,
        turn_deadline_s=own.turn_deadline_s,
        attempt_deadline_s=own.attempt_deadline_s,
        call_deadline_s=2 * options.call_deadline_s,
        drain_deadline_s=_DRAIN_S if options.drain_s is None else options.drain_s,
    )
