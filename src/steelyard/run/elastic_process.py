"""A process that helps a trainer: ``python -m steelyard.run.elastic_process OPTIONS.json``."""

import asyncio
from pathlib import Path

from steelyard.processes.faults import fault_hook
from steelyard.run.children import run_child
from steelyard.run.elastic_options import ElasticOptions
from steelyard.trainer.elastic_worker import ElasticWorker, serve_elastic_worker


async def serve(options: ElasticOptions, stop: asyncio.Event) -> None:
    """Compute units for a trainer until ``stop`` is set."""
    fault = fault_hook(options.fault, options.name)
    worker = await ElasticWorker.open(Path(options.model_dir), options.num_threads, fault)
    server = await serve_elastic_worker(worker, Path(options.socket_path), fault)
    await stop.wait()
    await server.close()
    await worker.close()


if __name__ == "__main__":
    run_child(ElasticOptions, serve)
