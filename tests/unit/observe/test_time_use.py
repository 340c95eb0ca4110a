"""Where the time goes, and that the bottleneck is named from it."""

import msgspec
import pytest

from steelyard.observe.rows import StepRow
from steelyard.observe.time_use import PARTS, mean_busy_frac, name_bottleneck, part_s, time_use
from steelyard.testing.metrics_rows import make_engine, make_step


def timed(**parts_s: float) -> StepRow:
    """A step of 10 s whose named parts take that long and whose others take nothing."""
    values = {"wait_s": 0.0, "assemble_s": 0.0, "train_s": 0.0, "publish_s": 0.0, "load_s": 0.0, "checkpoint_s": 0.0}
    return msgspec.structs.replace(make_step(), **{**values, **parts_s}, wall_s=10.0)


def test_the_time_of_a_step_is_split_into_its_parts_and_a_rest() -> None:
    use = time_use([timed(wait_s=6, train_s=2, publish_s=1), timed(wait_s=2, train_s=4, load_s=1)])
    assert use is not None
    assert use.wall_s == 10
    assert use.parts_s == {"wait": 4, "assemble": 0, "train": 3, "publish": 0.5, "load": 0.5, "checkpoint": 0}
    assert use.other_s == pytest.approx(2)
    assert use.frac("wait") == pytest.approx(0.4)


def test_parts_that_overlap_leave_no_negative_rest() -> None:
    use = time_use([timed(wait_s=8, train_s=8)])
    assert use is not None and use.other_s == 0


def test_no_steps_have_no_time_use() -> None:
    assert time_use([]) is None
    assert mean_busy_frac([]) is None


def test_every_part_is_a_field_of_the_step() -> None:
    step = make_step()
    assert [part_s(step, part) for part in PARTS] == [msgspec.structs.asdict(step)[f"{part}_s"] for part in PARTS]


@pytest.mark.parametrize(
    ("parts_s", "busy_frac", "is_synchronous", "name"),
    [
        ({"wait_s": 7, "train_s": 2}, None, False, "rollouts"),
        ({"wait_s": 7, "train_s": 2}, 0.95, False, "rollouts"),
        ({"wait_s": 7, "train_s": 2}, 0.3, False, "tools or scoring"),
        ({"wait_s": 6, "train_s": 3}, 0.55, True, "rollouts"),
        ({"wait_s": 6, "train_s": 3}, 0.2, True, "tools or scoring"),
        ({"wait_s": 2, "train_s": 6, "assemble_s": 1}, 0.95, False, "training"),
        ({"wait_s": 2, "train_s": 2, "publish_s": 2, "load_s": 2}, 0.95, False, "publication"),
    ],
)
def test_the_bottleneck_is_the_busiest_stage(
    parts_s: dict[str, float], busy_frac: float | None, is_synchronous: bool, name: str
) -> None:
    use = time_use([timed(**parts_s)])
    assert use is not None
    assert name_bottleneck(use, busy_frac, is_synchronous).name == name


def test_the_busy_share_is_the_mean_over_replicas() -> None:
    engines = [msgspec.structs.replace(make_engine(name), busy_frac=frac) for name, frac in (("a", 0.2), ("b", 0.6))]
    assert mean_busy_frac(engines) == pytest.approx(0.4)
