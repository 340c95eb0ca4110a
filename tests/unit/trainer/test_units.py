"""Lease units: every row once, in order, never split, cut by the batch alone."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.assembly.batch import build_step_batch
from steelyard.testing.training_data import make_sample, random_samples, random_step_batch
from steelyard.trainer.units import MAX_UNITS, MIN_UNITS, StepUnits, cut_units, read_arrays, unit_seed
from steelyard.types import MicroBatch, StepBatch


def rows(micro_batches: tuple[MicroBatch, ...]) -> list[tuple[str, bytes, bytes, float]]:
    found = []
    for micro_batch in micro_batches:
        a = read_arrays(micro_batch)
        for index, name in enumerate(micro_batch.attempt_ids):
            length = int(a.num_tokens[index])
            mask = a.loss_mask[index, :length]
            found.append((name, a.token_ids[index, :length].tobytes(), mask.tobytes(), float(a.advantages[index])))
    return found


def units_of(batch: StepBatch, *, skip: bool = True, seed: int = 0) -> StepUnits:
    return cut_units(batch, skip_zero_advantage=skip, seed=seed)


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10_000),
    num_samples=st.integers(1, 60),
    budget=st.integers(64, 1500),
    silent_every=st.integers(1, 5),
)
def test_units_hold_every_row_that_counts_once_and_in_order(
    seed: int, num_samples: int, budget: int, silent_every: int
) -> None:
    samples = [
        make_sample(s.token_ids, s.loss_mask, attempt_id=s.attempt_id, advantage=s.advantage if i % silent_every else 0)
        for i, s in enumerate(random_samples(seed, num_samples, vocab_size=64))
    ]
    batch = build_step_batch(0, 0, samples, budget)
    step = units_of(batch)
    wanted = [row for row in rows(batch.micro_batches) if row[3] != 0.0]
    assert [row for unit in step.units for row in rows(unit.micro_batches)] == wanted
    assert [unit.index for unit in step.units] == list(range(len(step.units)))
    assert all(unit.micro_batches for unit in step.units) and len(step.units) <= MAX_UNITS
    assert step.num_rows == num_samples and step.num_skipped_rows == num_samples - len(wanted)
    for unit in step.units:
        for micro_batch in unit.micro_batches:
            assert micro_batch.num_rows * micro_batch.num_columns <= budget
            assert micro_batch.num_columns == read_arrays(micro_batch).num_tokens.max()
    assert units_of(batch) == step


@settings(max_examples=40)
@given(seed=st.integers(0, 10_000), num_samples=st.integers(24, 200), budget=st.integers(64, 4000))
def test_a_batch_with_rows_enough_makes_8_to_32_units_of_like_work(seed: int, num_samples: int, budget: int) -> None:
    step = units_of(random_step_batch(seed, num_samples=num_samples, micro_batch_tokens=budget))
    assert MIN_UNITS <= len(step.units) <= MAX_UNITS
    work = [sum(m.num_rows * m.num_columns for m in unit.micro_batches) for unit in step.units]
    # A row is at most 64 tokens, and a border may move by a quarter of a unit at either end.
    assert max(work) <= 1.5 * np.mean(work) + 2 * 64


def test_many_micro_batches_are_not_cut_through() -> None:
    batch = random_step_batch(1, num_samples=200, micro_batch_tokens=80)
    assert len(batch.micro_batches) > 3 * MIN_UNITS
    step = units_of(batch)
    assert [m for unit in step.units for m in unit.micro_batches] == list(batch.micro_batches)


def test_every_unit_of_every_step_has_a_seed_of_its_own() -> None:
    seeds = {unit_seed(run, step, index) for run in range(3) for step in range(10) for index in range(32)}
    assert len(seeds) == 3 * 10 * 32 and all(0 <= seed < 2**63 for seed in seeds)
    batch = random_step_batch(1, step=3, parent_version=3)
    assert [u.seed for u in units_of(batch, seed=7).units][:2] == [unit_seed(7, 3, 0), unit_seed(7, 3, 1)]


def test_a_batch_without_signal_has_no_unit() -> None:
    step = units_of(build_step_batch(0, 0, [make_sample([1, 2, 3], [0, 1, 1], advantage=0.0)], 64))
    assert step.units == () and (step.num_loss_tokens, step.num_skipped_rows, step.num_skipped_tokens) == (2, 1, 3)
