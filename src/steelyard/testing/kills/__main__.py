"""``python -m steelyard.testing.kills OPTIONS``: one process of a rehearsal of kills, with its options as JSON."""

import asyncio
import random
import sys
from pathlib import Path

import msgspec

from steelyard import config_file
from steelyard.coordinator.capability import Role
from steelyard.coordinator.client import CoordinatorClient
from steelyard.coordinator.trainer_link import TrainerLink
from steelyard.ids import RandomIds
from steelyard.log import log_to_stderr
from steelyard.metrics import Counters
from steelyard.run.directory import existing_directory
from steelyard.testing.kills.acknowledged import AcknowledgementFile
from steelyard.testing.kills.options import EXIT_DIVERGED, ProgramOptions
from steelyard.testing.kills.rollout_programs import ScorerProgram, WorkerProgram
from steelyard.testing.kills.trainer_program import DivergedError, TrainerProgram


async def run(options: ProgramOptions) -> int:
    """Play the part that the options name; returns the exit code."""
    directory, draw = existing_directory(options.run), random.Random(options.seed)
    notes = AcknowledgementFile(Path(options.notes))
    async with CoordinatorClient(options.urls, options.key, ids=RandomIds(), counters=Counters(), draw=draw) as client:
        match options.role:
            case Role.WORKER:
                heartbeat_s = config_file.load(directory.config).rollout.lease_s / 4
                await WorkerProgram(directory, client, notes, draw, heartbeat_s=heartbeat_s).run()
            case Role.SCORER:
                await ScorerProgram(directory, client, notes, draw).run()
            case Role.TRAINER:
                salt = f"of seed {options.seed}" if draw.random() < options.diverge_frac else ""
                try:
                    await TrainerProgram(directory, TrainerLink(client), notes, options.eval_task, salt).run()
                except DivergedError:
                    return EXIT_DIVERGED
            case Role.OPERATOR:
                raise ValueError("an operator is no program here")
    return 0


if __name__ == "__main__":
    log_to_stderr()
    sys.exit(asyncio.run(run(msgspec.json.decode(sys.argv[1], type=ProgramOptions))))
