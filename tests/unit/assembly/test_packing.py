"""Packing: nothing lost, nothing doubled, budget kept, padding as small as can be."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.assembly.packing import MICRO_BATCH_PRICE_TOKENS, cut_rows, pack
from steelyard.errors import ConfigError, IntegrityError
from steelyard.testing.training_data import make_sample, random_samples
from steelyard.types import MicroBatch, TrainingSample

lengths_lists = st.lists(st.integers(1, 300), min_size=1, max_size=40).map(lambda v: sorted(v, reverse=True))


def _rows(micro_batch: MicroBatch) -> list[tuple[str, tuple[int, ...], tuple[int, ...], tuple[float, ...], float]]:
    """The real tokens of each row, read back from the bytes."""
    shape = (micro_batch.num_rows, micro_batch.num_columns)
    token_ids = np.frombuffer(micro_batch.token_ids, dtype="<i4").reshape(shape)
    loss_mask = np.frombuffer(micro_batch.loss_mask, dtype=np.uint8).reshape(shape)
    logprobs = np.frombuffer(micro_batch.logprobs, dtype="<f4").reshape(shape)
    advantages = np.frombuffer(micro_batch.advantages, dtype="<f4")
    num_tokens = np.frombuffer(micro_batch.num_tokens, dtype="<i4")
    rows = []
    for row in range(micro_batch.num_rows):
        stop = int(num_tokens[row])
        assert not token_ids[row, stop:].any()
        assert not loss_mask[row, stop:].any()
        rows.append(
            (
                micro_batch.attempt_ids[row],
                tuple(token_ids[row, :stop].tolist()),
                tuple(loss_mask[row, :stop].tolist()),
                tuple(logprobs[row, :stop].tolist()),
                float(advantages[row]),
            )
        )
    return rows


def _expected(sample: TrainingSample) -> tuple[str, tuple[int, ...], tuple[int, ...], tuple[float, ...], float]:
    logprobs = tuple(np.array(sample.logprobs, dtype=np.float32).tolist())
    return (sample.attempt_id, sample.token_ids, sample.loss_mask, logprobs, float(np.float32(sample.advantage)))


@given(st.integers(0, 1000), st.integers(1, 30), st.integers(64, 512))
def test_every_sample_is_in_exactly_one_row_with_all_its_tokens(seed: int, num_samples: int, budget: int) -> None:
    samples = random_samples(seed, num_samples, vocab_size=50)
    packed = pack(samples, budget)
    rows = [row for micro_batch in packed for row in _rows(micro_batch)]
    assert sorted(rows) == sorted(_expected(sample) for sample in samples)
    assert all(m.num_rows * m.num_columns <= budget for m in packed)


def test_the_same_samples_give_the_same_bytes() -> None:
    samples = random_samples(3, 20, vocab_size=50)
    assert pack(samples, 256) == pack(samples, 256)


def test_rows_of_similar_length_share_a_micro_batch() -> None:
    samples = [
        make_sample([1] * n, [0] * (n - 1) + [1], attempt_id=f"att_{i}") for i, n in enumerate([10, 500, 9, 490])
    ]
    packed = pack(samples, 1024)
    assert [m.attempt_ids for m in packed] == [("att_1", "att_3"), ("att_0", "att_2")]


def test_samples_without_signal_share_no_micro_batch_with_others() -> None:
    samples = [
        make_sample([1, 2, 3], [0, 1, 1], attempt_id=f"att_{i}", advantage=advantage)
        for i, advantage in enumerate([0.0, 1.0, -0.0, -1.0])
    ]
    assert [m.attempt_ids for m in pack(samples, 100)] == [("att_1", "att_3"), ("att_0", "att_2")]


@given(lengths_lists, st.integers(300, 1000))
def test_cuts_cover_all_rows_in_order(lengths: list[int], budget: int) -> None:
    runs = cut_rows(lengths, budget)
    assert list(itertools.chain.from_iterable(range(a, b) for a, b in runs)) == list(range(len(lengths)))
    assert all(0 < (b - a) * lengths[a] <= budget for a, b in runs)


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=8).map(lambda v: sorted(v, reverse=True)), st.integers(60, 200)
)
def test_no_other_cut_costs_less(lengths: list[int], budget: int) -> None:
    def cost(edges: tuple[int, ...]) -> float:
        runs = list(itertools.pairwise(edges))
        if any((b - a) * lengths[a] > budget for a, b in runs):
            return float("inf")
        return sum((b - a) * lengths[a] + MICRO_BATCH_PRICE_TOKENS for a, b in runs)

    inner = range(1, len(lengths))
    everything = (
        (0, *edges, len(lengths)) for count in range(len(lengths)) for edges in itertools.combinations(inner, count)
    )
    runs = cut_rows(lengths, budget)
    assert cost((0, *(b for _, b in runs))) == min(map(cost, everything))


def test_no_samples_give_no_micro_batches() -> None:
    assert pack([], 100) == ()


def test_a_sample_longer_than_the_budget_names_the_configuration_field() -> None:
    with pytest.raises(ConfigError, match=r"train\.micro_batch_tokens: must be at least the longest sample, 101"):
        pack([make_sample([1] * 101, [1] * 101)], 100)


def test_a_sample_whose_sequences_differ_in_length_is_refused() -> None:
    with pytest.raises(IntegrityError, match="must have one length, got 3, 2, 2 and 2"):
        pack([make_sample([1, 2, 3], [0, 1])], 100)


def test_an_empty_sample_is_refused() -> None:
    with pytest.raises(IntegrityError, match="token_ids must not be empty"):
        pack([make_sample([], [])], 100)
