"""Calls to a trainer process. Imports no torch."""

from steelyard.processes.channel import Client
from steelyard.trainer.records import (
    CHECKPOINT,
    PUBLISH,
    STATE,
    TRAIN,
    CheckpointReport,
    CheckpointRequest,
    PublishRequest,
    StateRequest,
    TrainerState,
    TrainRequest,
)
from steelyard.types import Manifest, StepReport

_STATE_DEADLINE_S = 10.0


class TrainerClient:
    """The methods of :class:`steelyard.trainer.trainer.Trainer`, across a socket.

    Args:
        client: a connection to the trainer process.
        step_deadline_s: how long a step, a publication or a checkpoint may take, in seconds.
    """

    def __init__(self, client: Client, step_deadline_s: float) -> None:
        self._client = client
        self._step_deadline_s = step_deadline_s

    async def train_step(self, request: TrainRequest) -> StepReport:
        """See :meth:`steelyard.trainer.trainer.Trainer.train_step`; raises also DeadlineExceeded, RemoteFailed."""
        return await self._client.call(TRAIN, request, deadline_s=self._step_deadline_s)

    async def publish(self, request: PublishRequest) -> Manifest:
        """See :meth:`steelyard.trainer.trainer.Trainer.publish`; raises also DeadlineExceeded, RemoteFailed."""
        return await self._client.call(PUBLISH, request, deadline_s=self._step_deadline_s)

    async def checkpoint(self, request: CheckpointRequest) -> CheckpointReport:
        """See :meth:`steelyard.trainer.trainer.Trainer.checkpoint`; raises also DeadlineExceeded, RemoteFailed."""
        return await self._client.call(CHECKPOINT, request, deadline_s=self._step_deadline_s)

    async def state(self) -> TrainerState:
        """The trainer's state; answered also while a step is under way."""
        return await self._client.call(STATE, StateRequest(), deadline_s=_STATE_DEADLINE_S)
