"""The probe: small, fixed, and honest about what it can tell apart."""

import pytest
import torch

from steelyard.testing.tiny_model import tiny_module
from steelyard.types import Probe
from steelyard.weights.probe import MAX_PROBE_TOKENS, max_error, probe_logprobs, probe_sequences, separates


def test_sequences_are_the_same_for_every_version_and_within_the_limit() -> None:
    sequences = probe_sequences(512)
    assert sequences == probe_sequences(512)
    assert sequences != probe_sequences(512, seed=1)
    assert sum(map(len, sequences)) <= MAX_PROBE_TOKENS
    assert all(0 <= token < 512 for sequence in sequences for token in sequence)


def test_log_probabilities_are_those_of_each_next_token() -> None:
    module = tiny_module(vocab_size=64)
    sequences = ((1, 2, 3), (4, 5, 6))
    (first, second) = probe_logprobs(module, sequences)
    with torch.no_grad():
        alone = module(input_ids=torch.tensor([[4, 5, 6]])).logits[0].log_softmax(-1)
    assert len(first) == 2
    assert second == pytest.approx((float(alone[0, 5]), float(alone[1, 6])), abs=1e-5)


def test_a_parent_separates_only_beyond_twice_the_tolerance() -> None:
    parent = Probe(sequences=((1, 2),), logprobs=((-1.0,),), separates_parent=False)
    assert separates(parent, ((-1.0025,),), 1e-3)
    assert not separates(parent, ((-1.0015,),), 1e-3)
    assert not separates(None, ((-9.0,),), 1e-3)
    assert max_error(((-1.0, -2.0),), ((-1.5, -2.1),)) == 0.5
