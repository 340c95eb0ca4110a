"""What a process was told is done: one line for each acknowledgement, on the disk before the process goes on."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

import msgspec

from steelyard.testing.faultsim.witness import Witness
from steelyard.types import ArtifactReport, AttemptFailure, Lease, Manifest, Record, Score


class GotLease(Record, frozen=True, kw_only=True, tag=True):
    """A lease was given to a worker."""

    worker_id: str
    lease: Lease


class Started(Record, frozen=True, kw_only=True, tag=True):
    """The start of an attempt was acknowledged."""

    attempt_id: str


class Reported(Record, frozen=True, kw_only=True, tag=True):
    """A report was acknowledged."""

    report: ArtifactReport


class Failed(Record, frozen=True, kw_only=True, tag=True):
    """The failure of an attempt was acknowledged."""

    failure: AttemptFailure


class Delivered(Record, frozen=True, kw_only=True, tag=True):
    """A score was acknowledged."""

    score: Score


class Begun(Record, frozen=True, kw_only=True, tag=True):
    """A step was acknowledged as begun."""

    step: int
    batch_digest: str


class Published(Record, frozen=True, kw_only=True, tag=True):
    """A publication was acknowledged."""

    manifest: Manifest


class Checkpointed(Record, frozen=True, kw_only=True, tag=True):
    """A checkpoint was acknowledged."""

    step: int
    digest: str


class Finished(Record, frozen=True, kw_only=True, tag=True):
    """The end of the run was acknowledged."""


Acknowledged: TypeAlias = (
    GotLease | Started | Reported | Failed | Delivered | Begun | Published | Checkpointed | Finished
)
_ENCODER = msgspec.json.Encoder()
_DECODER: msgspec.json.Decoder[Acknowledged] = msgspec.json.Decoder(Acknowledged)


class AcknowledgementFile:
    """The file of one process, over all its lives. A line that a kill cut short is ended by the next life."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        size = os.fstat(self._descriptor).st_size
        if size and os.pread(self._descriptor, 1, size - 1) != b"\n":
            os.write(self._descriptor, b"\n")

    def note(self, acknowledged: Acknowledged) -> None:
        """Write it down; durable when this returns."""
        os.write(self._descriptor, _ENCODER.encode(acknowledged) + b"\n")
        os.fdatasync(self._descriptor)


def read_acknowledged(path: Path) -> Iterator[Acknowledged]:
    """All that a process noted; a line that a kill cut short was not."""
    for line in path.read_bytes().split(b"\n"):
        try:
            yield _DECODER.decode(line)
        except msgspec.DecodeError:
            continue


def testify(witness: Witness, acknowledged: Acknowledged) -> None:
    """Tell a witness what a process was told."""
    match acknowledged:
        case GotLease():
            witness.leased(acknowledged.worker_id, acknowledged.lease)
        case Started():
            witness.started(acknowledged.attempt_id)
        case Reported():
            witness.reported(acknowledged.report)
        case Failed():
            witness.failed(acknowledged.failure)
        case Delivered():
            witness.scored(acknowledged.score)
        case Begun():
            witness.begun(acknowledged.step, acknowledged.batch_digest)
        case Published():
            witness.published(acknowledged.manifest)
        case Checkpointed():
            witness.checkpointed(acknowledged.step, acknowledged.digest)
        case Finished():
            pass
