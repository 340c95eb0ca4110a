"""A unit's micro-batches in rounds: one for each rank of the core, so that collectives match. Imports no torch."""

from collections.abc import Sequence

from steelyard.trainer.units import cut_rows
from steelyard.types import MicroBatch

Round = tuple[MicroBatch | None, ...]
"""By rank; None is a gap, which the rank fills with a dummy of weight 0."""


def core_rounds(micro_batches: Sequence[MicroBatch], num_ranks: int) -> tuple[Round, ...]:
    """Whole micro-batches as long as there is one for each rank; the rest is cut by rows over all ranks.

    Every row is in one place, in order by round and rank. Only the last rounds can have gaps, where a micro-batch has
    fewer rows than there are ranks. What comes out depends on the unit and the number of ranks alone.
    """
    num_whole = len(micro_batches) // num_ranks * num_ranks
    rounds: list[Round] = [tuple(micro_batches[i : i + num_ranks]) for i in range(0, num_whole, num_ranks)]
    for micro_batch in micro_batches[num_whole:]:
        ends = [micro_batch.num_rows * (rank + 1) // num_ranks for rank in range(num_ranks)]
        starts = [0, *ends[:-1]]
        rounds.append(
            tuple(
                cut_rows(micro_batch, start, stop) if start < stop else None
                for start, stop in zip(starts, ends, strict=True)
            )
        )
    return tuple(rounds)
