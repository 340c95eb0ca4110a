"""The task stream: every pass visits each task once, and the position is the whole cursor."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.errors import InputError
from steelyard.tasks.sampler import ShuffledStream


def stream(num_tasks: int, seed: int = 0, num_epochs: int | None = None) -> ShuffledStream:
    return ShuffledStream(num_tasks, seed, "task-{}".format, num_epochs=num_epochs)


def indices(source: ShuffledStream, start: int, stop: int) -> list[int]:
    found = [source.at(position) for position in range(start, stop)]
    return [task.task_index for task in found if task is not None]


@given(num_tasks=st.integers(1, 300), seed=st.integers(0, 2**32), epoch=st.integers(0, 5))
def test_every_pass_visits_each_task_exactly_once(num_tasks: int, seed: int, epoch: int) -> None:
    found = indices(stream(num_tasks, seed), epoch * num_tasks, (epoch + 1) * num_tasks)
    assert sorted(found) == list(range(num_tasks))


@given(num_tasks=st.integers(1, 50), cut=st.integers(0, 120))
def test_a_new_stream_goes_on_at_any_position_as_the_old_one_would(num_tasks: int, cut: int) -> None:
    whole = indices(stream(num_tasks), 0, 120)
    assert indices(stream(num_tasks), 0, cut) + indices(stream(num_tasks), cut, 120) == whole


def test_passes_and_seeds_have_different_orders() -> None:
    first, second = indices(stream(100), 0, 100), indices(stream(100), 100, 200)
    assert first != second
    assert first != indices(stream(100, seed=1), 0, 100)
    assert first != list(range(100))


def test_order_has_no_visible_bias_in_the_first_place() -> None:
    counts = [0] * 10
    for seed in range(1000):
        task = stream(10, seed).at(0)
        assert task is not None
        counts[task.task_index] += 1
    assert min(counts) > 60 and max(counts) < 140


def test_a_task_ref_says_where_it_stands() -> None:
    task = stream(7).at(9)
    assert task is not None
    assert (task.position, task.epoch, task.task_id) == (9, 1, f"task-{task.task_index}")


def test_a_stream_of_two_passes_ends_after_them() -> None:
    source = stream(3, num_epochs=2)
    assert source.at(5) is not None
    assert source.at(6) is None


def test_a_million_tasks_cost_nothing_to_open() -> None:
    task = stream(1_000_000).at(123_456_789)
    assert task is not None and 0 <= task.task_index < 1_000_000


@pytest.mark.parametrize(("num_tasks", "num_epochs"), [(0, None), (-1, None), (3, 0)])
def test_counts_that_are_not_positive_are_refused(num_tasks: int, num_epochs: int | None) -> None:
    with pytest.raises(InputError, match="must be at least 1"):
        stream(num_tasks, num_epochs=num_epochs)


def test_a_negative_position_is_refused() -> None:
    with pytest.raises(InputError, match="position"):
        stream(3).at(-1)
