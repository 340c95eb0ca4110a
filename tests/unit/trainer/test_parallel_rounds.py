"""Rounds of a core of several ranks: every row once, gaps only where rows are fewer than ranks."""

from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.testing.training_data import random_step_batch
from steelyard.trainer.parallel_rounds import core_rounds
from steelyard.trainer.units import read_arrays


@settings(max_examples=60)
@given(
    seed=st.integers(0, 1000), num_samples=st.integers(1, 30), budget=st.integers(64, 800), num_ranks=st.integers(1, 5)
)
def test_every_row_is_in_one_place_and_every_round_has_a_place_for_each_rank(
    seed: int, num_samples: int, budget: int, num_ranks: int
) -> None:
    micro_batches = random_step_batch(seed, num_samples=num_samples, micro_batch_tokens=budget).micro_batches
    rounds = core_rounds(micro_batches, num_ranks)
    assert all(len(by_rank) == num_ranks for by_rank in rounds)
    names = [name for by_rank in rounds for one in by_rank if one is not None for name in one.attempt_ids]
    assert names == [name for micro_batch in micro_batches for name in micro_batch.attempt_ids]
    tokens = sum(int(read_arrays(one).num_tokens.sum()) for by_rank in rounds for one in by_rank if one is not None)
    assert tokens == sum(int(read_arrays(micro_batch).num_tokens.sum()) for micro_batch in micro_batches)
    for by_rank in rounds:
        num_rows = sum(one.num_rows for one in by_rank if one is not None)
        assert by_rank.count(None) == max(0, num_ranks - num_rows)


def test_one_rank_computes_the_unit_as_it_is() -> None:
    micro_batches = random_step_batch(1, num_samples=20).micro_batches
    assert core_rounds(micro_batches, 1) == tuple((micro_batch,) for micro_batch in micro_batches)
