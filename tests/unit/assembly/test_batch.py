"""The step batch: fixed denominator, stable digest, nothing twice, nothing from the future."""

import pytest

from steelyard.assembly.batch import build_step_batch, decode_step_batch, encode_step_batch
from steelyard.digests import digest_bytes
from steelyard.errors import IntegrityError
from steelyard.testing.training_data import make_sample, random_samples, random_step_batch


def test_the_denominator_is_the_number_of_sampled_tokens_however_the_batch_is_cut() -> None:
    samples = random_samples(1, 10, vocab_size=20)
    sampled = sum(sum(sample.loss_mask) for sample in samples)
    for budget in (64, 256, 4096):
        assert build_step_batch(0, 0, samples, budget).loss_denominator == sampled


def test_bytes_and_digest_round_trip() -> None:
    batch = random_step_batch(2)
    data, digest = encode_step_batch(batch)
    assert decode_step_batch(data, digest) == batch
    assert encode_step_batch(random_step_batch(2)) == (data, digest)


def test_the_digest_depends_on_the_order_of_the_samples() -> None:
    samples = random_samples(1, 4, vocab_size=20)
    one = encode_step_batch(build_step_batch(0, 0, samples, 256))[1]
    other = encode_step_batch(build_step_batch(0, 0, samples[::-1], 256))[1]
    assert one != other


def test_changed_bytes_are_refused() -> None:
    data, digest = encode_step_batch(random_step_batch(2))
    with pytest.raises(IntegrityError, match=f"must have digest {digest}"):
        decode_step_batch(data[:-1] + bytes([data[-1] ^ 1]), digest)


def test_bytes_of_another_record_are_refused() -> None:
    with pytest.raises(IntegrityError, match="must be a StepBatch"):
        decode_step_batch(b"\xc0", digest_bytes(b"\xc0"))


def test_a_segment_that_comes_twice_is_refused() -> None:
    sample = make_sample([1, 2], [0, 1])
    with pytest.raises(IntegrityError, match=r"each segment once.*att_a"):
        build_step_batch(4, 0, [sample, sample], 100)


def test_tokens_newer_than_the_weights_are_refused() -> None:
    with pytest.raises(IntegrityError, match="step 4 at version 4 must not consume tokens of version 5"):
        build_step_batch(4, 4, [make_sample([1, 2], [0, 1], version=5)], 100)


def test_a_batch_without_a_sampled_token_is_refused() -> None:
    with pytest.raises(IntegrityError, match="at least one sampled token"):
        build_step_batch(0, 0, [make_sample([1, 2], [0, 0])], 100)
