"""Asks a process of its own for the log-probabilities of recorded turns. Imports no torch."""

import asyncio
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from steelyard.config import Config
from steelyard.processes.channel import Client, Endpoint
from steelyard.run.children import ChildOptions, start_child
from steelyard.run.directory import RunDirectory
from steelyard.run.scratch import scratch_folder
from steelyard.types import Record, Turn

_ANSWER_DEADLINE_S = 600.0


class RecomputeRequest(Record, frozen=True, kw_only=True):
    """Load the version in ``version_dir`` with its proof and run it over ``turns``."""

    version_dir: str
    turns: tuple[Turn, ...]


class Recomputed(Record, frozen=True, kw_only=True):
    """For each turn the log-probability of each sampled token."""

    logprobs: tuple[tuple[float, ...], ...]


RECOMPUTE = Endpoint("audit.recompute", RecomputeRequest, Recomputed)


@contextmanager
def recomputing(
    config: Config, directory: RunDirectory
) -> Iterator[Callable[[int, Sequence[Turn]], Sequence[Sequence[float]]]]:
    """A recompute function for the deep audit, backed by a child process that ends with the block.

    Raises:
        ProcessDied, DeadlineExceeded: the child does not come up, or ends.
    """
    with (
        scratch_folder() as folder,
        asyncio.Runner() as runner,
    ):
        options = ChildOptions(name="recompute", socket_path=str(folder / "recompute.sock"), parent_pid=os.getpid())
        child = runner.run(start_child("steelyard.run.recompute_process", options, log_folder=folder))
        try:
            client: Client = runner.run(child.connect(Path(options.socket_path), config.runtime.start_deadline_s))

            def recompute(version: int, turns: Sequence[Turn]) -> Sequence[Sequence[float]]:
                request = RecomputeRequest(version_dir=str(directory.version(version)), turns=tuple(turns))
                return runner.run(client.call(RECOMPUTE, request, deadline_s=_ANSWER_DEADLINE_S)).logprobs

            yield recompute
            runner.run(client.close())
        finally:
            runner.run(child.stop(config.runtime.stop_deadline_s))
