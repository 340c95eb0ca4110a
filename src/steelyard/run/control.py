"""The control process of one run: puts the stages together, runs their loops, and ends them together.

::

    open stores and journal -> start children -> bring the weights up (or back) -> loops until the work is done

    loops     harness, scoring, versions and replicas, router probes, news for people
    work      train, evaluate, finish

    a replica or the trainer that dies is started again, a bounded number of times; see fleet and trainer_keeping

The end or failure of any loop ends all; what the journal holds is then what counts.
"""

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from steelyard.clock import Clock, SystemClock
from steelyard.config import Config
from steelyard.coordinator.admission import evaluating
from steelyard.coordinator.capability import CapabilityRing
from steelyard.coordinator.service import Coordinator
from steelyard.environments.base import Environment
from steelyard.environments.base import Services as EnvironmentServices
from steelyard.environments.registry import make_environment
from steelyard.errors import RemoteFailed, RunError
from steelyard.gateway.recorder import Recorder
from steelyard.ids import IdSource, RandomIds
from steelyard.inference.client import EngineClient
from steelyard.inference.engine import KvRule
from steelyard.inference.router import Router
from steelyard.observe.rows import EvaluationLabel, StageName
from steelyard.processes.faults import FaultPlan, fault_hook
from steelyard.processes.supervision import supervise, task_group
from steelyard.run.blob_place import keep_logs
from steelyard.run.coordinators import open_coordinator, serving_others
from steelyard.run.describing import describe_run
from steelyard.run.directory import RunDirectory
from steelyard.run.engines import router_settings
from steelyard.run.evaluation import Evaluator
from steelyard.run.fleet import Fleet, FleetRules
from steelyard.run.journals import open_journal, open_journal_reader
from steelyard.run.news import News
from steelyard.run.processes import Children, stopping
from steelyard.run.recovery import sweep
from steelyard.run.rollouts import RolloutSide, worker_settings
from steelyard.run.scratch import scratch_folder
from steelyard.run.secret import run_secret
from steelyard.run.stores import Stores
from steelyard.run.sweeping import held_attempts, sweep_blobs
from steelyard.run.trainer_keeping import TrainerKeeper
from steelyard.run.training import TrainingLoop
from steelyard.run.versions import VersionKeeper
from steelyard.sandbox.function_calls import run_function_calls
from steelyard.sandbox.registry import end_abandoned_sandboxes
from steelyard.trainer.client import TrainerClient

_DEATH_NOTICE_S = 2.0


@dataclass(frozen=True)
class RunContext:
    """What one run is made of. ``policy_dir`` holds the starting policy; ``fault`` is for rehearsals."""

    config: Config
    directory: RunDirectory
    policy_dir: Path
    news: News
    fault: FaultPlan | None = None


@dataclass(frozen=True)
class Foundation:
    """The parts that stand before any child runs."""

    clock: Clock
    ids: IdSource
    stores: Stores
    environment: Environment
    coordinator: Coordinator
    recorder: Recorder
    children: Children


async def run_control(context: RunContext) -> None:
    """Carry the run through, from wherever its journal stands.

    Raises:
        RunError: a part failed; the run can be resumed.
        InputError: a port is in use, or this machine does not allow the sandbox.
    """
    async with AsyncExitStack() as stack:
        foundation = await _lay_foundation(context, stack)
        await foundation.coordinator.abandon("the control process was started again")
        await sweep(foundation.coordinator, context.directory, foundation.stores)
        if context.config.journal.kind != "memory":
            journal = open_journal_reader(context.config, context.directory)
            live = held_attempts(foundation.coordinator.state)
            now_s, min_age_s = foundation.clock.now_s(), context.config.blobs.max_upload_s
            await sweep_blobs(journal, live, foundation.stores, now_s=now_s, min_age_s=min_age_s)
        await Control(context, foundation).run()


async def _lay_foundation(context: RunContext, stack: AsyncExitStack) -> Foundation:
    """Open stores and journal; whatever is opened is closed by ``stack``."""
    config, directory = context.config, context.directory
    clock, ids, fault = SystemClock(), RandomIds(), fault_hook(context.fault, "control")
    directory.make_folders()
    stores = Stores.open(directory, fault, config.blobs)
    stack.push_async_callback(stores.close)
    if stores.objects is not None:
        stack.push_async_callback(keep_logs, stores.objects, directory, config.blobs.max_upload_s)
    stores.versions.sweep()
    services = EnvironmentServices(run_function=run_function_calls, call_deadline_s=config.sandbox.call_deadline_s)
    environment = make_environment(config.environment.kind, config.environment.options, services)
    recorder = Recorder(stores.traces, stores.ledger, context.news.counters, clock)
    journal = open_journal(config, directory, fault)
    stack.push_async_callback(journal.close)  # also where the coordinator does not come to own it
    coordinator = await open_coordinator(
        config, environment, journal, recorder, clock=clock, ids=ids, counters=context.news.counters
    )
    stack.push_async_callback(coordinator.close)
    sockets = stack.enter_context(scratch_folder())
    await asyncio.to_thread(end_abandoned_sandboxes, directory.sandboxes)
    # At the end too: graders are killed, for a stuck one would not listen, and cannot tidy up themselves.
    stack.push_async_callback(asyncio.to_thread, end_abandoned_sandboxes, directory.sandboxes)
    children = await stack.enter_async_context(stopping(Children(config, directory, sockets, clock, context.fault)))
    return Foundation(clock, ids, stores, environment, coordinator, recorder, children)


class Control:
    """A run on its foundation."""

    def __init__(self, context: RunContext, foundation: Foundation) -> None:
        self._context = context
        self._config = context.config
        self._base = foundation
        self._coordinator = foundation.coordinator
        self._evaluator = Evaluator(
            context.config,
            foundation.coordinator,
            foundation.environment,
            foundation.stores,
            foundation.clock,
            context.news.row,
        )
        self._trainers = TrainerKeeper(
            foundation.coordinator,
            context.directory,
            foundation.stores,
            foundation.children,
            self._model_dir,
            context.config.runtime.max_restarts,
        )

    async def run(self) -> None:
        """Start the children, work until training and evaluation are done.

        Raises:
            ProcessDied: a child ended; carries the end of its log.
        """
        try:
            await self._run()
        except RemoteFailed:
            # The connection of a dying process ends just before its death is known, which says more.
            death = await self._base.children.find_death(_DEATH_NOTICE_S)
            if death is None:
                raise
            raise death from None

    async def _run(self) -> None:
        context, base = self._context, self._base
        context.news.stage(StageName.START)
        if context.config.inference.engine == "emulated":
            context.news.note(
                "inference.engine emulated: tokens and log-probabilities come from no weights; time, queues, versions "
                "and books are real, what is learnt means nothing"
            )
        config, directory, counters = context.config, context.directory, context.news.counters
        # Keys of workers elsewhere are the coordinator's, at the gateway too.
        keys = None if config.coordinator.port is None else CapabilityRing(run_secret(directory))
        description = describe_run(config, base.environment, directory)
        async with RolloutSide(config, base.environment, base.children, context.news, keys) as rollouts:
            trainer, engines = await self._start_children()
            router = Router(engines, base.clock, router_settings(config), counters)
            fleet = self._fleet(router)
            await fleet.begin()
            versions = self._keeper(trainer, fleet)
            trainer = await self._trainers.catch_up(trainer, versions)
            await self._bring_weights_up(trainer, versions)
            async with (
                rollouts.serving(base, router, self._model_dir()) as serving,
                serving_others(config, directory, base.coordinator, base.clock, counters, description) as url,
            ):
                if url is not None:
                    context.news.note(f"workers and scorers elsewhere join at {url}, gateway {serving.gateway_url}")
                await supervise(
                    *serving.loops(),
                    versions.run(),
                    router.run(asyncio.sleep),
                    context.news.watch(self._coordinator, router, base.stores.ledger),
                    self._work(trainer, versions),
                )

    async def _start_children(self) -> tuple[TrainerClient, dict[str, EngineClient]]:
        children, config = self._base.children, self._config
        names = [f"replica-{index}" for index in range(config.resources.rollout_gpus)]
        async with task_group() as group:
            trainer = group.create_task(self._trainers.start())
            replicas = [
                group.create_task(children.start_replica(index, self._model_dir())) for index in range(len(names))
            ]
        return trainer.result(), dict(zip(names, (task.result() for task in replicas), strict=True))

    def _model_dir(self) -> Path:
        """A version of the run once there is one: the cache may have moved on."""
        return self._context.directory.first_version() or self._context.policy_dir

    def _keeper(self, trainer: TrainerClient, fleet: Fleet) -> VersionKeeper:
        deadline_s = self._config.weights.load_deadline_s
        return VersionKeeper(self._coordinator, trainer, fleet, self._base.stores.versions, deadline_s)

    def _fleet(self, router: Router) -> Fleet:
        store = self._base.stores.versions
        return Fleet(
            self._coordinator,
            router,
            self._base.children,
            lambda version: str(store.path(version)),
            fleet_rules(self._config),
        )

    async def _bring_weights_up(self, trainer: TrainerClient, versions: VersionKeeper) -> None:
        """Publish version 0 if nothing is published yet; load the newest version, and what is being evaluated."""
        state = await trainer.state()
        if self._coordinator.version_at_step(0) is None:
            await versions.publish(0, None)
        if self._evaluator.is_missing(EvaluationLabel.BEFORE):
            # Not only after the publication: a crash may come between the two.
            await self._coordinator.pin(0, EvaluationLabel.BEFORE)
        newest = self._coordinator.version_at_step(state.step)
        if newest is None:
            raise RunError(f"the journal must know the version after {state.step} steps, it does not")
        await versions.load(newest.version)
        # READY says what replicas held before a crash; attempts of an evaluation would find theirs missing.
        for version in sorted(evaluating(self._coordinator.state) - {newest.version}):
            await versions.load(version)

    async def _work(self, trainer: TrainerClient, versions: VersionKeeper) -> None:
        """Train, evaluate, finish."""
        context, base = self._context, self._base
        if context.config.train.max_steps:
            context.news.stage(StageName.TRAIN)

            async def train_with(trainer: TrainerClient) -> None:
                loop = TrainingLoop(
                    context.config, self._coordinator, trainer, versions, base.stores, base.clock, context.news.row
                )
                await loop.run()

            await self._trainers.train(trainer, versions, train_with)
        await self._evaluate(versions)
        # What a run ends with is proven too, though nobody samples from it any more.
        await versions.load(self._last_version())
        await self._coordinator.finish("done")
        await context.news.books(self._coordinator, base.stores.ledger)

    def _last_version(self) -> int:
        num_steps = self._config.train.max_steps
        last = self._coordinator.version_at_step(num_steps)
        if last is None:
            raise RunError(f"the journal must know the version after {num_steps} steps, it does not")
        return last.version

    async def _evaluate(self, versions: VersionKeeper) -> None:
        """Version 0, then the last one. The training data are all in: the devices are free for it."""
        for label, version in ((EvaluationLabel.BEFORE, 0), (EvaluationLabel.AFTER, self._last_version())):
            if not self._evaluator.is_planned(label):
                continue
            self._context.news.stage(StageName.EVALUATE, f"version {version}")
            if not self._evaluator.is_missing(label):
                # Sampled before a crash; the version may be deleted by now.
                await self._evaluator.report(label)
                continue
            with self._coordinator.reading(version):
                await versions.load(version)
                await self._evaluator.evaluate(label, version)
        await self._coordinator.unpin(0, EvaluationLabel.BEFORE)


def fleet_rules(config: Config) -> FleetRules:
    """How the replicas of a run go over to a version."""
    weights = config.weights
    return FleetRules(
        publication=weights.publication,
        in_place=weights.mode == "segmented",
        kv=KvRule(weights.kv),
        load_deadline_s=weights.load_deadline_s,
        drain_deadline_s=worker_settings(config).attempt_deadline_s,
        max_restarts=config.runtime.max_restarts,
    )
