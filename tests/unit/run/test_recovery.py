"""What a crash leaves between a write and its event is removed before the run goes on."""

from pathlib import Path

from steelyard.run.directory import RunDirectory
from steelyard.run.recovery import starting_point, sweep
from steelyard.run.stores import Stores
from steelyard.testing.run_rig import RunRig, play


def put_version(directory: RunDirectory, version: int) -> None:
    directory.version(version).mkdir(parents=True)
    (directory.version(version) / "manifest.json").write_text("{}")


def put_checkpoint(directory: RunDirectory, step: int) -> Path:
    path = directory.checkpoints / f"step-{step:06d}"
    path.mkdir(parents=True)
    (path / "checkpoint.json").write_text("{}")
    return path


def test_what_the_journal_does_not_know_goes_and_what_it_knows_stays(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    directory.make_folders()

    async def scene(rig: RunRig) -> None:
        stores = Stores.open(directory, lambda _: None)
        for step in range(3):
            await rig.train(step)
            await rig.checkpoint(step + 1)
        await rig.coordinator.version_deleted(0)
        await rig.coordinator.batch_deleted(0)
        for number in range(6):
            put_version(directory, number)
            put_checkpoint(directory, number + 1)
            await stores.batches.put(number, b"batch")
        await sweep(rig.coordinator, directory, stores)
        assert stores.versions.versions() == (0, 1, 2, 3)
        assert [path.name for path in sorted(directory.checkpoints.iterdir())] == [
            "step-000001", "step-000002", "step-000003",
        ]  # fmt: skip
        assert await stores.batches.steps() == (1, 2)
        await stores.close()

    play(scene)


def test_the_start_is_the_newest_checkpoint_of_the_journal_whatever_is_on_disk(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)

    async def scene(rig: RunRig) -> None:
        put_checkpoint(directory, 1)
        assert starting_point(rig.coordinator, directory).checkpoint is None
        await rig.train(0)
        await rig.checkpoint(1)
        put_checkpoint(directory, 2)
        start = starting_point(rig.coordinator, directory)
        assert (start.step, start.checkpoint) == (1, str(directory.checkpoints / "step-000001"))
        assert start.digest == rig.stores.checkpoints[1]

    play(scene)
