"""Gradient sums of units, added in the order of the units, whatever order they come in.

Floating-point addition is not associative: only one order gives the same bits whoever computed which unit, and when.
"""

from collections.abc import Mapping

import torch

from steelyard.errors import IntegrityError, Refused
from steelyard.trainer.loss import LossSums

Gradients = Mapping[str, torch.Tensor]
"""Gradient sums by parameter name; parameters without a gradient are left out."""


class UnitSums:
    """Adds the sums of ``num_units`` units. ``deliver`` and ``advance`` may be called from two threads."""

    def __init__(self, num_units: int) -> None:
        self._num_units = num_units
        self._waiting: dict[int, tuple[Gradients, LossSums]] = {}
        self._delivered: set[int] = set()
        self._total: dict[str, torch.Tensor] = {}
        self._loss = LossSums()
        self._next = 0

    @property
    def num_added(self) -> int:
        """Units that are in the total; the next to be added has this index."""
        return self._next

    @property
    def waiting_bytes(self) -> int:
        """Memory of sums that wait for one before them."""
        return sum(tensor.nbytes for gradients, _ in tuple(self._waiting.values()) for tensor in gradients.values())

    def deliver(self, index: int, gradients: Gradients, loss: LossSums) -> None:
        """Take the whole sum of one unit. The tensors are ours from now on.

        Raises:
            Refused: the unit was delivered before (``double``), or there is none of this index (``unknown``).
        """
        if not 0 <= index < self._num_units:
            raise Refused("unknown", f"a unit must be one of {self._num_units}, got {index}")
        if index in self._delivered:
            raise Refused("double", f"the sum of unit {index} is here already")
        self._delivered.add(index)
        self._waiting[index] = (gradients, loss)

    def advance(self) -> None:
        """Add what is next in order, as far as it is here."""
        while (found := self._waiting.pop(self._next, None)) is not None:
            gradients, loss = found
            for name, gradient in gradients.items():
                total = self._total.get(name)
                if total is None:
                    self._total[name] = gradient
                else:
                    total.add_(gradient)
            self._loss.add(loss)
            self._next += 1

    def finish(self) -> tuple[Gradients, LossSums]:
        """The total of all units.

        Raises:
            IntegrityError: a unit is missing; names it.
        """
        self.advance()
        if self._next != self._num_units:
            missing = sorted(set(range(self._num_units)) - self._delivered)
            raise IntegrityError(f"a step needs the sums of all {self._num_units} units, got none of {missing}")
        return self._total, self._loss
