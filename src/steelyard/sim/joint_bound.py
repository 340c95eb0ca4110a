"""Work and places at once: a large batch saves device time and costs each of its sequences time, a small one the
reverse. A bound on either alone assumes the batch that suits it; this one knows that it is the same batch.

Let T be the time of the run, D the devices that may do the work and P the places of groups, ``(max_policy_lag + 1)
groups_per_batch``. Work takes at most ``D T`` device-seconds, and the times that groups hold their places at most ``P
T``. For any p from 0 to 1 then ``T >= p * work / D + (1 - p) * held / P``, both as they are in the run. A group holds
its place for at least any weighted mean of its members' times; the weights are chosen beforehand.

A step of a replica of t devices takes ``s >= a + b_1 + ... + b_n`` for n sequences that get a token: ``a`` is what the
step takes whatever is in it (weights, launches), ``b_j`` what sequence j adds (its KV, its arithmetic). With ``y_j =
(1 - p) w_j / P`` the step adds ``s (y_1 + ... + y_n + p t / D)`` to the right side. Let ``x = y_1 + ... + y_n`` and
``M = p t / D``, and give each token the share ``y_j / x`` of ``a M``. The step's tokens then get, each::

    a y_j + b_j M + a M y_j / x + b_j x    >=    a y_j + b_j M + min over x' of (a M y_j / x' + b_j x')

where x' lies between ``y_j`` and ``max_running`` times the largest y. The right side is concave in ``b_j``, which
grows evenly along a turn: the mean over a turn's tokens is at least the mean of its first and its last one. Prompts
add their arithmetic to both sides; tools, scores, training and publication add what they take.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from steelyard.allocation.roofline import Roofline
from steelyard.allocation.serving_cost import ServingCost
from steelyard.allocation.workload import GroupWork, TrajectoryWork
from steelyard.sim.setup import SimSetup

_WORK_SHARES = (0.1, 0.25, 0.4, 0.55, 0.7, 0.85, 0.95)
_POWERS = (0.0, 4.0)
"""A member's weight is its time alone to this power: 0 for all alike, large for the slowest one only."""
_ARITHMETIC_SHARES = (0.25, 0.5)
"""A step's time is at least any mixture of its arithmetic with its traffic."""

Floats = NDArray[np.float64]


class JointBound:
    """The bound for one setup.

    Args:
        paths: seconds that each member of each group takes alone; for the weights only.
        step_held_s: that each group holds its place for beside its members' times (training, publication), in sum.
    """

    def __init__(
        self,
        setup: SimSetup,
        layouts: Sequence[ServingCost],
        groups: Sequence[GroupWork],
        paths: Sequence[Sequence[float]],
        *,
        step_held_s: float,
    ) -> None:
        self._setup, self._layouts = setup, layouts
        self._roofline = Roofline(setup.device, setup.corrections)
        self._step_held_s = step_held_s
        self._paths = np.array(paths, dtype=np.float64)
        trajectories = [one for group in groups for one in group.trajectories]
        tools_s = [one.tool_s + setup.reward.function_s for one in trajectories]
        self._waits_s = np.array(tools_s).reshape(self._paths.shape)
        rows = [np.array(_turns(index, one), dtype=np.float64) for index, one in enumerate(trajectories)]
        columns = np.concatenate(rows).T.copy()
        self._owner = columns[0].astype(np.int64)
        self._num_decoded, self._first_kv, self._last_kv, self._prompts, self._pairs = columns[1:]

    def bound_s(self, num_devices: int, other_work_s: float) -> float:
        """Seconds that no run goes below: the best choice of what may be chosen, found one after the other.

        Args:
            num_devices: that do at most the work of sampling and ``other_work_s`` device-seconds beside it.
        """

        def one(power: float, work_share: float, arithmetic_share: float) -> float:
            sampled_s = self._sampled_s(power, work_share / num_devices, 1.0 - work_share, arithmetic_share)
            return sampled_s + other_work_s * work_share / num_devices

        by_share = {share: one(1.0, share, 0.0) for share in _WORK_SHARES}
        share = max(by_share, key=by_share.__getitem__)
        by_power = {power: one(power, share, 0.0) for power in _POWERS}
        power = max(by_power, key=by_power.__getitem__)
        by_arithmetic = [one(power, share, arithmetic) for arithmetic in _ARITHMETIC_SHARES]
        return max(*by_share.values(), *by_power.values(), *by_arithmetic)

    def _sampled_s(self, power: float, device: float, held: float, arithmetic_share: float) -> float:
        """What sampling and holding places adds; ``device`` is what a device-second of a replica counts."""
        setup = self._setup
        held /= (setup.max_policy_lag + 1) * setup.groups_per_batch
        weights = (self._paths / self._paths.max(axis=1, keepdims=True)) ** power
        shares = weights / weights.sum(axis=1, keepdims=True) * held
        per_turn = shares.reshape(-1)[self._owner]
        turns = [self._turns_s(layout, per_turn, layout.tp * device, arithmetic_share) for layout in self._layouts]
        return float(np.minimum.reduce(turns).sum() + (shares * self._waits_s).sum() + self._step_held_s * held)

    def _turns_s(self, layout: ServingCost, shares: Floats, work: float, arithmetic_share: float) -> Floats:
        """What each turn adds in a layout; ``work`` is what a second of its replica counts."""
        rates, model, tp = self._roofline.corrections, self._setup.model, layout.tp
        memory_share = 1.0 - arithmetic_share
        per_byte_s = self._roofline.work_s(0.0, 1.0, 1.0)
        per_flop_s = self._roofline.work_s(1.0, 0.0, 1.0) / tp
        talk_s = layout.communication_s(2) - layout.communication_s(1)
        fixed_s = layout.communication_s(1) - talk_s + self._roofline.launches_s(model.num_layers)
        fixed_s += memory_share * layout.touched_bytes(1) * per_byte_s

        token_flops = 2.0 * (model.active_parameters + model.head_parameters)
        own_s = talk_s + arithmetic_share * token_flops * per_flop_s * rates.decode_compute
        kv_s = memory_share * layout.kv_bytes_per_token * per_byte_s
        kv_s += arithmetic_share * model.attention_flops(1.0) * per_flop_s * rates.decode_compute
        most = self._setup.max_running * float(shares.max())
        ends = [_token_s(fixed_s, own_s + kv_s * held, shares, work, most) for held in (self._first_kv, self._last_kv)]
        prompt_flops = 2.0 * model.active_parameters * self._prompts + model.attention_flops(1.0) * self._pairs
        prompt_s = prompt_flops * per_flop_s * rates.prefill_compute + talk_s * self._prompts
        return np.asarray(self._num_decoded * (ends[0] + ends[1]) / 2 + prompt_s * (shares + work))


def _token_s(fixed_s: float, own_s: Floats, shares: Floats, work: float, most: float) -> Floats:
    """The least that a token adds, whatever the batch; see the module's text."""
    batch = np.clip(np.sqrt(fixed_s * work * shares / own_s), shares, most)
    return np.asarray(fixed_s * shares + own_s * work + fixed_s * work * shares / batch + own_s * batch)


def _turns(index: int, trajectory: TrajectoryWork) -> list[tuple[float, ...]]:
    """For each turn: whose it is, tokens decoded after the first one, KV that the first and the last of them read,
    tokens of the prompt, and pairs that its attention multiplies."""
    rows = list[tuple[float, ...]]()
    for turn, context in zip(trajectory.turns, trajectory.contexts(), strict=True):
        decoded, prompt = turn.generated_tokens - 1, turn.new_prompt_tokens
        pairs = prompt * (context - prompt) + prompt * (prompt + 1) / 2
        rows.append((index, decoded, context + 1, context + max(1, decoded), prompt, pairs))
    return rows
