"""A process with a large heap searches it hardly ever."""

import gc

from steelyard.processes.garbage import collect_rarely


def test_what_is_alive_is_never_searched_again_and_the_whole_heap_hardly_ever() -> None:
    thresholds, kept = gc.get_threshold(), [[number] for number in range(1000)]
    try:
        collect_rarely()
        assert gc.get_freeze_count() >= len(kept)
        young, middle, full = gc.get_threshold()
        assert young * middle * full >= 10_000_000
        known = {id(thing) for thing in gc.get_objects()}
        assert not any(id(thing) in known for thing in kept)
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)
