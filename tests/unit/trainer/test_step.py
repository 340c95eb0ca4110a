"""Gradients of a whole batch: independent of how it is cut, blind to what must not count."""

import msgspec
import pytest
import torch

from steelyard.assembly.batch import build_step_batch
from steelyard.errors import IntegrityError
from steelyard.testing.tiny_model import tiny_module
from steelyard.testing.training_data import make_sample, random_samples, random_step_batch
from steelyard.trainer.model import logits_at
from steelyard.trainer.records import LossSettings
from steelyard.trainer.step import accumulate_gradients, read_rows, units_of
from steelyard.types import StepBatch, TrainingSample

VOCAB = 64


@pytest.fixture
def module() -> torch.nn.Module:
    return tiny_module(seed=0, vocab_size=VOCAB)


def gradients(module: torch.nn.Module, batch: StepBatch, settings: LossSettings | None = None) -> torch.Tensor:
    module.zero_grad()
    accumulate_gradients(module, batch, settings or LossSettings())
    return torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])


def behaviour_of(module: torch.nn.Module, samples: tuple[TrainingSample, ...]) -> tuple[TrainingSample, ...]:
    """The samples with the module's own log-probabilities, row by row and without any packing."""
    exact = []
    for sample in samples:
        ids = torch.tensor([sample.token_ids])
        with torch.no_grad():
            logits = module(input_ids=ids).logits[0] / sample.temperature
        chosen = logits[:-1].log_softmax(-1).gather(1, ids[0, 1:, None]).squeeze(1).tolist()
        logprobs = tuple(bit * value for bit, value in zip(sample.loss_mask, [0.0, *chosen], strict=True))
        exact.append(msgspec.structs.replace(sample, logprobs=logprobs))
    return tuple(exact)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_first_ratio_is_one(module: torch.nn.Module, temperature: float) -> None:
    samples = tuple(
        msgspec.structs.replace(sample, temperature=temperature) for sample in random_samples(1, 8, vocab_size=VOCAB)
    )
    batch = build_step_batch(0, 0, behaviour_of(module, samples), 256)
    step, loss = accumulate_gradients(module, batch, LossSettings())
    assert loss.ratio / loss.num_tokens == pytest.approx(1.0, abs=1e-5)
    assert loss.ratio_max == pytest.approx(1.0, abs=1e-4)
    assert step.num_loss_tokens == batch.loss_denominator


def test_the_gradient_does_not_depend_on_how_the_batch_is_cut(module: torch.nn.Module) -> None:
    samples = random_samples(2, 10, vocab_size=VOCAB)
    one = gradients(module, build_step_batch(0, 0, samples, 64))
    other = gradients(module, build_step_batch(0, 0, samples, 4096))
    assert one.norm() > 0.01
    assert torch.allclose(one, other, atol=1e-5)


def test_the_gradient_is_that_of_each_sequence_alone_without_padding(module: torch.nn.Module) -> None:
    samples = behaviour_of(module, random_samples(3, 5, vocab_size=VOCAB))
    packed = gradients(module, build_step_batch(0, 0, samples, 1024))
    module.zero_grad()
    denominator = sum(sum(sample.loss_mask) for sample in samples)
    for sample in samples:
        ids = torch.tensor([sample.token_ids])
        chosen = module(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None]).squeeze(1)
        weights = torch.tensor(sample.loss_mask[1:]) * sample.advantage
        (-(weights * chosen).sum() / denominator).backward()
    alone = torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])
    assert torch.allclose(packed, alone, atol=1e-5)


def test_logits_at_chosen_positions_are_those_of_the_whole_forward(module: torch.nn.Module) -> None:
    ids = torch.randint(0, VOCAB, (3, 7), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        whole = module(input_ids=ids).logits.reshape(-1, VOCAB)
        chosen = logits_at(module, ids, torch.tensor([1, 8, 20]))
        after = module(input_ids=ids).logits.reshape(-1, VOCAB)
    assert torch.allclose(chosen, whole[[1, 8, 20]], atol=1e-5)
    assert torch.equal(whole, after)


def test_rows_without_signal_are_not_computed_but_counted(module: torch.nn.Module) -> None:
    samples = random_samples(4, 6, vocab_size=VOCAB)
    silent = tuple(msgspec.structs.replace(s, advantage=0.0, attempt_id=f"{s.attempt_id}_0") for s in samples[:4])
    batch = build_step_batch(0, 0, samples + silent, 256)
    step, loss = accumulate_gradients(module, batch, LossSettings())
    assert step.num_skipped_rows == 4
    assert step.num_skipped_tokens == sum(len(s.token_ids) for s in silent)
    assert step.num_loss_tokens == batch.loss_denominator
    assert loss.num_tokens == sum(sum(s.loss_mask) for s in samples)


def test_skipped_rows_change_no_bit_of_the_gradient_but_the_denominator(module: torch.nn.Module) -> None:
    """With twice the denominator, an exact power of two, each term is exactly half."""
    samples = tuple(make_sample([5, 6, 7, 8], [0, 1, 1, 1], attempt_id=f"att_{i}") for i in range(3))
    silent = tuple(msgspec.structs.replace(s, advantage=0.0, attempt_id=f"{s.attempt_id}_0") for s in samples)
    alone = gradients(module, build_step_batch(0, 0, samples, 256))
    together = gradients(module, build_step_batch(0, 0, samples + silent, 256))
    assert torch.equal(together * 2, alone)


def test_a_silent_row_among_others_is_dropped_and_the_rest_trimmed() -> None:
    loud = make_sample([5, 6, 7], [0, 1, 0], advantage=1.0, attempt_id="att_b")
    silent = make_sample([1, 2, 3, 4], [0, 0, 1, 1], advantage=0.5)
    batch = build_step_batch(0, 0, [silent, loud], 100)
    (micro_batch,) = batch.micro_batches
    quiet = msgspec.structs.replace(micro_batch, advantages=bytes(4) + micro_batch.advantages[4:])
    step = units_of(msgspec.structs.replace(batch, micro_batches=(quiet,)), LossSettings())
    (unit,) = step.units
    rows = read_rows(unit.micro_batches[0], 0)
    assert unit.micro_batches[0].attempt_ids == ("att_b",)
    assert rows.token_ids.tolist() == [[5, 6, 7]]
    assert rows.positions.tolist() == [0]
    assert rows.tokens.targets.tolist() == [6]
    assert (step.num_rows, step.num_skipped_rows, step.num_loss_tokens) == (2, 1, 3)


@pytest.mark.parametrize("settings", [LossSettings(kl_coef=0.1), LossSettings(entropy_coef=0.1)])
def test_rows_without_advantage_are_computed_where_another_term_asks_for_them(
    module: torch.nn.Module, settings: LossSettings
) -> None:
    batch = build_step_batch(0, 0, [make_sample([1, 2, 3], [0, 1, 1], advantage=0.0)], 100)
    assert units_of(batch, settings).num_skipped_rows == 0
    assert gradients(module, batch, settings).norm() > 0


def test_a_batch_whose_tokens_do_not_add_up_is_refused(module: torch.nn.Module) -> None:
    batch = random_step_batch(1, vocab_size=VOCAB)
    wrong = msgspec.structs.replace(batch, loss_denominator=batch.loss_denominator + 1)
    with pytest.raises(IntegrityError, match="must hold loss_denominator"):
        accumulate_gradients(module, wrong, LossSettings())


def test_a_micro_batch_of_another_shape_is_refused(module: torch.nn.Module) -> None:
    batch = random_step_batch(1, vocab_size=VOCAB)
    broken = msgspec.structs.replace(batch.micro_batches[0], loss_mask=b"\0")
    with pytest.raises(IntegrityError, match=r"MicroBatch\.loss_mask must hold \d+ values"):
        accumulate_gradients(module, msgspec.structs.replace(batch, micro_batches=(broken,)), LossSettings())


def test_a_loss_on_the_first_token_is_refused(module: torch.nn.Module) -> None:
    batch = build_step_batch(0, 0, [make_sample([1, 2], [1, 1])], 100)
    with pytest.raises(IntegrityError, match="must be 0 in column 0"):
        accumulate_gradients(module, batch, LossSettings())
