"""Calls to a trainer process. Imports no torch."""

from pathlib import Path

from steelyard.processes.channel import Client
from steelyard.trainer.records import (
    ATTACH,
    CHECKPOINT,
    DETACH,
    PUBLISH,
    STATE,
    TRAIN,
    AttachRequest,
    CheckpointReport,
    CheckpointRequest,
    DetachRequest,
    HelperStates,
    PublishRequest,
    StateRequest,
    TrainerState,
    TrainRequest,
)
from steelyard.types import Manifest, StepReport

_STATE_DEADLINE_S = 10.0
_ATTACH_DEADLINE_S = 30.0


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

    async def attach(self, name: str, socket_path: Path) -> HelperStates:
        """Let the worker that listens on ``socket_path`` help; returns at once, it loads and joins by itself.

        Raises:
            Refused: a helper of this name is here (``double``).
            DeadlineExceeded: nobody listens there.
        """
        request = AttachRequest(name=name, socket_path=str(socket_path))
        return await self._client.call(ATTACH, request, deadline_s=_ATTACH_DEADLINE_S)

    async def detach(self, name: str) -> HelperStates:
        """Let a helper go, at any moment.

        Raises:
            Refused: there is none of this name (``unknown``).
        """
        return await self._client.call(DETACH, DetachRequest(name=name), deadline_s=_ATTACH_DEADLINE_S)

    async def state(self) -> TrainerState:
        """The trainer's state; answered also while a step is under way."""
        return await self._client.call(STATE, StateRequest(), deadline_s=_STATE_DEADLINE_S)
