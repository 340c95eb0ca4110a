"""How rows of different lengths are read together. No tensors: the simulator counts by the same rule."""

import numpy as np
import numpy.typing as npt

RANGE_TOKENS = 1024
"""Reading this many more tokens of one layer takes about as long as one more attention call."""


def split_by_length(lengths: npt.NDArray[np.int64], range_tokens: int = RANGE_TOKENS) -> list[tuple[int, int]]:
    """Cut neighbouring rows into ranges ``(start, end)`` wherever that saves more reading than a call costs.

    A range is read up to its longest row, so that a few long rows among short ones are expensive. Each range is cut
    in two at the best place, again and again, while a cut saves more than ``range_tokens`` tokens of reading.
    """
    open_ranges = [(0, len(lengths))]
    done = []
    while open_ranges:
        start, end = open_ranges.pop()
        part = lengths[start:end]
        if len(part) * int(part.max() - part.min()) > range_tokens:
            sizes = np.arange(1, len(part))
            left = np.maximum.accumulate(part)[:-1] * sizes
            right = np.maximum.accumulate(part[::-1])[::-1][1:] * sizes[::-1]
            cut = int((left + right).argmin())
            if len(part) * int(part.max()) - int(left[cut] + right[cut]) > range_tokens:
                open_ranges += [(start + cut + 1, end), (start, start + cut + 1)]
                continue
        done.append((start, end))
    return done
