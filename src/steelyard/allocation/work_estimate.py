"""The work as a planner reckons with it: the latest groups as arrays, weighted by how recent they are, and scaled to
what trends say of the steps to come."""

import math
from collections.abc import Sequence
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from steelyard.allocation.training_cost import TrainBatch
from steelyard.allocation.work_sketch import GroupFacts
from steelyard.errors import InputError
from steelyard.types.record import Record

Floats = npt.NDArray[np.float64]

_FIELDS = (
    "num_turns",
    "prompt_tokens",
    "generated_tokens",
    "kv_read_tokens",
    "prompt_pairs",
    "train_pairs",
    "longest_context_tokens",
    "longest_train_tokens",
    "tool_s",
    "decoded_tokens",
)
_ROW = attrgetter(*_FIELDS)
_LEAST_WHOLE_GROUPS = 4
"""With fewer whole groups, members count as independent of each other."""


class Growth(Record, frozen=True, kw_only=True):
    """By what the work is multiplied: 1 is as it was seen."""

    turns: float = 1.0
    prompt: float = 1.0
    generated: float = 1.0
    tool: float = 1.0
    context: float = 1.0


class WorkEstimate:
    """Means over trajectories, and the slowest member of a batch.

    Args:
        groups: at least one, none empty.
        group_size: members of a whole group; those that have fewer say nothing of a slowest member.
        half_life_steps: a group that ended so many steps before the latest one counts half; infinite: all alike.

    Raises:
        InputError: there is no trajectory.
    """

    def __init__(
        self,
        groups: Sequence[GroupFacts],
        group_size: int,
        growth: Growth | None = None,
        half_life_steps: float = float("inf"),
    ) -> None:
        members = [member for group in groups for member in group.members]
        if not members:
            raise InputError("a plan must have work to go by, got no trajectory")
        columns = np.array([_ROW(member) for member in members], dtype=np.float64).T
        by_name = dict(zip(_FIELDS, columns, strict=True))
        steps = np.array([group.step for group in groups], dtype=np.float64)
        weights = np.exp2(-(steps.max() - steps) / half_life_steps)
        sizes = np.array([len(group.members) for group in groups])
        self.weights = np.repeat(weights, sizes) / float((weights * sizes).sum())
        self._grow(by_name, growth if growth is not None else Growth())
        whole = sizes >= group_size
        starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
        self._by_group = int(whole.sum()) >= min(_LEAST_WHOLE_GROUPS, len(groups))
        if self._by_group and not whole.any():
            self._by_group = False
        self._whole, self._starts, self._group_weights = whole, starts, weights
        self._group_size = group_size

    def _grow(self, columns: dict[str, Floats], growth: Growth) -> None:
        self.turns = np.maximum(1.0, columns["num_turns"] * growth.turns)
        self.prompt_tokens = columns["prompt_tokens"] * growth.prompt
        self.generated_tokens = np.maximum(1.0, columns["generated_tokens"] * growth.generated)
        self.prompt_pairs = columns["prompt_pairs"] * growth.prompt * growth.context
        self.tool_s = columns["tool_s"] * growth.tool
        self.longest_context_tokens = float(columns["longest_context_tokens"].max()) * growth.context
        tokens = columns["prompt_tokens"] + columns["generated_tokens"]
        grown = (self.prompt_tokens + self.generated_tokens) / np.maximum(1.0, tokens)
        self.trained_tokens = self.prompt_tokens + self.generated_tokens
        self.train_pairs = columns["train_pairs"] * grown * growth.context
        self.longest_train_tokens = float(columns["longest_train_tokens"].max()) * growth.context
        # Sequences that decode are met the more often the longer they do: contexts are means over decoded tokens.
        decoded = columns["decoded_tokens"]
        total = float(self.weights @ decoded)
        held = columns["longest_context_tokens"]
        if total > 0.0:
            self.mean_context_tokens = float(self.weights @ columns["kv_read_tokens"]) / total * growth.context
            self.held_context_tokens = float(self.weights @ (decoded * held)) / total * growth.context
        else:
            self.mean_context_tokens = self.held_context_tokens = float(self.weights @ held) * growth.context

    def mean(self, values: Floats) -> float:
        """Of one value for each trajectory."""
        return float(self.weights @ values)

    def train_batch(self, num_trajectories: int) -> TrainBatch:
        """What a step trains on, on average."""
        return TrainBatch(
            num_tokens=max(1, whole_tokens(self.mean(self.trained_tokens) * num_trajectories)),
            pairs=self.mean(self.train_pairs) * num_trajectories,
            longest_tokens=max(1, whole_tokens(self.longest_train_tokens)),
        )

    def slowest(self, values: Floats, num_groups: int) -> Floats:
        """The expected largest value over the members of ``num_groups`` groups, drawn from those that were seen.

        Args:
            values: shape (trajectories, columns).

        Returns:
            One for each column.
        """
        if self._by_group:
            largest = np.maximum.reduceat(values, self._starts, axis=0)[self._whole]
            weights, draws = self._group_weights[self._whole], num_groups
        else:
            largest, weights, draws = values, self.weights, num_groups * self._group_size
        order = np.argsort(largest, axis=0)
        # The largest of n draws is at most the j-th smallest with the probability that all of them are.
        below = np.cumsum(weights[order], axis=0) / weights.sum()
        is_largest = np.diff(np.minimum(below, 1.0) ** draws, axis=0, prepend=0.0)
        return np.asarray((np.take_along_axis(largest, order, axis=0) * is_largest).sum(axis=0))


def whole_tokens(number: float) -> int:
    """Rounded up, but for what the order of a sum makes of a whole number."""
    return math.ceil(round(number, 6))
