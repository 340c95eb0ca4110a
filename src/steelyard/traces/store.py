"""The trace store: where every sampled token is kept.

::

    append(turn) --> open/<attempt>      frames, appended, survive a kill of the process
    seal(...)    --> sealed/<attempt>    the whole Trace with its digest, durable
                 --> archive             the same bytes, where the run keeps its blobs elsewhere
                                         then the open file goes

An attempt's trace is sealed whole or thrown away; two attempts never share a file. With an archive it is there that a
sealed trace counts: the file here says to this process what it has sealed, and goes once the attempt is over.
"""

import os
import struct
from collections.abc import Callable, Set
from pathlib import Path

import msgspec
import xxhash

from steelyard.errors import IntegrityError, Refused
from steelyard.traces.durable_writer import DurableWriter, FaultHook, no_fault, storage_failed
from steelyard.traces.ledger import append_whole
from steelyard.traces.objects import ObjectStore
from steelyard.traces.sealed import SealedTraces, check_attempt_id, decode_sealed, encode_sealed, trace_path
from steelyard.types import EndReason, SealedTrace, ToolRecord, Trace, Turn

ARCHIVE_PREFIX = "traces/"
"""Of the keys of sealed traces in an archive."""

_FRAME = struct.Struct("<IQ")  # bytes of the payload, xxh3-64 of the payload
_TURN_ENCODER = msgspec.msgpack.Encoder()
_TURN_DECODER = msgspec.msgpack.Decoder(Turn)


class TraceStore:
    """Open and sealed traces in one directory.

    Args:
        root: made where it is missing.
        fault: called at the points ``trace:<point>`` of a sealing write, and at ``trace:appended``.
        before_seal: blocking work done in the writer's thread before a group of traces becomes durable, such
            as flushing the ledger that counts the same tokens.
        archive: where sealed traces are kept; None keeps them in ``root``. It is not closed here.
    """

    def __init__(
        self,
        root: Path,
        fault: FaultHook = no_fault,
        before_seal: Callable[[], None] | None = None,
        archive: ObjectStore | None = None,
    ) -> None:
        self._open = root / "open"
        self._sealed = root / "sealed"
        self._fault = fault
        self._archive = archive
        self._reader = SealedTraces(root)
        for directory in (self._open, self._sealed):
            directory.mkdir(parents=True, exist_ok=True)
        self._writer = DurableWriter(root / "tmp", "trace", fault, before_group=before_seal)

    def append(self, turn: Turn) -> int:
        """Append one turn to its attempt's open trace; returns the size in bytes before, for ``retract``.

        Raises:
            StorageFailed: the disk refused; the open trace is as before.
        """
        path = trace_path(self._open, turn.attempt_id)
        frame = encode_frame(turn)
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise storage_failed(path, error) from error
        try:
            num_bytes_before = os.fstat(descriptor).st_size
            append_whole(descriptor, path, frame, num_bytes_before)
        finally:
            os.close(descriptor)
        self._fault("trace:appended")
        return num_bytes_before

    def retract(self, attempt_id: str, num_bytes: int) -> None:
        """Cut the open trace back to ``num_bytes``: its last turn was not counted, so it was not recorded.

        Raises:
            StorageFailed: the disk refused.
        """
        path = trace_path(self._open, attempt_id)
        try:
            os.truncate(path, num_bytes)
        except OSError as error:
            raise storage_failed(path, error) from error

    def open_turns(self, attempt_id: str) -> tuple[Turn, ...]:
        """Turns of the open trace in order, without a torn last frame; empty where there is no open trace.

        Raises:
            IntegrityError: a frame before the last one is damaged.
        """
        path = trace_path(self._open, attempt_id)
        return read_frames(path, path.read_bytes()) if path.exists() else ()

    def open_attempts(self) -> tuple[str, ...]:
        """Attempts with an open trace; after a restart, those whose gateway died under them."""
        return tuple(sorted(path.name for path in self._open.iterdir()))

    def sealed_attempts(self) -> tuple[str, ...]:
        """Attempts with a sealed trace."""
        return tuple(sorted(path.name for path in self._sealed.iterdir()))

    def is_sealed(self, attempt_id: str) -> bool:
        """Whether the attempt has a sealed trace, which nothing may be added to."""
        return self._reader.is_sealed(attempt_id)

    async def seal(
        self, attempt_id: str, end_reason: EndReason, tools: tuple[ToolRecord, ...], bound_version: int
    ) -> SealedTrace:
        """Make the attempt's trace whole and durable. Sealing again in the same way returns the same answer.

        Args:
            bound_version: reported as the version of a trace in which nothing was sampled.

        Raises:
            Refused: it was sealed before, with another ending (``double``), or is over and forgotten (``late``).
            IntegrityError: the open trace is damaged or its turns are not 0, 1, 2, ...
            StorageFailed: disk or archive refused; the open trace is as before, and sealing may be tried again.
        """
        path = trace_path(self._sealed, attempt_id)
        if self.is_sealed(attempt_id):
            data = await self._file(attempt_id)
            if data is None:
                raise Refused("late", f"attempt {attempt_id} was sealed, and is over")
            trace, digest = decode_sealed(attempt_id, data, str(path))
            if (trace.end_reason, trace.tools) != (end_reason, tools):
                raise Refused("double", f"{attempt_id} was sealed as {trace.end_reason}, and now as {end_reason}")
        else:
            turns = self._whole_turns(attempt_id)
            trace = Trace(attempt_id=attempt_id, turns=turns, end_reason=end_reason, tools=tools)
            data, digest = encode_sealed(trace)
            await self._writer.write(path, data)
        if self._archive is not None:
            await self._archive.put(archive_key(attempt_id), data)
        trace_path(self._open, attempt_id).unlink(missing_ok=True)
        return describe(trace, digest, bound_version)

    async def read(self, attempt_id: str) -> tuple[Trace, str]:
        """The sealed trace and its digest, which was checked; from the archive once the file here is gone.

        Raises:
            IntegrityError: there is none, or it is not what its digest and name say.
            StorageFailed: the archive did not answer.
        """
        if self._archive is None:
            return await self._writer.call(lambda: self.read_now(attempt_id))
        data = await self._file(attempt_id)
        if data is None:
            return await read_archived(self._archive, attempt_id)
        return decode_sealed(attempt_id, data, str(trace_path(self._sealed, attempt_id)))

    def read_now(self, attempt_id: str) -> tuple[Trace, str]:
        """As ``read``, of the file here, blocking."""
        return self._reader.read_now(attempt_id)

    async def sweep(self, keep: Set[str], min_age_s: float, now_s: float) -> tuple[str, ...]:
        """Delete traces, open or sealed, of attempts outside ``keep`` that were last written ``min_age_s`` ago.

        Args:
            keep: attempts that are alive or that the journal refers to.

        Returns:
            The attempts of which something was deleted.
        """
        return await self._writer.call(lambda: self._sweep(keep, now_s - min_age_s))

    async def forget(self, attempt_id: str) -> None:
        """Remove the file of a sealed trace that is in the archive, once its attempt is over.

        To be called when the attempt can neither sample nor hand in any more. Nothing happens without an archive.
        """
        if self._archive is not None:
            path = trace_path(self._sealed, attempt_id)
            await self._writer.call(lambda: path.unlink(missing_ok=True))

    async def close(self) -> None:
        """Finish the sealing that was begun."""
        await self._writer.close()

    async def _file(self, attempt_id: str) -> bytes | None:
        """The bytes of a sealed trace here; None where there are none, or none any more."""
        path = trace_path(self._sealed, attempt_id)
        try:
            return await self._writer.call(path.read_bytes)
        except FileNotFoundError:
            return None

    def _whole_turns(self, attempt_id: str) -> tuple[Turn, ...]:
        turns = self.open_turns(attempt_id)
        indices = [turn.turn_index for turn in turns]
        if indices != list(range(len(turns))):
            raise IntegrityError(f"open trace {attempt_id} must hold turns 0..{len(turns) - 1}, but holds {indices}")
        return turns

    def _sweep(self, keep: Set[str], before_s: float) -> tuple[str, ...]:
        deleted = set()
        for path in (*self._open.iterdir(), *self._sealed.iterdir()):
            if path.name not in keep and path.stat().st_mtime < before_s:
                path.unlink()
                deleted.add(path.name)
        return tuple(sorted(deleted))


def archive_key(attempt_id: str) -> str:
    """Where the archive keeps an attempt's sealed trace.

    Raises:
        IntegrityError: the id could lead elsewhere.
    """
    return f"{ARCHIVE_PREFIX}{check_attempt_id(attempt_id)}"


async def read_archived(archive: ObjectStore, attempt_id: str) -> tuple[Trace, str]:
    """A sealed trace of the archive and its digest, which was checked.

    Raises:
        IntegrityError: there is none, or it is not what its digest and name say.
        StorageFailed: the archive did not answer.
    """
    key = archive_key(attempt_id)
    return decode_sealed(attempt_id, await archive.get(key), f"{archive.url}/{key}")


def describe(trace: Trace, digest: str, bound_version: int) -> SealedTrace:
    """What the coordinator keeps of ``trace``; ``mean_version`` is weighted by sampled tokens."""
    num_tokens = sum(len(turn.token_ids) for turn in trace.turns)
    versions = {span.version for turn in trace.turns for span in turn.version_spans} or {bound_version}
    weighted = sum(num * version for turn in trace.turns for version, num in tokens_by_version(turn))
    return SealedTrace(
        attempt_id=trace.attempt_id,
        digest=digest,
        num_turns=len(trace.turns),
        num_tokens=num_tokens,
        oldest_version=min(versions),
        newest_version=max(versions),
        mean_version=weighted / num_tokens if num_tokens else float(bound_version),
        num_segments=len({turn.segment_index for turn in trace.turns}),
        end_reason=trace.end_reason,
    )


def tokens_by_version(turn: Turn) -> tuple[tuple[int, int], ...]:
    """(version, number of sampled tokens) of each span of a turn, in order."""
    starts = [span.start for span in turn.version_spans]
    ends = [*starts[1:], len(turn.token_ids)]
    return tuple((span.version, end - span.start) for span, end in zip(turn.version_spans, ends, strict=True))


def encode_frame(turn: Turn) -> bytes:
    """One turn as it stands in an open trace: length, checksum, msgpack."""
    payload = _TURN_ENCODER.encode(turn)
    return _FRAME.pack(len(payload), xxhash.xxh3_64_intdigest(payload)) + payload


def read_frames(path: Path, data: bytes) -> tuple[Turn, ...]:
    """Decode the frames of an open trace; a last frame cut short by a crash is left out.

    Raises:
        IntegrityError: a frame that others follow is damaged.
    """
    turns = []
    offset = 0
    while offset + _FRAME.size <= len(data):
        length, checksum = _FRAME.unpack_from(data, offset)
        payload = data[offset + _FRAME.size : offset + _FRAME.size + length]
        if len(payload) < length:
            break
        if xxhash.xxh3_64_intdigest(payload) != checksum:
            if offset + _FRAME.size + length == len(data):
                break
            raise IntegrityError(f"{path} is damaged at byte {offset}: the frame's bytes do not match its checksum")
        turns.append(_TURN_DECODER.decode(payload))
        offset += _FRAME.size + length
    return tuple(turns)
