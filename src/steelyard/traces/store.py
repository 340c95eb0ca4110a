"""The trace store: where every sampled token is kept.

::

    append(turn) --> open/<attempt>      frames, appended, survive a kill of the process
    seal(...)    --> sealed/<attempt>    the whole Trace with its digest, durable
                 --> archive             the same bytes, where the run keeps its blobs elsewhere
                                         then the open file goes

An attempt's trace is sealed whole or thrown away; two attempts never share a file. With an archive it is there that a
sealed trace counts: the file here says to this process what it has sealed, and goes once the attempt is over.
"""

from collections.abc import Callable, Sequence, Set
from pathlib import Path

from steelyard.errors import IntegrityError, Refused
from steelyard.traces.durable_writer import DurableWriter, FaultHook, no_fault
from steelyard.traces.objects import ObjectStore
from steelyard.traces.open_traces import OpenTraces, TurnOutline, outline_of
from steelyard.traces.sealed import SealedTraces, check_attempt_id, decode_sealed, splice_sealed, trace_path
from steelyard.types import EndReason, SealedTrace, ToolRecord, Trace, Turn

ARCHIVE_PREFIX = "traces/"
"""Of the keys of sealed traces in an archive."""


class TraceStore:
    """Open and sealed traces in one directory.

    Args:
        root: made where it is missing.
        fault: called at the points ``trace:<point>`` of a sealing write, and at ``trace:appended``.
        before_seal: blocking work done in a thread before any of a group of traces counts as sealed, such as
            flushing the ledger that counts the same tokens.
        archive: where sealed traces are kept; None keeps them in ``root``. It is not closed here.
    """

    def __init__(
        self,
        root: Path,
        fault: FaultHook = no_fault,
        before_seal: Callable[[], None] | None = None,
        archive: ObjectStore | None = None,
    ) -> None:
        self._open = OpenTraces(root / "open")
        self._sealed = root / "sealed"
        self._fault = fault
        self._archive = archive
        self._reader = SealedTraces(root)
        self._sealed.mkdir(parents=True, exist_ok=True)
        self._writer = DurableWriter(root / "tmp", "trace", fault, before_group=before_seal)

    def append(self, turn: Turn) -> int:
        """Append one turn to its attempt's open trace; returns the size in bytes before, for ``retract``.

        Raises:
            StorageFailed: the disk refused; the open trace is as before.
        """
        num_bytes_before = self._open.append(turn)
        self._fault("trace:appended")
        return num_bytes_before

    def retract(self, attempt_id: str, num_bytes: int) -> None:
        """Cut the open trace back to ``num_bytes``: its last turn was not counted, so it was not recorded.

        Raises:
            StorageFailed: the disk refused.
        """
        self._open.retract(attempt_id, num_bytes)

    def open_turns(self, attempt_id: str) -> tuple[Turn, ...]:
        """Turns of the open trace in order, without a torn last frame; empty where there is no open trace.

        Raises:
            IntegrityError: a frame before the last one is damaged.
        """
        return self._open.turns(attempt_id)

    def open_attempts(self) -> tuple[str, ...]:
        """Attempts with an open trace; after a restart, those whose gateway died under them."""
        return tuple(sorted(self._open.attempts()))

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
            turns = tuple(map(outline_of, trace.turns))
        else:
            payloads, turns = self._whole_turns(attempt_id)
            data, digest = splice_sealed(attempt_id, payloads, end_reason, tools)
            await self._writer.write(path, data)
        if self._archive is not None:
            await self._archive.put(archive_key(attempt_id), data)
        self._open.remove(attempt_id)
        return describe(attempt_id, turns, end_reason, digest, bound_version)

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
        deleted = await self._writer.call(lambda: self._sweep(keep, now_s - min_age_s))
        self._open.let_go(deleted)
        return deleted

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
        self._open.close()

    async def _file(self, attempt_id: str) -> bytes | None:
        """The bytes of a sealed trace here; None where there are none, or none any more."""
        path = trace_path(self._sealed, attempt_id)
        try:
            return await self._writer.call(path.read_bytes)
        except FileNotFoundError:
            return None

    def _whole_turns(self, attempt_id: str) -> tuple[tuple[memoryview, ...], tuple[TurnOutline, ...]]:
        payloads, turns = self._open.payloads(attempt_id)
        indices = [turn.turn_index for turn in turns]
        if indices != list(range(len(turns))):
            raise IntegrityError(f"open trace {attempt_id} must hold turns 0..{len(turns) - 1}, but holds {indices}")
        return payloads, turns

    def _sweep(self, keep: Set[str], before_s: float) -> tuple[str, ...]:
        deleted = set()
        for path in (*self._open.paths(), *self._sealed.iterdir()):
            if path.name in keep:
                continue
            try:
                if path.stat().st_mtime >= before_s:
                    continue
                path.unlink()
            except FileNotFoundError:
                # It was sealed, forgotten or thrown away since the folder was listed.
                continue
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


def describe(
    attempt_id: str, turns: Sequence[TurnOutline], end_reason: EndReason, digest: str, bound_version: int
) -> SealedTrace:
    """What the coordinator keeps of a trace; ``mean_version`` is weighted by sampled tokens."""
    num_tokens = sum(turn.num_tokens for turn in turns)
    versions = {span.version for turn in turns for span in turn.version_spans} or {bound_version}
    weighted = sum(num * version for turn in turns for version, num in tokens_by_version(turn))
    return SealedTrace(
        attempt_id=attempt_id,
        digest=digest,
        num_turns=len(turns),
        num_tokens=num_tokens,
        oldest_version=min(versions),
        newest_version=max(versions),
        mean_version=weighted / num_tokens if num_tokens else float(bound_version),
        num_segments=len({turn.segment_index for turn in turns}),
        end_reason=end_reason,
    )


def tokens_by_version(turn: TurnOutline) -> tuple[tuple[int, int], ...]:
    """(version, number of sampled tokens) of each span of a turn, in order."""
    starts = [span.start for span in turn.version_spans]
    ends = [*starts[1:], turn.num_tokens]
    return tuple((span.version, end - span.start) for span, end in zip(turn.version_spans, ends, strict=True))
