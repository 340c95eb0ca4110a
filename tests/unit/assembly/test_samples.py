"""Traces into samples: what is trained is what was sampled, token for token."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.assembly.samples import count_sampled_tokens, trace_samples
from steelyard.errors import IntegrityError
from steelyard.testing.training_data import make_trace, make_turn
from steelyard.types import Turn


def test_two_turns_of_one_segment_become_one_sample_with_both_stretches_in_the_loss() -> None:
    first = make_turn([1, 2], [3, 4], spans=((0, 5),))
    second = make_turn([1, 2, 3, 4, 9], [6], turn_index=1, spans=((0, 6),))
    (sample,) = trace_samples(make_trace([first, second]), 0.25)
    assert sample.token_ids == (1, 2, 3, 4, 9, 6)
    assert sample.loss_mask == (0, 0, 1, 1, 0, 1)
    assert sample.logprobs == (0.0, 0.0, -0.5, -1.0, 0.0, -0.5)
    assert sample.versions == (-1, -1, 5, 5, -1, 6)
    assert sample.advantage == 0.25


def test_a_new_segment_is_a_sample_of_its_own() -> None:
    first = make_turn([1, 2], [3], turn_index=0)
    second = make_turn([1, 7], [8], turn_index=1, segment_index=1)
    one, two = trace_samples(make_trace([first, second]), 1.0)
    assert (one.segment_index, one.token_ids) == (0, (1, 2, 3))
    assert (two.segment_index, two.token_ids) == (1, (1, 7, 8))


def test_interleaved_segments_are_joined_by_their_index() -> None:
    turns = [
        make_turn([1], [2], turn_index=0, segment_index=0),
        make_turn([5], [6], turn_index=1, segment_index=1),
        make_turn([1, 2, 3], [4], turn_index=2, segment_index=0),
    ]
    one, two = trace_samples(make_trace(turns), 1.0)
    assert one.token_ids == (1, 2, 3, 4)
    assert two.token_ids == (5, 6)


def test_version_spans_inside_a_turn_give_each_token_its_version() -> None:
    (sample,) = trace_samples(make_trace([make_turn([1], [2, 3, 4], spans=((0, 4), (2, 6)))]), 1.0)
    assert sample.versions == (-1, 4, 4, 6)


def test_a_prompt_that_does_not_extend_the_turn_before_it_is_refused() -> None:
    turns = [make_turn([1, 2], [3]), make_turn([1, 2, 4, 5], [6], turn_index=1)]
    with pytest.raises(IntegrityError, match=r"turn 1 of att_a.*must extend the 3 tokens.*only 2 agree"):
        trace_samples(make_trace(turns), 1.0)


def test_a_prompt_shorter_than_the_turn_before_it_is_refused() -> None:
    turns = [make_turn([1, 2], [3]), make_turn([1, 2], [6], turn_index=1)]
    with pytest.raises(IntegrityError, match="only 2 agree"):
        trace_samples(make_trace(turns), 1.0)


def test_a_segment_in_which_nothing_was_sampled_gives_no_sample() -> None:
    assert trace_samples(make_trace([make_turn([1, 2], [], spans=())]), 1.0) == ()


def test_an_unsampled_last_turn_still_gives_the_earlier_tokens() -> None:
    turns = [make_turn([1], [2]), make_turn([1, 2, 3], [], turn_index=1, spans=())]
    (sample,) = trace_samples(make_trace(turns), 1.0)
    assert sample.token_ids == (1, 2, 3)
    assert sample.loss_mask == (0, 1, 0)


BROKEN_TURNS = {
    "another attempt": (make_turn([1], [2], attempt_id="att_b"), "must belong to it, got att_b"),
    "no prompt": (make_turn([], [2]), "prompt_token_ids must not be empty"),
    "a missing log-probability": (make_turn([1], [2, 3], logprobs=[-1.0]), "logprobs must have length 2, got 1"),
    "a NaN": (make_turn([1], [2], logprobs=[math.nan]), "finite and at most 0, got nan"),
    "a positive one": (make_turn([1], [2], logprobs=[0.5]), "at most 0, got 0.5"),
    "greedy": (make_turn([1], [2], temperature=0.0), "temperature must be above 0"),
    "no spans": (make_turn([1], [2], spans=()), "version_spans must start at 0"),
    "a late first span": (make_turn([1], [2, 3], spans=((1, 0),)), "version_spans must start at 0"),
    "a span behind the end": (make_turn([1], [2], spans=((0, 0), (1, 1))), "grow below 1"),
    "a double span": (make_turn([1], [2, 3], spans=((0, 0), (0, 1))), "grow below 2"),
    "a negative version": (make_turn([1], [2], spans=((0, -1),)), "from 0 on, got -1"),
}


@pytest.mark.parametrize("name", BROKEN_TURNS)
def test_a_broken_turn_is_refused_and_the_error_names_it(name: str) -> None:
    turn, message = BROKEN_TURNS[name]
    with pytest.raises(IntegrityError, match=message):
        trace_samples(make_trace([turn]), 1.0)


def test_turns_out_of_order_are_refused() -> None:
    turns = [make_turn([1], [2], turn_index=1), make_turn([1, 2, 3], [4], turn_index=1)]
    with pytest.raises(IntegrityError, match="turn_index of att_a must grow, got 1 after 1"):
        trace_samples(make_trace(turns), 1.0)


def test_two_temperatures_in_one_segment_are_refused() -> None:
    turns = [make_turn([1], [2], temperature=0.5), make_turn([1, 2], [3], turn_index=1, temperature=1.0)]
    with pytest.raises(IntegrityError, match=r"one temperature, got 1\.0 after 0\.5"):
        trace_samples(make_trace(turns), 1.0)


def test_an_advantage_that_is_not_finite_is_refused() -> None:
    with pytest.raises(IntegrityError, match="advantage of attempt att_a must be finite"):
        trace_samples(make_trace([make_turn([1], [2])]), math.inf)


@given(st.integers(0, 2**32), st.integers(1, 8))
def test_every_sampled_token_is_in_the_loss_exactly_once(seed: int, num_turns: int) -> None:
    rng = random.Random(seed)
    turns = _random_turns(rng, num_turns)
    samples = trace_samples(make_trace(turns), 1.0)
    assert count_sampled_tokens(samples) == sum(len(turn.token_ids) for turn in turns)
    for sample in samples:
        sampled = [t for t, bit in zip(sample.token_ids, sample.loss_mask, strict=True) if bit]
        generated = [t for turn in turns if turn.segment_index == sample.segment_index for t in turn.token_ids]
        assert sampled == generated


def _random_turns(rng: random.Random, num_turns: int) -> list[Turn]:
    """Turns that extend the one before, or start a new segment one time in three."""
    turns: list[Turn] = []
    recorded: list[int] = []
    segment_index = 0
    for turn_index in range(num_turns):
        if turns and rng.random() < 1 / 3:
            segment_index += 1
            recorded = []
        prompt = recorded + [rng.randrange(100) for _ in range(rng.randint(1, 4))]
        generated = [rng.randrange(100) for _ in range(rng.randint(1, 4))]
        turns.append(make_turn(prompt, generated, turn_index=turn_index, segment_index=segment_index))
        recorded = prompt + generated
    return turns
