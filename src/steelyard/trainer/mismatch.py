"""What the log-probabilities of engine and trainer differ by, in figures."""

from collections.abc import Sequence

import torch

from steelyard.types import LogRatios

_QUANTILES = (0.01, 0.5, 0.99, 1.0)


def log_ratio_figures(log_ratios: Sequence[torch.Tensor]) -> LogRatios | None:
    """Figures over the log r of all tokens, float32 [N] each, with r the ratio of trained to sampling policy.

    Returns:
        None where there is no token.
    """
    together = torch.cat(list(log_ratios)).double() if log_ratios else torch.zeros(0)
    if not len(together):
        return None
    ordered = together.abs().sort().values
    # The smallest value that at least this share of the tokens does not exceed.
    ranks = [max(0, -(-len(ordered) * round(100 * q) // 100) - 1) for q in _QUANTILES]
    p01, p50, p99, largest = (float(ordered[rank]) for rank in ranks)
    return LogRatios(
        num_tokens=len(ordered),
        abs_p01=p01,
        abs_p50=p50,
        abs_p99=p99,
        abs_max=largest,
        kl_k1=float(-together.mean()),
        kl_k3=float((together.expm1() - together).mean()),
    )
