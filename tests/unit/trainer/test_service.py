"""The trainer across a socket."""

import asyncio
import tempfile
from pathlib import Path

import pytest

from steelyard.assembly.batch import encode_step_batch
from steelyard.errors import IntegrityError, Refused
from steelyard.processes.channel import Client
from steelyard.testing.tiny_model import write_tiny_model
from steelyard.testing.training_data import random_step_batch
from steelyard.trainer.client import TrainerClient
from steelyard.trainer.records import CheckpointRequest, PublishRequest, TrainerSettings, TrainRequest
from steelyard.trainer.service import serve_trainer
from steelyard.trainer.trainer import Trainer
from steelyard.weights.publisher import VersionPublisher


def test_a_step_a_publication_and_a_checkpoint_go_over_the_socket_and_errors_keep_their_type(tmp_path: Path) -> None:
    data, digest = encode_step_batch(random_step_batch(0))
    (tmp_path / "batch").write_bytes(data)
    request = TrainRequest(path=str(tmp_path / "batch"), digest=digest, step=0, version=1)

    async def work(socket_path: Path) -> None:
        model_dir = write_tiny_model(tmp_path / "model")
        (tmp_path / "weights").mkdir()
        publisher = VersionPublisher(tmp_path / "weights", model_dir, 1e-4)
        settings = TrainerSettings(checkpoints_dir=str(tmp_path / "checkpoints"))
        trainer = await Trainer.open(settings, publisher, model_dir=model_dir)
        server = await serve_trainer(trainer, socket_path)
        connection = await Client.connect(socket_path, name="trainer", deadline_s=5)
        client = TrainerClient(connection, step_deadline_s=60)
        report = await client.train_step(request)
        state = await client.state()
        manifest = await client.publish(PublishRequest(version=1, parent_version=None))
        saved = await client.checkpoint(CheckpointRequest(step=1))
        assert (report.version, state.version, manifest.version, saved.version) == (1, 1, 1, 1)
        assert state.weights_digest == manifest.weights_digest == saved.weights_digest
        with pytest.raises(Refused, match="double"):
            await client.train_step(request)
        with pytest.raises(IntegrityError, match="must be readable"):
            await client.train_step(TrainRequest(path="nowhere", digest=digest, step=1, version=2))
        await connection.close()
        await server.close()
        await trainer.close()

    async def main(socket_path: Path) -> None:
        await asyncio.wait_for(work(socket_path), 60)

    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        asyncio.run(main(Path(short) / "trainer.sock"))
