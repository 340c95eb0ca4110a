"""A4: an elastic worker died and the training job died with it.

Its lease ends with it, the unit is computed again, the step completes, and the update is what it would have been.
Through the trainer's own endpoints, as control calls them, with real processes.
"""

import asyncio
import tempfile
from pathlib import Path

import pytest

from steelyard.assembly.batch import encode_step_batch
from steelyard.errors import ProcessDied
from steelyard.processes.channel import Client
from steelyard.processes.faults import FaultPlan
from steelyard.testing.elastic_rig import PATIENT, ElasticRig, elastic_rig
from steelyard.testing.tiny_model import write_tiny_model
from steelyard.testing.training_data import random_step_batch
from steelyard.trainer.client import TrainerClient
from steelyard.trainer.records import TrainRequest
from steelyard.trainer.service import serve_trainer


async def one_step(rig: ElasticRig, doomed: bool) -> tuple[str, int]:
    """Digest of the weights after a step, and how often a unit was leased again."""
    server = await serve_trainer(rig.trainer, rig.root / "trainer.sock")
    connection = await Client.connect(rig.root / "trainer.sock", name="trainer", deadline_s=5)
    client = TrainerClient(connection, step_deadline_s=60)
    if doomed:
        fault = FaultPlan(process="doomed", point="micro_batch", occurrence=2)
        await client.attach("doomed", await rig.start_helper("doomed", fault))
        await rig.ready("doomed")
    data, digest = encode_step_batch(random_step_batch(0, num_samples=48, micro_batch_tokens=64))
    (rig.root / "batch").write_bytes(data)
    request = TrainRequest(path=str(rig.root / "batch"), digest=digest, step=0, version=1)
    report = await client.train_step(request)
    state = await client.state()
    await connection.close()
    await server.close()
    if doomed:
        assert not state.helpers
        with pytest.raises(ProcessDied, match="signal 9"):
            await rig.helpers["doomed"].watch()
    return state.weights_digest, report.num_units_leased_again


def test_a_worker_killed_in_mid_gradient_costs_one_lease_and_not_the_step(tmp_path: Path) -> None:
    model_dir = write_tiny_model(tmp_path / "model")

    async def main(root: Path, doomed: bool) -> tuple[str, int]:
        async with asyncio.timeout(100), elastic_rig(root, model_dir, PATIENT) as rig:
            return await one_step(rig, doomed)

    with tempfile.TemporaryDirectory(dir="/tmp", prefix="sy-") as short:
        without, _ = asyncio.run(main(Path(short) / "a", doomed=False))
        with_death, num_again = asyncio.run(main(Path(short) / "b", doomed=True))
    assert with_death == without
    assert num_again >= 1
