"""Named tensors as slices: how weights reach a worker, and gradient sums their owner. Imports no torch.

A slice is a range of elements of one tensor, counted in its flattened form. An owner that holds only a shard of a
parameter asks for the slices of its shard alone.
"""

from collections.abc import Iterator, Mapping

from steelyard.types import Record


class Slice(Record, frozen=True, kw_only=True):
    """Elements ``[start, stop)`` of the flattened tensor ``name``."""

    name: str
    start: int
    stop: int


def plan_chunks(num_elements: Mapping[str, int], element_bytes: int, chunk_bytes: int) -> Iterator[tuple[Slice, ...]]:
    """Groups of slices of at most ``chunk_bytes`` together that cover every tensor once, in the mapping's order."""
    room = most = max(1, chunk_bytes // element_bytes)
    chunk: list[Slice] = []
    for name, total in num_elements.items():
        start = 0
        while start < total:
            stop = min(total, start + room)
            chunk.append(Slice(name=name, start=start, stop=stop))
            room -= stop - start
            start = stop
            if not room:
                yield tuple(chunk)
                chunk, room = [], most
    if chunk:
        yield tuple(chunk)
