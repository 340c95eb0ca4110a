"""V7: after a resume a version's name was used again, and the server kept serving the old weights under the new label.

A version number is used once. A replica proves what stands in its memory; a proof of other weights is refused.
"""

import asyncio
from pathlib import Path

import msgspec
import pytest

from steelyard.coordinator import events as e
from steelyard.errors import IllegalTransition, IntegrityError
from steelyard.testing.run_rig import RunRig, make_manifest, make_proof, make_settings
from steelyard.testing.small_runs import CrashedRun, journal_events
from steelyard.testing.tiny_model import tiny_module, write_tiny_model
from steelyard.weights.loader import VersionLoader
from steelyard.weights.publisher import VersionPublisher
from steelyard.weights.shards import WEIGHTS_NAME


async def three_published_then_a_crash() -> RunRig:
    rig = await RunRig(make_settings(lag=1)).start()
    for step in range(3):
        await rig.train(step)
    await rig.coordinator.crash()
    await rig.open()
    return rig


def test_v7_a_number_that_was_published_is_refused_for_other_weights_after_a_resume() -> None:
    async def scenario() -> None:
        rig = await three_published_then_a_crash()
        again = make_manifest(3, 3, 2, salt="the replay came out otherwise")
        with pytest.raises(IllegalTransition, match="version must be 4, the next unused, got 3"):
            await rig.coordinator.published(again)
        await rig.coordinator.orphan(3, "the replay gave other weights")
        rig.weights_salt = "the replay came out otherwise"
        assert await rig.publish(3, is_ready=False) == 4, "the step is published again, the number is new"
        with pytest.raises(IllegalTransition, match="version must be 5, the next unused, got 3"):
            await rig.coordinator.published(again)
        await rig.coordinator.close()

    asyncio.run(scenario())


def test_v7_a_replica_that_serves_old_weights_under_the_new_label_is_not_believed() -> None:
    async def scenario() -> None:
        rig = await three_published_then_a_crash()
        await rig.coordinator.orphan(3, "the replay gave other weights")
        old, rig.weights_salt = rig.stores.versions[3].manifest, "the replay came out otherwise"
        new = await rig.publish(3, is_ready=False)
        with pytest.raises(IllegalTransition, match="weights"):
            await rig.coordinator.loaded(msgspec.structs.replace(make_proof(old), version=new))
        with pytest.raises(IllegalTransition):
            await rig.coordinator.ready(new)
        await rig.load(new)
        ready = rig.coordinator.newest_ready()
        assert ready is not None
        assert ready.version == new
        await rig.coordinator.close()

    asyncio.run(scenario())


def test_v7_files_of_a_published_version_are_neither_replaced_nor_loaded_as_another(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    publisher = VersionPublisher(tmp_path / "weights", model, probe_tolerance=1e-4)
    before = publisher.publish(tiny_module(0), version=3, step=3, parent_version=None)
    resumed = VersionPublisher(tmp_path / "weights", model, probe_tolerance=1e-4)
    assert resumed.publish(tiny_module(0), version=3, step=3, parent_version=None) == before
    with pytest.raises(IntegrityError, match="version ids are never reused"):
        resumed.publish(tiny_module(1), version=3, step=3, parent_version=None)
    resumed.publish(tiny_module(1), version=4, step=3, parent_version=None)
    folder = tmp_path / "weights"
    (folder / "v000004" / WEIGHTS_NAME).write_bytes((folder / "v000003" / WEIGHTS_NAME).read_bytes())
    with pytest.raises(IntegrityError, match=WEIGHTS_NAME):
        VersionLoader().load(folder / "v000004")


def test_v7_a_resumed_run_gives_every_version_a_number_of_its_own(crashed_run: CrashedRun) -> None:
    published = [event for event in journal_events(crashed_run.directory) if isinstance(event, e.VersionPublished)]
    assert crashed_run.resumed.returncode == 0, crashed_run.resumed.stderr
    assert [event.version for event in published] == list(range(len(published)))
    assert len({event.weights_digest for event in published}) == len(published)
    for event in journal_events(crashed_run.directory):
        if isinstance(event, e.VersionLoaded):
            assert event.proof.weights_digest == published[event.proof.version].weights_digest
