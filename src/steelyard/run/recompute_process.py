"""The process of a deep audit that runs stored weights again, named with its options file on the command line.

It computes as the trainer does, on a module that the version loader has proven, and shares no code with the engine
that sampled.
"""

import asyncio
from pathlib import Path

from steelyard.processes.channel import Server
from steelyard.run.children import ChildOptions, run_child
from steelyard.run.recomputing import RECOMPUTE, Recomputed, RecomputeRequest
from steelyard.trainer.recompute import recorded_logprobs
from steelyard.weights.loader import VersionLoader


async def serve(options: ChildOptions, stop: asyncio.Event) -> None:
    """Answer until ``stop`` is set."""
    loader = VersionLoader()

    def recompute(request: RecomputeRequest) -> Recomputed:
        module = loader.load(request.version_dir).module
        return Recomputed(logprobs=recorded_logprobs(module, request.turns))

    async def answer(request: RecomputeRequest) -> Recomputed:
        return await asyncio.to_thread(recompute, request)

    server = Server()
    server.handle(RECOMPUTE, answer)
    await server.serve_until(Path(options.socket_path), stop)


if __name__ == "__main__":
    run_child(ChildOptions, serve)
