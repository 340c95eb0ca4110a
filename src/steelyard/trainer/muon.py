"""Muon over stacks of equal shapes: what ``torch.optim.Muon`` does, with few large operations instead of many small.

The layers of a decoder hold the same shapes again and again. Orthogonalised one by one, the matrices of a small policy
are so small that starting an operation costs more than computing it: see docs/learning.md.
"""

from collections.abc import Iterable

import torch

_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
_NUM_ITERATIONS = 5
_MOMENTUM = 0.95
_SMALLEST_NORM = 1e-7


class StackedMuon:
    """Momentum, orthogonalised by Newton-Schulz iterations in bfloat16 (K. Jordan, "Muon", 2024), with decoupled decay.

    Args:
        matrices: parameters of two dimensions, each of which gets a gradient before every step.
        weight_decay: each step takes ``rate * weight_decay`` of a matrix away.
    """

    def __init__(self, matrices: Iterable[torch.nn.Parameter], weight_decay: float) -> None:
        by_shape: dict[torch.Size, list[torch.nn.Parameter]] = {}
        for matrix in matrices:
            by_shape.setdefault(matrix.shape, []).append(matrix)
        self._stacks = [(stack, torch.zeros(len(stack), *shape)) for shape, stack in by_shape.items()]
        self._weight_decay = weight_decay

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Move every matrix by ``rate`` along its orthogonalised momentum; a tall one by more, as its gradient is."""
        for stack, momentum in self._stacks:
            gradient = torch.stack([matrix.grad for matrix in stack if matrix.grad is not None])
            momentum.lerp_(gradient, 1.0 - _MOMENTUM)
            # Nesterov: look ahead by one more step of the momentum.
            update = orthogonalised(gradient.lerp(momentum, _MOMENTUM))
            num_rows, num_columns = stack[0].shape
            parameters: list[torch.Tensor] = list(stack)
            torch._foreach_mul_(parameters, 1.0 - rate * self._weight_decay)
            scale = max(1.0, num_rows / num_columns) ** 0.5
            torch._foreach_add_(parameters, list(update.unbind(0)), alpha=-rate * scale)


def orthogonalised(matrices: torch.Tensor) -> torch.Tensor:
    """Each matrix with its singular values brought near 1, by the quintic Newton-Schulz iteration of Muon.

    Args:
        matrices: float32 [num_matrices, num_rows, num_columns].

    Returns:
        float32 of the same shape; singular values mostly between 0.7 and 1.2.
    """
    a, b, c = _NEWTON_SCHULZ
    is_tall = matrices.shape[1] > matrices.shape[2]
    x = (matrices.mT if is_tall else matrices).to(torch.bfloat16).contiguous()
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=_SMALLEST_NORM)
    for _ in range(_NUM_ITERATIONS):
        gram = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if is_tall else x).float()
