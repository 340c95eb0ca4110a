"""A harness worker as a process of its own, on any machine: coordinator and gateway over HTTP, sandboxes here.

::

    key, configuration -> own folder, swept -> does it fit the run? -> sandboxes -> work until told to stop

What is handed in is durable before the coordinator hears of it: the trace at the gateway, the artifact in the store.
"""

import asyncio
import logging

from steelyard.config import Config
from steelyard.coordinator.capability import Role
from steelyard.coordinator.description import RunDescription
from steelyard.gateway.client import GatewayClient
from steelyard.harness.base import Services, WorkerSettings
from steelyard.harness.worker import HarnessWorker
from steelyard.processes.http_requests import RetrySettings
from steelyard.run import joining
from steelyard.run.adapters import RemoteAccess
from steelyard.run.describing import require_fit
from steelyard.run.harnesses import make_agent, open_places
from steelyard.run.patience import PatientLeases
from steelyard.run.rollouts import worker_settings

_LOG = logging.getLogger(__name__)
_DRAIN_S = 30.0


class WorkerOptions(joining.JoinOptions, frozen=True, kw_only=True):
    """``gateway``: base URL, with or without ``/v1``."""

    gateway: str


async def run_worker(config: Config, options: WorkerOptions) -> None:
    """Work until SIGTERM or Ctrl-C. Raises as of :func:`joining.join_and_work`."""
    await joining.join_and_work(Role.WORKER, config, options, _join)


class _Worker:
    """A harness worker with the lines that it says."""

    def __init__(self, harness: HarnessWorker, leases: PatientLeases) -> None:
        self._harness = harness
        self._leases = leases

    async def run(self, stop: asyncio.Event) -> None:
        await self._harness.run(stop)

    def news(self) -> str:
        leases = self._leases
        return (
            f"{leases.num_handed_in} attempts handed in, {leases.num_failed} failed, {self._harness.num_live} running"
        )


async def _join(own: joining.Joining[WorkerOptions]) -> _Worker | None:
    """Look at the run, then open everything; None where the stop came first."""
    config, options = own.config, own.options
    retry = RetrySettings(deadline_s=options.call_deadline_s)
    gateway = GatewayClient(
        options.gateway, own.key, clock=own.clock, counters=own.counters, draw=own.draw, settings=retry
    )
    await own.stack.enter_async_context(gateway)
    own.say(f"asking {' or '.join(options.coordinators)}")
    run = await joining.unless_stopped(_look(own, gateway), own.stop)
    if run is None:
        return None
    require_fit(config, own.environment, run)
    artifacts = own.artifacts(run)
    sandboxes = await open_places(config, own.home / "sandboxes" / "rollout")
    own.stack.push_async_callback(sandboxes.close)
    client = await own.client()
    leases = PatientLeases(client, own.patience())
    services = Services(
        leases=leases,
        chat=gateway,
        sandboxes=sandboxes,
        traces=gateway,
        artifacts=artifacts,
        tasks=own.environment,
        agent=make_agent(config, RemoteAccess(gateway)),
    )
    settings = _settings(config, run, options)
    own.say(
        f"joined: environment {run.environment} {run.environment_version}, {settings.max_concurrent} attempts at a time"
    )
    return _Worker(HarnessWorker(client.worker_id, settings, services, own.clock, own.counters), leases)


async def _look(own: joining.Joining[WorkerOptions], gateway: GatewayClient) -> RunDescription:
    """What the run says of itself; coordinator and gateway are there and take the key."""
    run = await own.look()
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
