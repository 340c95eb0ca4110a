"""Serves a trainer on a Unix socket. The composition root makes the trainer and calls :func:`serve_trainer`."""

from pathlib import Path

from steelyard.processes.channel import FaultHook, Server, no_fault
from steelyard.trainer.records import CHECKPOINT, PUBLISH, STATE, TRAIN, StateRequest, TrainerState
from steelyard.trainer.trainer import Trainer


async def serve_trainer(trainer: Trainer, socket_path: Path, fault: FaultHook = no_fault) -> Server:
    """Start answering calls of ``trainer``; returns the running server, which the caller closes.

    ``fault`` is for rehearsals.

    Raises:
        OSError: the socket path is taken or cannot be made.
    """

    async def state(_request: StateRequest) -> TrainerState:
        return await trainer.state()

    server = Server(fault)
    server.handle(TRAIN, trainer.train_step)
    server.handle(PUBLISH, trainer.publish)
    server.handle(CHECKPOINT, trainer.checkpoint)
    server.handle(STATE, state)
    await server.serve(socket_path)
    return server
