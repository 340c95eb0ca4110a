"""The key-value cache's tensors, and the attention function that reads them.

A ``transformers`` decoder runs unmodified: its public attention hook calls :func:`cached_attention`, and the layout
of the batch (:class:`KVLayout`) travels with the model's keyword arguments. Tokens of all sequences lie flattened in
one row ``[1, num_tokens]``, single tokens first, so that linear layers see no padding.

Where what lies is decided in :mod:`steelyard.inference.kv_blocks`; callers name sequences only.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from steelyard.errors import EngineError
from steelyard.inference.kv_blocks import BlockTable
from steelyard.inference.kv_ranges import split_by_length

ATTENTION_NAME = "steelyard_cached"

# Queries are cut into pieces of this many tokens: each piece reads only the keys up to its end, which saves
# most of the masked half of the square without many calls.
_PIECE_TOKENS = 32

_UNSUPPORTED_OPTIONS = ("sliding_window", "softcap", "s_aux", "position_bias")


@dataclass(frozen=True)
class KVShape:
    """What one token's keys and values look like."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device


class Part(msgspec.Struct, frozen=True, gc=False):
    """Tokens of one sequence in one forward pass: ``num_tokens`` of them, the first at position ``start``."""

    sequence_id: str
    start: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class _Run:
    """Single tokens ``first..last`` of the batch, whose sequences lie in neighbouring rows from ``row`` on.

    ``mask`` is additive [num_rows, 1, 1, length], or None where all have the same length.
    """

    first: int
    last: int
    row: int
    length: int
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class _Piece:
    """Query tokens ``first..last`` of the batch, positions ``length - (last - first)`` to ``length`` of ``row``."""

    first: int
    last: int
    row: int
    length: int
    mask: Tensor


@dataclass(frozen=True, slots=True)
class _Strip:
    """Tokens ``first..last`` of the batch are written to ``row`` from position ``start`` on."""

    first: int
    last: int
    row: int
    start: int


@dataclass(frozen=True, slots=True)
class _Arrangement:
    """What stays the same from step to step while the same sequences run in the same rows.

    ``order``: which part comes first, second, ... in the flattened batch; the first ``num_single`` are single tokens,
    in ascending ``rows``. ``neighbours``: ranges of them in neighbouring rows. ``ends``: see :class:`KVLayout`.
    """

    sequence_ids: list[str]
    sizes: list[int]
    placement: int
    order: list[int]
    num_single: int
    rows: list[int]
    single_rows: Tensor
    neighbours: list[tuple[int, int]]
    ends: list[int]


@dataclass(frozen=True)
class KVLayout:
    """Where the tokens of one forward pass are read and written. Opaque but for the first three.

    ``order``: which part comes first, second, ... in the flattened batch. ``positions``: place of each token of the
    flattened batch in its sequence. ``ends``: index in the flattened batch of each part's last token.
    """

    order: list[int]
    positions: Tensor
    ends: list[int]
    cache: "KVCache"
    num_single: int
    single_rows: Tensor
    runs: list[_Run]
    strips: list[_Strip]
    pieces: list[_Piece]


class KVCache:
    """Keys and values, one pair of tensors [num_rows, num_kv_heads, row_tokens, head_dim] for each layer.

    Memory is taken from the system when it is first written, so that unused rows cost nothing.

    Args:
        blocks: who holds which row.
        shape: what one token's keys and values look like.
    """

    def __init__(self, blocks: BlockTable, shape: KVShape) -> None:
        self._blocks = blocks
        self.shape = shape
        dims = (blocks.num_rows, shape.num_kv_heads, blocks.row_tokens, shape.head_dim)
        self.keys = [_lazy_zeros(dims, shape.dtype, shape.device) for _ in range(shape.num_layers)]
        self.values = [_lazy_zeros(dims, shape.dtype, shape.device) for _ in range(shape.num_layers)]
        self._last: _Arrangement | None = None
        self._causal = _causal_table(_PIECE_TOKENS, blocks.row_tokens, shape)

    def lay_out(self, parts: Sequence[Part]) -> KVLayout:
        """Layout of one forward pass over ``parts``, each of another sequence; makes pending copies first.

        Raises:
            EngineError: a part's sequence holds no space.
        """
        self._make_copies()
        placed = self._arrange(parts)
        num_single = placed.num_single
        starts = np.array([part.start for part in parts])[placed.order]
        strips = list(_strips([parts[index] for index in placed.order[num_single:]], placed.rows, num_single))
        spans = [np.arange(strip.start, strip.start + strip.last - strip.first) for strip in strips]
        positions = np.concatenate((starts[:num_single], *spans)) if spans else starts
        return KVLayout(
            order=placed.order,
            positions=self._to_device(positions),
            ends=placed.ends,
            cache=self,
            num_single=num_single,
            single_rows=placed.single_rows,
            runs=self._runs(placed, starts[:num_single] + 1),
            strips=strips,
            pieces=[piece for strip in strips for piece in self._pieces(strip)],
        )

    def _arrange(self, parts: Sequence[Part]) -> _Arrangement:
        sequence_ids = [part.sequence_id for part in parts]
        sizes = [part.num_tokens for part in parts]
        last = self._last
        if (
            last is not None
            and last.placement == self._blocks.placement
            and last.sizes == sizes
            and last.sequence_ids == sequence_ids
        ):
            return last
        rows = self._blocks.rows_of(sequence_ids)
        single = sorted([index for index, size in enumerate(sizes) if size == 1], key=rows.__getitem__)
        order = single + [index for index, size in enumerate(sizes) if size > 1]
        ends = [0] * len(parts)
        end = -1
        for index in order:
            end += sizes[index]
            ends[index] = end
        single_rows = [rows[index] for index in single]
        self._last = _Arrangement(
            sequence_ids=sequence_ids,
            sizes=sizes,
            placement=self._blocks.placement,
            order=order,
            num_single=len(single),
            rows=[rows[index] for index in order],
            single_rows=self._to_device(np.array(single_rows, dtype=np.int64)),
            neighbours=list(_neighbours(single_rows)),
            ends=ends,
        )
        return self._last

    def _make_copies(self) -> None:
        for copy in self._blocks.take_copies():
            for tensor in (*self.keys, *self.values):
                tensor[copy.target_row, :, : copy.num_tokens] = tensor[copy.source_row, :, : copy.num_tokens]

    def _runs(self, placed: _Arrangement, lengths: npt.NDArray[np.int64]) -> list[_Run]:
        runs = []
        for first, last in placed.neighbours:
            for start, end in split_by_length(lengths[first:last]):
                part = lengths[first + start : first + end]
                longest = int(part.max())
                row = placed.rows[first + start]
                runs.append(_Run(first + start, first + end, row, longest, self._length_mask(part, longest)))
        return runs

    def _length_mask(self, lengths: npt.NDArray[np.int64], longest: int) -> Tensor | None:
        if int(lengths.min()) == longest:
            return None
        mask = np.where(np.arange(longest) < lengths[:, None], np.float32(0.0), np.float32(-np.inf))
        return self._to_device(mask).to(self.shape.dtype)[:, None, None]

    def _to_device(self, array: npt.NDArray[Any]) -> Tensor:
        tensor = torch.from_numpy(array)
        return tensor if self.shape.device.type == "cpu" else tensor.to(self.shape.device)

    def _pieces(self, strip: _Strip) -> Iterator[_Piece]:
        for first in range(strip.first, strip.last, _PIECE_TOKENS):
            last = min(first + _PIECE_TOKENS, strip.last)
            length = strip.start + last - strip.first
            before = length - (last - first)
            offset = self._blocks.row_tokens - before
            yield _Piece(first, last, strip.row, length, self._causal[: last - first, offset : offset + length])

    def write(self, layout: KVLayout, layer: int, keys: Tensor, values: Tensor) -> None:
        """Store the new tokens of a layer; ``keys`` and ``values`` are [num_kv_heads, num_tokens, head_dim]."""
        for target, source in ((self.keys[layer], keys), (self.values[layer], values)):
            if layout.num_single:
                singles = source[:, : layout.num_single].transpose(0, 1)
                target[layout.single_rows, :, layout.positions[: layout.num_single]] = singles
            for strip in layout.strips:
                end = strip.start + strip.last - strip.first
                target[strip.row, :, strip.start : end] = source[:, strip.first : strip.last]

    def attend(self, layout: KVLayout, layer: int, query: Tensor, scaling: float) -> Tensor:
        """Attention of ``query`` [num_heads, num_tokens, head_dim] over the cache: [num_tokens, num_heads, head_dim].

        Query heads that share a key head are handled as queries of one head: keys are read once for all of them.
        """
        num_heads, num_tokens, head_dim = query.shape
        keys, values = self.keys[layer], self.values[layer]
        num_kv_heads = keys.shape[1]
        by_token = query.transpose(0, 1)
        out = query.new_empty(num_tokens, num_heads, head_dim)
        for run in layout.runs:
            num_rows = run.last - run.first
            rows = slice(run.row, run.row + num_rows)
            grouped = by_token[run.first : run.last].reshape(num_rows, num_kv_heads, -1, head_dim)
            found = scaled_dot_product_attention(
                grouped, keys[rows, :, : run.length], values[rows, :, : run.length], attn_mask=run.mask, scale=scaling
            ).reshape(num_rows, num_heads, head_dim)
            if num_rows == num_tokens:
                return found
            out[run.first : run.last] = found
        for piece in layout.pieces:
            rows = slice(piece.row, piece.row + 1)
            found = scaled_dot_product_attention(
                query[None, :, piece.first : piece.last],
                keys[rows, :, : piece.length],
                values[rows, :, : piece.length],
                attn_mask=piece.mask,
                scale=scaling,
                enable_gqa=num_kv_heads != num_heads,
            )
            out[piece.first : piece.last] = found[0].transpose(0, 1)
        return out


def cached_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    kv_layout: KVLayout | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention hook of ``transformers``: writes the new keys and values, then attends over each sequence's own.

    Args:
        module: the attention layer; its ``layer_idx`` picks the tensors.
        query: [1, num_heads, num_tokens, head_dim]; ``key`` and ``value`` likewise with num_kv_heads.
        attention_mask: must be None; who sees what follows from ``kv_layout``.
        scaling: factor of the scores; 1 / sqrt(head_dim) where None.
        dropout: must be 0.
        kv_layout: from :meth:`KVCache.lay_out`.
        options: what else the layer passes; kinds of attention that this function does not compute are refused.

    Returns:
        [1, num_tokens, num_heads, head_dim], and no attention weights.

    Raises:
        EngineError: called without a layout, or for another kind of attention than full causal.
    """
    if kv_layout is None or attention_mask is not None or dropout != 0.0:
        raise EngineError("cached attention must get kv_layout, no attention_mask and no dropout")
    unsupported = [name for name in _UNSUPPORTED_OPTIONS if options.get(name) is not None]
    if unsupported:
        raise EngineError(f"the local engine computes full causal attention only, but got {', '.join(unsupported)}")
    layer = module.layer_idx
    if not isinstance(layer, int):
        raise EngineError(f"an attention layer's layer_idx must be an int, got {layer!r}")
    cache = kv_layout.cache
    cache.write(kv_layout, layer, key[0], value[0])
    scale = scaling if scaling is not None else 1.0 / math.sqrt(query.shape[-1])
    return cache.attend(kv_layout, layer, query[0], scale)[None], None


def _neighbours(rows: list[int]) -> Iterator[tuple[int, int]]:
    """Ranges ``(first, last)`` of ascending ``rows`` that follow one another without a gap."""
    first = 0
    for last in range(1, len(rows) + 1):
        if last == len(rows) or rows[last] != rows[last - 1] + 1:
            yield first, last
            first = last


def _strips(parts: list[Part], rows: list[int], first: int) -> Iterator[_Strip]:
    for part, row in zip(parts, rows[first:], strict=True):
        yield _Strip(first, first + part.num_tokens, row, part.start)
        first += part.num_tokens


def _causal_table(num_queries: int, row_tokens: int, shape: KVShape) -> Tensor:
    """Additive mask from which every piece's mask is a slice: 0 where ``column - row_tokens <= query``."""
    columns = torch.arange(row_tokens + num_queries, device=shape.device) - row_tokens
    queries = torch.arange(num_queries, device=shape.device)
    table = torch.zeros(num_queries, row_tokens + num_queries, dtype=shape.dtype, device=shape.device)
    return table.masked_fill_(columns[None, :] > queries[:, None], float("-inf"))


def _lazy_zeros(dims: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros, on a CPU without touching the memory. Masked positions must hold finite numbers, so not ``empty``."""
    if device.type != "cpu":
        return torch.zeros(dims, dtype=dtype, device=device)
    num_bytes = math.prod(dims) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(dtype).view(dims)
