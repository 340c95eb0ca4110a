"""Everything a simulated run stores, on simulated disks; and how gateway, trainer and audit see it."""

from collections.abc import Mapping
from typing import Generic, TypeVar

import msgspec

from steelyard.coordinator.audit_evidence import AuditStores, StoredVersion
from steelyard.digests import digest_bytes
from steelyard.errors import IntegrityError, Refused
from steelyard.testing.faultsim.disk import Blobs, Disk, DiskJournalReader, File
from steelyard.testing.run_rig import grpo_advantages
from steelyard.traces.open_traces import outline_of
from steelyard.traces.store import describe
from steelyard.types import EndReason, Manifest, SealedTrace, StepBatch, ToolRecord, Trace, Turn

_ENCODE = msgspec.msgpack.Encoder().encode
_TRACE = msgspec.msgpack.Decoder(Trace)
_TURN = msgspec.msgpack.Decoder(Turn)

_T = TypeVar("_T")
_K = TypeVar("_K")


class RunStores:
    """The disks of the machine of the coordinator (journal, ledger, traces) and of the object store (the rest).

    Args:
        disk: of the coordinator's machine.
        objects: of the object store.
    """

    def __init__(self, disk: Disk, objects: Disk) -> None:
        self.journal = File(disk)
        self.ledger = File(disk)
        self.sealed: Blobs[str] = Blobs(disk)
        self.artifacts: Blobs[str] = Blobs(objects)
        self.batches: Blobs[int] = Blobs(objects)
        self.versions: Blobs[int] = Blobs(objects)
        self.checkpoints: Blobs[int] = Blobs(objects)
        self.open_turns: dict[str, list[bytes]] = {}
        self._disk = disk
        disk.on_power_cut(self._lose_open_turns)

    def audit_stores(self) -> AuditStores:
        """Everything as the audit wants it."""
        return AuditStores(
            journal=DiskJournalReader(self.journal),
            traces=_Read(self.sealed, Trace),
            batches=_Read(self.batches, StepBatch),
            artifacts=_Artifacts(self.artifacts),
            weights=_Weights(self.versions),
            checkpoints=_Checkpoints(self.checkpoints),
            recorded=read_ledger(self.ledger),
            advantages=grpo_advantages,
        )

    def _lose_open_turns(self) -> None:
        for attempt_id in list(self.open_turns):
            turns = self.open_turns[attempt_id]
            del turns[self._disk.draw.randint(0, len(turns)) :]


def read_ledger(file: File) -> Mapping[str, int]:
    """Recorded tokens by attempt; an unfinished last line is skipped."""
    counts: dict[str, int] = {}
    for line in file.written[: file.written.rfind(b"\n") + 1].decode().splitlines():
        attempt_id, num_tokens = line.split(" ")
        counts[attempt_id] = counts.get(attempt_id, 0) + int(num_tokens)
    return counts


class FileLedger:
    """The recorder's ledger, as one life of the gateway has it; see ``steelyard.gateway.recorder.Ledger``."""

    def __init__(self, file: File) -> None:
        file.cut(file.written.rfind(b"\n") + 1)
        self._file = file
        self._counts = dict(read_ledger(file))

    def add(self, attempt_id: str, request_id: str, num_tokens: int) -> None:
        self._file.append(f"{attempt_id} {num_tokens}\n".encode())
        self._counts[attempt_id] = self.recorded(attempt_id) + num_tokens

    def sync(self) -> None:
        self._file.sync_now()

    def recorded(self, attempt_id: str) -> int:
        return self._counts.get(attempt_id, 0)


class TurnFiles:
    """Open and sealed traces, as one life of the gateway has them; see ``steelyard.gateway.recorder.TurnStore``.

    The ledger is synced before a trace is sealed, as the real store does.
    """

    def __init__(self, stores: RunStores) -> None:
        self._stores = stores

    def append(self, turn: Turn) -> int:
        turns = self._stores.open_turns.setdefault(turn.attempt_id, [])
        turns.append(_ENCODE(turn))
        return len(turns) - 1

    def retract(self, attempt_id: str, num_bytes: int) -> None:
        del self._stores.open_turns[attempt_id][num_bytes:]

    def open_turns(self, attempt_id: str) -> tuple[Turn, ...]:
        return tuple(_TURN.decode(data) for data in self._stores.open_turns.get(attempt_id, ()))

    def is_sealed(self, attempt_id: str) -> bool:
        return attempt_id in self._stores.sealed.written

    async def seal(
        self, attempt_id: str, end_reason: EndReason, tools: tuple[ToolRecord, ...], bound_version: int
    ) -> SealedTrace:
        stores = self._stores
        if self.is_sealed(attempt_id):
            trace, digest = self.read_now(attempt_id)
            if (trace.end_reason, trace.tools) != (end_reason, tools):
                raise Refused("double", f"{attempt_id} was sealed as {trace.end_reason}, and now as {end_reason}")
            return describe(attempt_id, tuple(map(outline_of, trace.turns)), end_reason, digest, bound_version)
        trace = Trace(attempt_id=attempt_id, turns=self.open_turns(attempt_id), end_reason=end_reason, tools=tools)
        data = _ENCODE(trace)
        await stores.ledger.sync()
        await stores.sealed.put(attempt_id, data)
        stores.open_turns.pop(attempt_id, None)
        return describe(attempt_id, tuple(map(outline_of, trace.turns)), end_reason, digest_bytes(data), bound_version)

    def read_now(self, attempt_id: str) -> tuple[Trace, str]:
        data = self._stores.sealed.read(attempt_id)
        return _TRACE.decode(data), digest_bytes(data)


class _Read(Generic[_K, _T]):
    def __init__(self, blobs: Blobs[_K], kind: type[_T]) -> None:
        self._blobs = blobs
        self._decoder = msgspec.msgpack.Decoder(kind)

    def read(self, key: _K) -> tuple[_T, str]:
        data = self._blobs.read(key)
        return self._decoder.decode(data), digest_bytes(data)


class _Artifacts:
    def __init__(self, blobs: Blobs[str]) -> None:
        self._blobs = blobs

    def digest(self, artifact_digest: str) -> str:
        return digest_bytes(self._blobs.read(artifact_digest))


class _Weights:
    def __init__(self, blobs: Blobs[int]) -> None:
        self._blobs = blobs

    def read(self, version: int) -> StoredVersion:
        manifest = msgspec.msgpack.decode(self._blobs.read(version), type=Manifest)
        return StoredVersion(manifest=manifest, files=manifest.files)


class _Checkpoints:
    def __init__(self, blobs: Blobs[int]) -> None:
        self._blobs = blobs

    def digest(self, step: int) -> str | None:
        try:
            return digest_bytes(self._blobs.read(step))
        except IntegrityError:
            return None
