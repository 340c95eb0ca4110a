r"""The policy-gradient loss over sampled tokens.

For a sampled token with advantage A, behaviour log-probability b (recorded while sampling) and present
log-probability l, at the sample's temperature, with r = exp(l - b):

.. math:: L = \frac{1}{D} \sum_{tokens} \Big[ -\min(r A, clip(r, 1 - c_{low}, 1 + c_{high}) A)
          + \beta (r - 1 - \log r) - \eta H \Big]

The clipped surrogate is PPO's (arXiv 1707.06347, eq. 7), with the asymmetric bounds of DAPO (arXiv 2503.14476,
eq. 10) and its token-level normalisation: D is the number of sampled tokens of the whole batch, fixed before the
batch is cut. :math:`r - 1 - \log r` is the unbiased, never negative estimate of KL(behaviour || present) from
behaviour samples ("k3", http://joschu.net/blog/kl-approx.html); :math:`\beta` keeps the step near the policy that
sampled. H is the entropy of the present distribution.
"""

from dataclasses import dataclass, field

import torch

from steelyard.trainer.records import LossSettings


@dataclass(frozen=True)
class TokenBatch:
    """The sampled tokens of one micro-batch: tensors of one length N.

    ``targets`` int64, the sampled ids; ``behaviour`` float32, their recorded log-probabilities; ``advantages`` and
    ``temperatures`` float32; ``is_current`` bool, whether they were sampled from the weights of the gradient.
    """

    targets: torch.Tensor
    behaviour: torch.Tensor
    advantages: torch.Tensor
    temperatures: torch.Tensor
    is_current: torch.Tensor


@dataclass
class LossSums:
    """Sums over tokens, added up over micro-batches. ``ratio_max`` is a maximum.

    ``current_log_ratios`` and ``older_log_ratios`` hold every token's log r, of the tokens of current and of older
    weights.
    """

    num_tokens: int = 0
    loss: float = 0.0
    kl: float = 0.0
    ratio: float = 0.0
    ratio_max: float = 0.0
    num_clipped: int = 0
    entropy: float = 0.0
    current_log_ratios: list[torch.Tensor] = field(default_factory=list)
    older_log_ratios: list[torch.Tensor] = field(default_factory=list)

    def add(self, other: "LossSums") -> None:
        """Add the sums of another micro-batch."""
        self.num_tokens += other.num_tokens
        self.loss += other.loss
        self.kl += other.kl
        self.ratio += other.ratio
        self.ratio_max = max(self.ratio_max, other.ratio_max)
        self.num_clipped += other.num_clipped
        self.entropy += other.entropy
        self.current_log_ratios += other.current_log_ratios
        self.older_log_ratios += other.older_log_ratios


def token_logprobs(
    logits: torch.Tensor, targets: torch.Tensor, temperatures: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities after temperature over the full vocabulary.

    Args:
        logits: float32 [N, vocab_size].
        targets: int64 [N].
        temperatures: float32 [N], above 0.

    Returns:
        Of the targets, [N]; and of the whole vocabulary, [N, vocab_size].
    """
    all_logprobs = (logits / temperatures[:, None]).log_softmax(-1)
    return all_logprobs.gather(1, targets[:, None]).squeeze(1), all_logprobs


def policy_loss(
    logits: torch.Tensor, tokens: TokenBatch, denominator: float, settings: LossSettings
) -> tuple[torch.Tensor, LossSums]:
    """The micro-batch's share of the loss, to be summed over micro-batches, and its metrics.

    Args:
        logits: float32 [N, vocab_size], at the positions before the sampled tokens.
        denominator: sampled tokens of the whole batch.
    """
    logprobs, all_logprobs = token_logprobs(logits, tokens.targets, tokens.temperatures)
    log_ratio = logprobs - tokens.behaviour
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1.0 - settings.clip_low, 1.0 + settings.clip_high)
    per_token = -torch.minimum(ratio * tokens.advantages, clipped * tokens.advantages)
    kl = ratio - 1.0 - log_ratio
    entropy = _entropy(all_logprobs, needs_gradient=settings.entropy_coef != 0.0)
    if settings.kl_coef:
        per_token = per_token + settings.kl_coef * kl
    if settings.entropy_coef:
        per_token = per_token - settings.entropy_coef * entropy
    loss = per_token.sum() / denominator
    with torch.no_grad():
        up = (tokens.advantages > 0) & (ratio > 1.0 + settings.clip_high)
        down = (tokens.advantages < 0) & (ratio < 1.0 - settings.clip_low)
        sums = LossSums(
            num_tokens=len(tokens.targets),
            loss=float(loss),
            kl=float(kl.sum()),
            ratio=float(ratio.sum()),
            ratio_max=float(ratio.max()),
            num_clipped=int((up | down).sum()),
            entropy=float(entropy.sum()),
            current_log_ratios=[log_ratio[tokens.is_current]],
            older_log_ratios=[log_ratio[~tokens.is_current]],
        )
    return loss, sums


def _entropy(all_logprobs: torch.Tensor, *, needs_gradient: bool) -> torch.Tensor:
    """Entropy in nats, [N]."""
    with torch.set_grad_enabled(needs_gradient):
        source = all_logprobs if needs_gradient else all_logprobs.detach()
        return -(source.exp() * source).sum(-1)
