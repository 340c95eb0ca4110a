"""The loss against formulas written out by hand."""

import math

import pytest
import torch

from steelyard.trainer.loss import LossSums, TokenBatch, policy_loss, token_logprobs
from steelyard.trainer.records import LossSettings

LOGITS = torch.tensor([[0.0, 1.0, 2.0], [1.0, -1.0, 0.5]])


def tokens(behaviour: list[float], advantages: list[float], temperature: float = 1.0) -> TokenBatch:
    return TokenBatch(
        targets=torch.tensor([2, 0]),
        behaviour=torch.tensor(behaviour),
        advantages=torch.tensor(advantages),
        is_current=torch.ones(len(behaviour), dtype=torch.bool),
        temperatures=torch.full((2,), temperature),
    )


def exact_logprobs(temperature: float = 1.0) -> list[float]:
    values = []
    for row, target in zip(LOGITS.tolist(), (2, 0), strict=True):
        scaled = [z / temperature for z in row]
        values.append(scaled[target] - math.log(sum(math.exp(z) for z in scaled)))
    return values


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probabilities_are_after_temperature_over_the_full_vocabulary(temperature: float) -> None:
    chosen, all_logprobs = token_logprobs(LOGITS, torch.tensor([2, 0]), torch.full((2,), temperature))
    assert chosen.tolist() == pytest.approx(exact_logprobs(temperature), abs=1e-6)
    assert all_logprobs.exp().sum(-1).tolist() == pytest.approx([1.0, 1.0])


def test_on_policy_the_loss_is_minus_the_mean_advantage_and_nothing_is_clipped() -> None:
    loss, sums = policy_loss(LOGITS, tokens(exact_logprobs(), [1.0, -3.0]), 4.0, LossSettings())
    assert float(loss) == pytest.approx(-(1.0 - 3.0) / 4.0, abs=1e-6)
    assert sums.ratio == pytest.approx(2.0, abs=1e-5)
    assert sums.kl == pytest.approx(0.0, abs=1e-6)
    assert (sums.num_tokens, sums.num_clipped) == (2, 0)


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "expected", "clipped"),
    [
        (math.log(2.0), 1.0, -1.3, 1),  # gained too much already: bound by 1 + clip_high
        (math.log(2.0), -1.0, 2.0, 0),  # must come down: never bound
        (math.log(0.5), 1.0, -0.5, 0),  # must come up: never bound
        (math.log(0.5), -1.0, 0.8, 1),  # lost too much already: bound by 1 - clip_low
        (math.log(1.1), 1.0, -1.1, 0),
    ],
)
def test_the_ratio_is_clipped_on_the_side_that_the_advantage_pushes_to(
    log_ratio: float, advantage: float, expected: float, clipped: int
) -> None:
    present = exact_logprobs()
    batch = tokens([present[0] - log_ratio, present[1]], [advantage, 0.0])
    loss, sums = policy_loss(LOGITS, batch, 1.0, LossSettings(clip_low=0.2, clip_high=0.3))
    assert float(loss) == pytest.approx(expected, abs=1e-5)
    assert sums.num_clipped == clipped
    assert sums.ratio_max == pytest.approx(max(math.exp(log_ratio), 1.0), abs=1e-5)


def test_a_clipped_token_has_no_gradient() -> None:
    logits = LOGITS.clone().requires_grad_()
    present = exact_logprobs()
    batch = tokens([present[0] - 1.0, present[1]], [1.0, 0.0])
    loss, _ = policy_loss(logits, batch, 1.0, LossSettings())
    loss.backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None
    assert logits.grad.abs().max() == 0.0


def test_the_gradient_on_policy_is_that_of_advantage_times_log_probability() -> None:
    logits = LOGITS.clone().requires_grad_()
    policy_loss(logits, tokens(exact_logprobs(), [2.0, -1.0]), 2.0, LossSettings())[0].backward()  # type: ignore[no-untyped-call]
    other = LOGITS.clone().requires_grad_()
    chosen, _ = token_logprobs(other, torch.tensor([2, 0]), torch.ones(2))
    (-(chosen * torch.tensor([2.0, -1.0])).sum() / 2.0).backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None and other.grad is not None
    assert torch.allclose(logits.grad, other.grad, atol=1e-6)


def test_the_kl_term_is_the_k3_estimate_of_what_the_policy_moved() -> None:
    present = exact_logprobs()
    batch = tokens([present[0] - 0.3, present[1] + 0.2], [0.0, 0.0])
    loss, sums = policy_loss(LOGITS, batch, 1.0, LossSettings(kl_coef=0.5))
    k3 = (math.exp(0.3) - 1 - 0.3) + (math.exp(-0.2) - 1 + 0.2)
    assert sums.kl == pytest.approx(k3, abs=1e-5)
    assert float(loss) == pytest.approx(0.5 * k3, abs=1e-5)


def test_the_entropy_term_rewards_entropy() -> None:
    entropies = [-sum(p * math.log(p) for p in row) for row in LOGITS.softmax(-1).tolist()]
    batch = tokens(exact_logprobs(), [0.0, 0.0])
    loss, sums = policy_loss(LOGITS, batch, 1.0, LossSettings(entropy_coef=0.1))
    assert sums.entropy == pytest.approx(sum(entropies), abs=1e-5)
    assert float(loss) == pytest.approx(-0.1 * sum(entropies), abs=1e-5)


def test_sums_add_up_over_micro_batches() -> None:
    total = LossSums(num_tokens=1, ratio=1.0, ratio_max=3.0)
    total.add(LossSums(num_tokens=2, ratio=2.5, ratio_max=2.0, num_clipped=1))
    assert (total.num_tokens, total.ratio, total.ratio_max, total.num_clipped) == (3, 3.5, 3.0, 1)
