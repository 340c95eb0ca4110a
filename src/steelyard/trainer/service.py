"""Serves a trainer on a Unix socket. The composition root makes the trainer and calls :func:`serve_trainer`."""

from pathlib import Path

from steelyard.errors import Refused
from steelyard.processes.channel import FaultHook, Server, no_fault
from steelyard.trainer.elastic_socket import SocketHelper
from steelyard.trainer.records import (
    ATTACH,
    CHECKPOINT,
    DETACH,
    PUBLISH,
    STATE,
    TRAIN,
    AttachRequest,
    DetachRequest,
    HelperStates,
    StateRequest,
    TrainerState,
)
from steelyard.trainer.trainer import Trainer

_CONNECT_DEADLINE_S = 10.0


async def serve_trainer(trainer: Trainer, socket_path: Path, fault: FaultHook = no_fault) -> Server:
    """Start answering calls of ``trainer``; returns the running server, which the caller closes.

    ``fault`` is for rehearsals.

    Raises:
        OSError: the socket path is taken or cannot be made.
    """

    async def state(_request: StateRequest) -> TrainerState:
        return await trainer.state()

    async def attach(request: AttachRequest) -> HelperStates:
        helper = await SocketHelper.connect(request.name, Path(request.socket_path), _CONNECT_DEADLINE_S)
        try:
            await trainer.attach(helper)
        except Refused:
            await helper.close()
            raise
        return HelperStates(helpers=(await trainer.state()).helpers)

    async def detach(request: DetachRequest) -> HelperStates:
        await trainer.detach(request.name)
        return HelperStates(helpers=(await trainer.state()).helpers)

    server = Server(fault)
    server.handle(TRAIN, trainer.train_step)
    server.handle(PUBLISH, trainer.publish)
    server.handle(CHECKPOINT, trainer.checkpoint)
    server.handle(ATTACH, attach)
    server.handle(DETACH, detach)
    server.handle(STATE, state)
    await server.serve(socket_path)
    return server
