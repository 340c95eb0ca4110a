import random
from collections.abc import Coroutine
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.coordinator import events as e
from steelyard.errors import IntegrityError, StorageFailed
from steelyard.testing.faultsim.disk import Blobs, Disk, DiskJournal, DiskJournalReader, File
from steelyard.testing.faultsim.loop import VirtualLoop, run


def finished(at_s: float) -> e.RunFinished:
    return e.RunFinished(at_s=at_s, reason="test")


class Desk:
    """A disk on a loop of its own."""

    def __init__(self, seed: int = 0) -> None:
        self.loop = VirtualLoop(1000.0)
        self.disk = Disk(self.loop, random.Random(seed))

    def run(self, coroutine: Coroutine[Any, Any, None]) -> None:
        run(coroutine, self.loop)


@given(
    seed=st.integers(0, 1000), sizes=st.lists(st.integers(1, 3), min_size=1, max_size=8), num_synced=st.integers(0, 8)
)
def test_a_power_cut_keeps_what_was_synced_and_of_the_rest_whole_batches_from_the_start(
    seed: int, sizes: list[int], num_synced: int
) -> None:
    desk = Desk(seed)
    file = File(desk.disk)
    batches = [[finished(float(10 * index + k)) for k in range(size)] for index, size in enumerate(sizes)]

    async def main() -> None:
        journal = DiskJournal(file)
        for batch in batches[:num_synced]:
            await journal.append(batch)
        for batch in batches[num_synced:]:
            journal.write(batch)
        desk.disk.cut_power()
        kept = await DiskJournal(file).replay()
        wanted = [tuple(event for batch in batches[:count] for event in batch) for count in range(len(batches) + 1)]
        assert kept in wanted[min(num_synced, len(batches)) :]
        assert DiskJournalReader(file).head().number == len(kept)

    desk.run(main())


def test_a_kill_keeps_what_was_written() -> None:
    desk = Desk()
    file = File(desk.disk)

    async def main() -> None:
        DiskJournal(file).write([finished(1.0)])
        assert await DiskJournal(file).replay() == (finished(1.0),)

    desk.run(main())


def test_a_sync_that_fails_leaves_the_journal_as_it_was() -> None:
    desk = Desk()
    file = File(desk.disk)

    async def main() -> None:
        journal = DiskJournal(file)
        await journal.append([finished(1.0)])
        desk.disk.sync_fail_frac = 1.0
        with pytest.raises(StorageFailed, match="refused to sync"):
            await journal.append([finished(2.0)])
        assert await DiskJournal(file).replay() == (finished(1.0),)

    desk.run(main())


def test_a_damaged_batch_before_the_end_is_refused() -> None:
    desk = Desk()
    file = File(desk.disk)

    async def main() -> None:
        journal = DiskJournal(file)
        await journal.append([finished(1.0)])
        await journal.append([finished(2.0)])
        file.written = file.written[:20] + bytes([file.written[20] ^ 1]) + file.written[21:]
        with pytest.raises(IntegrityError, match="damaged at byte 0"):
            await DiskJournal(file).replay()

    desk.run(main())


def test_a_blob_is_there_once_put_returns_and_survives_a_power_cut_unless_it_was_only_in_the_page_cache() -> None:
    desk = Desk()
    blobs: Blobs[str] = Blobs(desk.disk)

    async def main() -> None:
        await blobs.put("a", b"durable")
        blobs.put_carelessly("b", b"fleeting")
        assert blobs.read("b") == b"fleeting"
        desk.disk.cut_power()
        assert blobs.read("a") == b"durable"
        with pytest.raises(IntegrityError, match="b must be stored"):
            blobs.read("b")

    desk.run(main())


def test_a_sync_under_way_at_a_power_cut_fails() -> None:
    desk = Desk()
    blobs: Blobs[str] = Blobs(desk.disk)

    async def main() -> None:
        putting = desk.loop.create_task(blobs.put("a", b"data"))
        desk.loop.call_soon(desk.disk.cut_power)
        with pytest.raises(StorageFailed):
            await putting
        with pytest.raises(IntegrityError):
            blobs.read("a")

    desk.run(main())
