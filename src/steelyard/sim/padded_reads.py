"""How much KV an engine reads that reads sequences of different lengths together (``EngineLimits.range_tokens``)."""

from collections.abc import Sequence

import numpy as np

from steelyard.inference.kv_ranges import split_by_length


def padded_tokens(lengths: Sequence[int], num_kept: int, range_tokens: int) -> int:
    """Tokens that a step reads, with what each range beyond the first costs in tokens of reading.

    Rows are not simulated. What is kept between two turns lies anywhere among those that run: of ``n`` rows in random
    order with ``k`` kept ones, the ``n`` form ``n (k + 1) / (n + k)`` stretches without a gap on average (Wald and
    Wolfowitz, On a test whether two samples are from the same population, 1940).

    Args:
        lengths: tokens of each running sequence, in the order of their rows.
        num_kept: sequences that hold rows and do not run.
    """
    num = len(lengths)
    if not num:
        return 0
    num_stretches = max(1, min(num, round(num * (num_kept + 1) / (num + num_kept))))
    read = num_ranges = 0
    for stretch in np.array_split(np.asarray(lengths, dtype=np.int64), num_stretches):
        ranges = split_by_length(stretch, range_tokens)
        read += sum((end - start) * int(stretch[start:end].max()) for start, end in ranges)
        num_ranges += len(ranges)
    return read + (num_ranges - 1) * range_tokens


def place(order: int) -> int:
    """Where the ``order``-th sequence lies: rows are taken as they become free, so neighbours are of any age.

    Multiplicative hashing (Knuth, The Art of Computer Programming, volume 3, section 6.4): spread, and always the same.
    """
    return order * 2_654_435_761 & 0xFFFF_FFFF
