"""A run that went well, and what it takes to corrupt its journal and stores: for tests of the audit."""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from steelyard.assembly.batch import build_step_batch
from steelyard.coordinator import events as e
from steelyard.coordinator.journal.base import EMPTY_HEAD, chain, decode
from steelyard.digests import digest_bytes
from steelyard.testing.run_rig import WORKER, MemoryStores, RunRig, make_settings
from steelyard.types import Sampling, StepBatch, Trace, TrainingSample, Turn

E = TypeVar("E", bound=e.Event)
GREEDY = Sampling(temperature=0.0)


def finished_run() -> RunRig:
    """Four steps at lag 1, a crash, a failure, an evaluation, two checkpoints; then the end."""

    async def run() -> RunRig:
        rig = await RunRig(make_settings(lag=1, group_size=3), seed=3).start()
        await rig.coordinator.admit_evaluation(("held-0", "held-1"), version=0, sampling=GREEDY, label="before")
        await rig.rollouts()
        await rig.train(0)
        for lease in await rig.coordinator.lease(WORKER, 2, 0.0):
            await rig.lose(lease)
        rig.clock.advance(1.0)
        await rig.train(1)
        await rig.checkpoint(2)
        await rig.coordinator.lease(WORKER, 3, 0.0)
        await rig.coordinator.crash()
        await rig.open()
        await rig.coordinator.abandon("interrupted")
        await rig.train(2)
        await rig.train(3)
        await rig.checkpoint(4)
        await rig.coordinator.finish("done")
        await rig.coordinator.close()
        return rig

    return asyncio.run(run())


class BrokenRun:
    """A copy of the clean run, to be corrupted."""

    def __init__(self) -> None:
        self.rig = finished_run()
        self.stores: MemoryStores = self.rig.stores
        self.journal = self.rig.memory_journal

    def events(self, kind: type[E]) -> list[tuple[int, E]]:
        """Journal positions and events of one kind."""
        found = [decode(record.payload) for record in self.journal.stored]
        return [(index, event) for index, event in enumerate(found) if isinstance(event, kind)]

    def forge(self, change: Callable[[list[Any]], None]) -> None:
        """Change the list of events and write the chain anew, as somebody who covers his tracks would."""
        events = [decode(record.payload) for record in self.journal.stored]
        change(events)
        records, head = chain(EMPTY_HEAD, events)
        self.journal.stored, self.journal.stored_head = list(records), head

    def replace(self, index: int, event: e.Event) -> None:
        """Put another event in the place of one, forged as :meth:`forge` does."""

        def change(events: list[Any]) -> None:
            events[index] = event

        self.forge(change)

    def rebatch(self, step: int, change: Callable[[list[TrainingSample]], None]) -> None:
        """Change the samples of a step and forge batch, digest and STEP_BEGUN to match."""
        batch, _ = self.stores.batches[step]
        samples = list(batch.samples)
        change(samples)
        self.store_batch(step, build_step_batch(step, batch.parent_version, samples, 4096))

    def store_batch(self, step: int, batch: StepBatch) -> None:
        """Store a batch for a step and forge its STEP_BEGUN."""
        digest = digest_bytes(msgspec.msgpack.encode(batch))
        self.stores.batches[step] = (batch, digest)
        index, begun = next((i, event) for i, event in self.events(e.StepBegun) if event.step == step)
        names = tuple(f"{sample.attempt_id}/{sample.segment_index}" for sample in batch.samples)
        self.replace(index, msgspec.structs.replace(begun, batch_digest=digest, sample_ids=names))

    def retrace(self, attempt_id: str, change: Callable[[list[Turn]], list[Turn]]) -> None:
        """Change a sealed trace and forge its digest in store and journal."""
        trace, _ = self.stores.traces[attempt_id]
        trace = msgspec.structs.replace(trace, turns=tuple(change(list(trace.turns))))
        digest = digest_bytes(msgspec.msgpack.encode(trace))
        self.stores.traces[attempt_id] = (trace, digest)
        for index, event in self.events(e.ArtifactReady):
            if event.report.attempt_id == attempt_id:
                sealed = msgspec.structs.replace(event.report.trace, digest=digest)
                report = msgspec.structs.replace(event.report, trace=sealed)
                self.replace(index, msgspec.structs.replace(event, report=report))

    def trained(self, step: int = 1) -> TrainingSample:
        """The first sample of a step."""
        return self.stores.batches[step][0].samples[0]

    def trained_trace(self, step: int = 1) -> Trace:
        """The trace that sample came from."""
        return self.stores.traces[self.trained(step).attempt_id][0]
