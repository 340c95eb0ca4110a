"""The trainer's process: brought to where the journal stands, and brought back there when it dies.

While it is away nothing else stops: the last READY version serves, attempts go on and are scored, and the new process
takes the steps that no checkpoint covers again from their stored batches.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from steelyard.coordinator.service import Coordinator
from steelyard.errors import DeadlineExceeded, ProcessDied, RemoteFailed, RunError
from steelyard.processes.supervision import end_all
from steelyard.run.directory import RunDirectory
from steelyard.run.processes import TRAINER, Children
from steelyard.run.recovery import replay, starting_point, sweep_unknown
from steelyard.run.stores import Stores
from steelyard.run.versions import VersionKeeper
from steelyard.trainer.client import TrainerClient

logger = logging.getLogger(__name__)

_MAX_REPLAYS = 3
_DEATH_NOTICE_S = 2.0
"""The connection of a dying process ends so long before its death is known, which says more."""

TrainWith = Callable[[TrainerClient], Coroutine[Any, Any, None]]


class TrainerKeeper:
    """Starts trainers for one run.

    Args:
        model_dir: where the starting policy lies; asked anew for each process.
        max_restarts: processes in a row that may die without an optimizer step in between.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        directory: RunDirectory,
        stores: Stores,
        children: Children,
        model_dir: Callable[[], Path],
        max_restarts: int,
    ) -> None:
        self._coordinator = coordinator
        self._directory = directory
        self._stores = stores
        self._children = children
        self._model_dir = model_dir
        self._max_restarts = max_restarts

    async def start(self) -> TrainerClient:
        """A trainer at the newest checkpoint; takes the place of an earlier one.

        Raises:
            ProcessDied, DeadlineExceeded: it does not come up.
        """
        return await self._children.start_trainer(self._model_dir(), starting_point(self._coordinator, self._directory))

    async def catch_up(self, trainer: TrainerClient, versions: VersionKeeper) -> TrainerClient:
        """Replay what no checkpoint covers; where the weights come out otherwise, orphan them and replay again.

        Raises:
            RunError: the replays do not agree with each other.
        """
        for _ in range(_MAX_REPLAYS):
            versions.use_trainer(trainer)
            start = starting_point(self._coordinator, self._directory)
            diverged = await replay(self._coordinator, trainer, versions, self._stores, start.step)
            if diverged is None:
                return trainer
            reason = f"the replay of step {diverged.step} gave weights {diverged.digest}"
            await self._coordinator.orphan(diverged.version, reason)
            trainer = await self.start()
        raise RunError(f"{_MAX_REPLAYS} replays from the same checkpoint gave different weights each time")

    async def train(self, trainer: TrainerClient, versions: VersionKeeper, train_with: TrainWith) -> None:
        """Train to the end, with as many processes as it takes.

        Args:
            trainer: caught up.
            train_with: trains with one process, from wherever the journal stands.

        Raises:
            ProcessDied: more than ``max_restarts`` in a row died without a step.
        """
        num_deaths, is_back = 0, True
        while True:
            next_step = self._coordinator.state.next_step
            try:
                if not is_back:
                    trainer, is_back = await self._bring_back(versions), True
                await self._while_alive(train_with(trainer))
                return
            except ProcessDied as death:
                is_back = False
                num_deaths = 1 if self._coordinator.state.next_step > next_step else num_deaths + 1
                if num_deaths > self._max_restarts:
                    raise
                logger.warning("the trainer is started again: %s", death)

    async def _bring_back(self, versions: VersionKeeper) -> TrainerClient:
        await sweep_unknown(self._coordinator, self._directory, self._stores)
        trainer = await self.start()
        try:
            trainer = await self.catch_up(trainer, versions)
            state = await trainer.state()
        except RemoteFailed as error:
            raise await self._death(error) from None
        newest = self._coordinator.version_at_step(state.step)
        if newest is not None:
            versions.load_soon(newest.version)
        return trainer

    async def _while_alive(self, work: Coroutine[Any, Any, None]) -> None:
        """Work until it is done or the trainer dies.

        Raises:
            ProcessDied: the trainer died.
        """
        working = asyncio.create_task(work, name="training loop")
        dying = asyncio.create_task(self._children.death_of(TRAINER), name="death of the trainer")
        try:
            await asyncio.wait({working, dying}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise dying.result()
            try:
                working.result()
            except RemoteFailed as error:
                raise await self._death(error) from None
        finally:
            await end_all((working, dying))

    async def _death(self, error: RemoteFailed) -> RunError:
        """The trainer's death where that is what an error came of, else the error."""
        try:
            async with asyncio.timeout(_DEATH_NOTICE_S):
                return await self._children.death_of(TRAINER)
        except (TimeoutError, DeadlineExceeded):
            return error
