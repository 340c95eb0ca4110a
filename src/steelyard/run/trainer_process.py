"""The trainer process: ``python -m steelyard.run.trainer_process OPTIONS.json``."""

import asyncio
from pathlib import Path

from steelyard.processes.faults import fault_hook
from steelyard.run.children import run_child
from steelyard.run.trainer_options import TrainerOptions
from steelyard.trainer.service import serve_trainer
from steelyard.trainer.trainer import Trainer
from steelyard.weights.publisher import VersionPublisher


async def serve(options: TrainerOptions, stop: asyncio.Event) -> None:
    """Serve a trainer until ``stop`` is set."""
    fault = fault_hook(options.fault, options.name)
    checkpoint = Path(options.checkpoint) if options.checkpoint is not None else None
    model_dir = Path(options.model_dir)
    publisher = VersionPublisher(
        Path(options.weights_dir),
        checkpoint or model_dir,
        options.probe_tolerance,
        dtype=options.weights_dtype,
        max_shard_bytes=options.max_shard_bytes,
        fault=lambda point: fault(f"publish:{point}"),
    )
    trainer = await Trainer.open(
        options.settings,
        publisher,
        model_dir=model_dir,
        checkpoint=checkpoint,
        checkpoint_digest=options.checkpoint_digest,
        fault=fault,
    )
    server = await serve_trainer(trainer, Path(options.socket_path), fault)
    await stop.wait()
    await server.close()
    await trainer.close()


if __name__ == "__main__":
    run_child(TrainerOptions, serve)
