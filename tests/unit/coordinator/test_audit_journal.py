"""How an audit reads a journal."""

import asyncio

from steelyard.coordinator.audit import INVARIANTS
from steelyard.coordinator.audit_evidence import Findings
from steelyard.coordinator.audit_journal import read_events
from steelyard.coordinator.journal.base import Head, JournalRecord
from steelyard.testing.run_rig import RunRig, make_settings


async def journal_of_a_step() -> list[JournalRecord]:
    rig = await RunRig(make_settings(group_size=2)).start()
    await rig.train(0)
    await rig.coordinator.close()
    return rig.memory_journal.stored


class GrowingJournal:
    """A journal whose writer commits between two looks of the reader."""

    def __init__(self, records: list[JournalRecord]) -> None:
        self._records = records
        self._num_looks = 0

    def records(self) -> list[JournalRecord]:
        return self._records[:-2]

    def head(self) -> Head:
        self._num_looks += 1
        last = self._records[-4 if self._num_looks == 1 else -1]
        return Head(number=last.number, digest=last.digest)


def test_a_journal_that_grows_while_it_is_read_is_no_broken_chain() -> None:
    stored = asyncio.run(journal_of_a_step())
    findings = Findings(INVARIANTS)
    events = read_events(GrowingJournal(stored), findings)
    assert len(events) == len(stored) - 2
    assert findings.num_broken["journal_chain"] == 0
