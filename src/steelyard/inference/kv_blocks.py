"""Who holds which part of the key-value cache. Bookkeeping only: no tensors, no clock.

A *row* is a contiguous strip of ``row_tokens`` positions in the tensors of :mod:`steelyard.inference.kv_cache`;
it is handed out whole to one sequence and accounted in blocks of ``block_tokens``. Callers name sequences, not rows.

A sequence is *running* while a request computes on it, and *retained* afterwards, so that the next turn of its
conversation, or a sibling with the same beginning, need not compute it again. Reuse is decided on (version, equal token
prefix) and on nothing else: the tokens are compared, hashes only find candidates.

Space. A running sequence holds blocks for the tokens that it has, and grows. What is retained fills the rest, is
evicted whole, and is the first to go. Conversations have a ``rank``: the order in which their attempts came. Admission
goes by projections: what all running sequences are projected to need in the end, what older attempts retain, and, for
a conversation that comes anew, by how much all of them will grow (:mod:`steelyard.inference.conversations`). So it
pushes out what younger attempts retain, never what older ones do, and may then stay. Otherwise, where contexts outgrow
the cache, each agent would push out whoever comes back next, and all would compute everything again (PROBLEMS, row T2).
Where computing again costs less than an idle engine, the caller says so, and only the running count.
"""

import enum
import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from steelyard.errors import EngineError
from steelyard.inference.conversations import Growth, Member


class Wait(enum.Enum):
    """Why a sequence cannot be admitted at this moment."""

    NO_SPACE = "no_space"
    SHARED_PREFIX = "shared_prefix"


@dataclass(frozen=True, slots=True)
class Admitted:
    """A running sequence was given space; the first ``num_cached`` tokens of its prompt need no computing."""

    num_cached: int


@dataclass(frozen=True, slots=True)
class Copy:
    """The first ``num_tokens`` positions of one row must be copied to another, before anything else is written."""

    source_row: int
    target_row: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class SequenceInfo:
    """What the cache must know of a request. ``chain`` comes from :meth:`BlockTable.chain`.

    ``prompt``: all tokens that it starts with. It is projected to have ``projected_tokens`` in the end and can have
    ``max_tokens``. ``rank``: the lower, the older is its attempt. ``turn``: of its conversation, from 1.
    """

    sequence_id: str
    sequence_key: str
    attempt_id: str
    version: int
    prompt: tuple[int, ...]
    projected_tokens: int
    max_tokens: int
    chain: tuple[int, ...]
    rank: int = 0
    turn: int = 1


@dataclass(slots=True)
class _Holder:
    """One occupied row. ``tokens[:num_ready]`` are computed; the rest of ``tokens`` is being computed."""

    row: int
    sequence_id: str
    sequence_key: str
    attempt_id: str
    version: int
    tokens: tuple[int, ...]
    chain: tuple[int, ...]
    num_ready: int
    num_blocks: int
    projected_blocks: int
    max_blocks: int
    rank: int
    turn: int
    is_running: bool
    tick: int
    is_kept: bool = True


@dataclass(frozen=True, slots=True)
class _Match:
    """Best equal prefix held by anyone: computed already (``holder``), and being computed just now."""

    holder: _Holder | None
    num_ready: int
    num_coming: int


class BlockTable:
    """Rows, blocks, prefix index and eviction.

    Args:
        num_rows: sequences that can be held at once, running and retained together.
        row_tokens: longest sequence.
        capacity_tokens: tokens that may be reserved over all rows, in whole blocks.
        block_tokens: unit of accounting and of the prefix index.
    """

    def __init__(self, *, num_rows: int, row_tokens: int, capacity_tokens: int, block_tokens: int = 16) -> None:
        if min(num_rows, row_tokens, block_tokens) < 1 or capacity_tokens < block_tokens:
            raise EngineError(
                f"a key-value cache must have rows, row_tokens, block_tokens >= 1 and capacity_tokens >= block_tokens, "
                f"got {num_rows}, {row_tokens}, {block_tokens}, {capacity_tokens}"
            )
        self.row_tokens = row_tokens
        self.block_tokens = block_tokens
        self.num_rows = num_rows
        self._num_blocks = capacity_tokens // block_tokens
        self._free_blocks = self._num_blocks
        self._free_rows = list(range(num_rows))
        self._by_row: dict[int, _Holder] = {}
        self._running: dict[str, _Holder] = {}
        self._retained: dict[str, _Holder] = {}
        self._index: dict[tuple[int, int], dict[int, None]] = {}
        self._copies: list[Copy] = []
        self._projected_blocks = 0
        self._tick = 0
        self.placement = 0
        """Grows whenever a row gets another holder; as long as it stays, every sequence is where it was."""

    # --- reading ----------------------------------------------------------------------------------

    @property
    def capacity_tokens(self) -> int:
        """Tokens that may be reserved."""
        return self._num_blocks * self.block_tokens

    @property
    def tokens_in_use(self) -> int:
        """Tokens reserved by running and retained sequences, in whole blocks."""
        return (self._num_blocks - self._free_blocks) * self.block_tokens

    def rows_of(self, sequence_ids: Sequence[str]) -> list[int]:
        """Rows of running sequences.

        Raises:
            EngineError: a sequence is not running.
        """
        try:
            return [self._running[sequence_id].row for sequence_id in sequence_ids]
        except KeyError as error:
            raise EngineError(f"sequence {error} must be running in the key-value cache, and is not") from None

    def continues(self, info: SequenceInfo) -> bool:
        """Whether the conversation of a sequence is retained, so that waiting may lose what is computed of it."""
        return self._own_retained(info) is not None

    def can_ever_hold(self, num_tokens: int) -> bool:
        """Whether a sequence of ``num_tokens`` fits into an empty cache."""
        return num_tokens <= self.row_tokens and self._blocks_for(num_tokens) <= self._num_blocks

    def chain(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """Hash of each whole-block prefix of ``tokens``, shortest first."""
        hashes = []
        previous = 0
        size = self.block_tokens
        for start in range(0, len(tokens) - size + 1, size):
            previous = hash((previous, tuple(tokens[start : start + size])))
            hashes.append(previous)
        return tuple(hashes)

    # --- admission --------------------------------------------------------------------------------

    def admit(self, info: SequenceInfo, is_eager: bool = False, growth: Growth | None = None) -> Admitted | Wait:
        """Give a new running sequence a row, and space for its prompt.

        In order of preference it continues its own retained sequence, copies the longest equal prefix of
        another one, or starts empty. It is told to wait where a running sequence is just computing a longer
        equal prefix, and where there is no space by the rule above; ``is_eager``: only what runs counts.
        ``growth``: of all that stay beside one that comes anew; None for none. A refusal changes nothing.
        """
        usable = len(info.prompt) - 1
        own = self._own_retained(info)
        num_own = 0 if own is None else min(_common_prefix(own.tokens, info.prompt), usable)
        match = self._find(info)
        num_other = min(match.num_ready, usable)
        if min(match.num_coming, usable) >= max(num_own, num_other) + self.block_tokens:
            return Wait.SHARED_PREFIX
        if own is not None and 0 < num_own >= num_other:
            return self._take_over(own, info, num_own, is_eager)
        admitted, other = self._start_in_new_row(info, match.holder, num_other, is_eager, growth), match.holder
        if isinstance(admitted, Wait) and other is not None and other in self._displaceable(info, None, is_eager):
            return self._take_over(other, info, num_other, is_eager)
        return admitted

    def grow(self, sequence_id: str, num_tokens: int) -> int:
        """Give a running sequence space for ``num_tokens``, at the expense of what is retained.

        One that outgrows its projection is projected to need all that it can have.

        Returns:
            Tokens that it has space for now; 0 where there is no space, and nothing has changed.
        """
        holder = self._holder(sequence_id)
        needed = max(holder.num_blocks, self._blocks_for(num_tokens))
        more = needed - holder.num_blocks
        if more > self._free_blocks and not self._make_space(more, self._by_age(self._retained.values())):
            return 0
        self._reserve(holder, needed)
        if needed > holder.projected_blocks:
            self._project(holder, holder.max_blocks)
        return needed * self.block_tokens

    def mark_ready(self, sequence_id: str, num_tokens: int) -> None:
        """The first ``num_tokens`` of a running sequence's prompt are now computed and may be shared."""
        holder = self._holder(sequence_id)
        holder.num_ready = min(num_tokens, len(holder.tokens))

    def set_apart(self, sequence_id: str, version: int) -> None:
        """A running sequence goes on under ``version`` over KV of another: nobody may share it, now or later."""
        holder = self._holder(sequence_id)
        self._unindex(holder)
        holder.chain = ()
        holder.is_kept = False
        holder.version = version

    # --- ending -----------------------------------------------------------------------------------

    def retain(self, sequence_id: str, tokens: tuple[int, ...]) -> None:
        """A running sequence has ended; keep ``tokens``, all computed, for whoever continues them."""
        holder = self._holder(sequence_id)
        older = self._retained.get(holder.sequence_key)
        if older is not None:
            self._drop(older)
        if not holder.is_kept or not tokens:
            self._drop(holder)
            return
        del self._running[sequence_id]
        self._unindex(holder)
        holder.tokens, holder.num_ready = tokens, len(tokens)
        holder.chain = self.chain(tokens)
        holder.is_running = False
        self._reserve(holder, self._blocks_for(len(tokens)))
        self._project(holder, 0)
        self._touch(holder)
        self._retained[holder.sequence_key] = holder
        self._add_to_index(holder)

    def discard(self, sequence_id: str) -> None:
        """A running sequence has ended and nothing of it is worth keeping."""
        self._drop(self._holder(sequence_id))

    def release_attempt(self, attempt_id: str) -> None:
        """Drop what is retained for an attempt, and do not retain what still runs for it."""
        for holder in [held for held in self._by_row.values() if held.attempt_id == attempt_id]:
            if holder.is_running:
                holder.is_kept = False
            else:
                self._drop(holder)

    def drop_version(self, version: int) -> None:
        """Drop all that is retained for a version.

        Raises:
            EngineError: a sequence of this version is running.
        """
        holders = [held for held in self._by_row.values() if held.version == version]
        running = [held.sequence_id for held in holders if held.is_running]
        if running:
            raise EngineError(f"version {version} must have no running sequence, got {', '.join(sorted(running))}")
        for holder in holders:
            self._drop(holder)

    # --- placement --------------------------------------------------------------------------------

    def take_copies(self) -> list[Copy]:
        """Copies that must be made now, in order, before the next write to any row."""
        copies, self._copies = self._copies, []
        return copies

    def compact(self, max_moves: int, num_computed: Callable[[str], int]) -> None:
        """Move running sequences from the last rows into free rows before them, at most ``max_moves``.

        Batched attention reads neighbouring rows as one tensor, so few long runs are faster than many short ones.

        Args:
            max_moves: bound on the copying of one step.
            num_computed: tokens that a running sequence has in its row.
        """
        for _ in range(max_moves):
            if not self._free_rows or not self._running:
                return
            last = max(self._running.values(), key=lambda held: held.row)
            if last.row < self._free_rows[0]:
                return
            self._move(last, heapq.heappop(self._free_rows), num_computed(last.sequence_id))

    # --- private ----------------------------------------------------------------------------------

    def _holder(self, sequence_id: str) -> _Holder:
        holder = self._running.get(sequence_id)
        if holder is None:
            raise EngineError(f"sequence {sequence_id} must be running in the key-value cache, and is not")
        return holder

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_tokens)

    def _own_retained(self, info: SequenceInfo) -> _Holder | None:
        holder = self._retained.get(info.sequence_key)
        return holder if holder is not None and holder.version == info.version else None

    def _find(self, info: SequenceInfo) -> _Match:
        coming = 0
        for position in range(len(info.chain) - 1, -1, -1):
            num_tokens = (position + 1) * self.block_tokens
            for row in self._index.get((info.version, info.chain[position]), ()):
                holder = self._by_row[row]
                if holder.tokens[:num_tokens] != info.prompt[:num_tokens]:
                    continue
                if holder.num_ready >= num_tokens:
                    ready = holder.tokens[: holder.num_ready]
                    return _Match(holder, _common_prefix(ready, info.prompt), coming)
                coming = max(coming, num_tokens)
        return _Match(None, 0, coming)

    def _start_in_new_row(
        self, info: SequenceInfo, source: _Holder | None, num_cached: int, is_eager: bool, growth: Growth | None
    ) -> Admitted | Wait:
        needed, evictable = self._blocks_for(len(info.prompt)), self._displaceable(info, source, is_eager)
        if not self._fits(info, evictable, 0):
            return Wait.NO_SPACE
        if growth is not None and not is_eager:
            num_more = self._blocks_for(growth(self._members(info, evictable)))
            if not self._fits(info, evictable, num_more):
                return Wait.NO_SPACE
        if not self._make_space(needed, evictable, needs_row=True):
            return Wait.NO_SPACE
        row = heapq.heappop(self._free_rows)
        if source is not None:
            self._touch(source)
            self._copies.append(Copy(source.row, row, num_cached))
        self._occupy(row, info, num_cached, needed)
        return Admitted(num_cached)

    def _take_over(self, holder: _Holder, info: SequenceInfo, num_cached: int, is_eager: bool) -> Admitted | Wait:
        needed, evictable = self._blocks_for(len(info.prompt)), self._displaceable(info, holder, is_eager)
        held = holder.num_blocks
        if not self._fits(info, evictable, -held) or not self._make_space(needed - held, evictable):
            return Wait.NO_SPACE
        row = holder.row
        self._drop(holder)
        self._free_rows.remove(row)
        heapq.heapify(self._free_rows)
        self._occupy(row, info, num_cached, needed)
        return Admitted(num_cached)

    def _displaceable(self, info: SequenceInfo, kept: _Holder | None, is_eager: bool) -> list[_Holder]:
        """What may go for a new sequence, the first to go last."""
        others = (held for held in self._retained.values() if held is not kept)
        return self._by_age(held for held in others if is_eager or held.rank >= info.rank)

    def _by_age(self, holders: Iterable[_Holder]) -> list[_Holder]:
        """Oldest attempts first; within an attempt, what was used last comes first."""
        return sorted(holders, key=lambda held: (held.rank, -held.tick))

    def _fits(self, info: SequenceInfo, evictable: list[_Holder], spare_blocks: int) -> bool:
        """Whether a projection and ``spare_blocks`` fit beside those of the running and what stays retained."""
        retained = sum(held.num_blocks for held in self._retained.values())
        staying = retained - sum(held.num_blocks for held in evictable)
        wanted = self._blocks_for(info.projected_tokens) + spare_blocks
        return self._projected_blocks + staying + wanted <= self._num_blocks

    def _members(self, info: SequenceInfo, evictable: list[_Holder]) -> list[Member]:
        """All that stay, and a new one."""
        going = {held.row for held in evictable}
        staying = [held for row, held in self._by_row.items() if row not in going]
        sizes = [max(held.num_blocks, held.projected_blocks) * self.block_tokens for held in staying]
        members = [Member(held.turn, size) for held, size in zip(staying, sizes, strict=True)]
        return [*members, Member(info.turn, info.projected_tokens)]

    def _occupy(self, row: int, info: SequenceInfo, num_cached: int, num_blocks: int) -> None:
        holder = _Holder(
            row=row, sequence_id=info.sequence_id, sequence_key=info.sequence_key, attempt_id=info.attempt_id,
            version=info.version, tokens=info.prompt, chain=info.chain, num_ready=num_cached, num_blocks=0,
            projected_blocks=0, max_blocks=self._blocks_for(info.max_tokens), rank=info.rank, turn=info.turn,
            is_running=True, tick=0,
        )  # fmt: skip
        self._reserve(holder, num_blocks)
        self._project(holder, max(num_blocks, self._blocks_for(info.projected_tokens)))
        self._touch(holder)
        self._by_row[row] = holder
        self.placement += 1
        self._running[info.sequence_id] = holder
        self._add_to_index(holder)

    def _make_space(self, num_blocks: int, evictable: list[_Holder], needs_row: bool = False) -> bool:
        """Evict from the end of ``evictable`` until blocks and row are free; nothing where that cannot succeed."""
        if self._free_blocks + sum(held.num_blocks for held in evictable) < num_blocks:
            return False
        if needs_row and not self._free_rows and not evictable:
            return False
        while self._free_blocks < num_blocks or (needs_row and not self._free_rows):
            self._drop(evictable.pop())
        return True

    def _project(self, holder: _Holder, num_blocks: int) -> None:
        self._projected_blocks += num_blocks - holder.projected_blocks
        holder.projected_blocks = num_blocks

    def _reserve(self, holder: _Holder, num_blocks: int) -> None:
        self._free_blocks -= num_blocks - holder.num_blocks
        holder.num_blocks = num_blocks

    def _drop(self, holder: _Holder) -> None:
        self._unindex(holder)
        self._reserve(holder, 0)
        self._project(holder, 0)
        self.placement += 1
        del self._by_row[holder.row]
        heapq.heappush(self._free_rows, holder.row)
        if holder.is_running:
            del self._running[holder.sequence_id]
        else:
            del self._retained[holder.sequence_key]

    def _move(self, holder: _Holder, row: int, num_tokens: int) -> None:
        self._copies.append(Copy(holder.row, row, num_tokens))
        self.placement += 1
        self._unindex(holder)
        del self._by_row[holder.row]
        heapq.heappush(self._free_rows, holder.row)
        holder.row = row
        self._by_row[row] = holder
        self._add_to_index(holder)

    def _touch(self, holder: _Holder) -> None:
        self._tick += 1
        holder.tick = self._tick

    def _add_to_index(self, holder: _Holder) -> None:
        for link in holder.chain:
            self._index.setdefault((holder.version, link), {})[holder.row] = None

    def _unindex(self, holder: _Holder) -> None:
        for link in holder.chain:
            rows = self._index[(holder.version, link)]
            del rows[holder.row]
            if not rows:
                del self._index[(holder.version, link)]

    def check(self) -> Iterator[str]:
        """Broken invariants, in words; none in a sound table. For tests and ``doctor``."""
        used = sum(holder.num_blocks for holder in self._by_row.values())
        if used + self._free_blocks != self._num_blocks or self._free_blocks < 0:
            yield f"{used} used and {self._free_blocks} free blocks must add up to {self._num_blocks}"
        projected = sum(holder.projected_blocks for holder in self._running.values())
        if projected != self._projected_blocks:
            yield f"projections must add up to {self._projected_blocks} blocks, got {projected}"
        if any(holder.num_blocks > holder.projected_blocks for holder in self._running.values()):
            yield "a running sequence must hold no more than it is projected to need"
        if sorted([*self._free_rows, *self._by_row]) != list(range(self.num_rows)):
            yield "each row must be either free or held once"
        if len(self._running) + len(self._retained) != len(self._by_row):
            yield "each held row must belong to one running or retained sequence"
        indexed = sum(len(rows) for rows in self._index.values())
        if indexed != sum(len(set(holder.chain)) for holder in self._by_row.values()):
            yield "the prefix index must hold exactly the chains of the held rows"


def _common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """Number of equal leading tokens."""
    length = min(len(left), len(right))
    if left[:length] == right[:length]:
        return length
    return next(index for index in range(length) if left[index] != right[index])
