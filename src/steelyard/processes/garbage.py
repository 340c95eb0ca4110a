"""Garbage collection in a process with a large heap that lives long, such as a coordinator's state."""

import gc

_YOUNG_OBJECTS = 5_000
_YOUNG_PER_MIDDLE = 10
_MIDDLE_PER_FULL = 1_000


def collect_rarely() -> None:
    """From now on search the whole heap hardly ever; for processes whose answers must not wait for that.

    A full search takes time in proportion to all that is alive: some tenths of a second at 100,000 live rollouts, and
    by default one comes whenever the heap has grown by a quarter. What is alive now is never searched again. What is
    dropped is freed at once nevertheless, unless it refers to itself in a circle. Call it once the process has read in
    what it starts with.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS, _YOUNG_PER_MIDDLE, _MIDDLE_PER_FULL)
