"""A proven lower bound on the time of a simulated run, whatever decides: no split, routing or schedule is faster.

Let T be the time from the start to the end of the last of N optimizer steps, B the groups of a batch and L the lag
bound. All of these hold at once; the bound is the largest.

*Work.* The devices work at most D T device-seconds, and those that the limits leave to a role at most their share. For
sampling, a step of a replica of t devices takes at least the larger of its arithmetic and its memory traffic, and a sum
of maxima is at least the maximum of the sums: so arithmetic and traffic may each be added up over all tokens. Traffic
holds the weights once a step. A step's sequences fit into the KV memory of C tokens and into the batch of M, so a
sequence with context c may be charged the share ``w c / C + (1 - w) / M`` of the weights, for any w from 0 to 1: those
of a step add up to at most 1. Prompts are computed at least once, siblings and turns sharing nothing but what was
theirs before. Training and scoring take what they take in their best layout, and layouts are compared by
device-seconds.

*Lag.* A group is admitted when at most ``(L + 1) B`` groups, itself included, have not become weights that are READY.
It holds its place from then until the version that was trained on it is READY. By Little's argument the places, ``(L
+ 1) B T`` place-seconds, suffice for the sum over groups of the time that each must hold one: the critical path of
its slowest member, its training step, and publication. That of the last L + 1 steps is not counted: nobody waits for
it, and the run may end before it has.

*Joint.* Work and places together: see :mod:`steelyard.sim.joint_bound`.

*Path.* Step k ends no sooner than the step before it and one step; nor than one step after ``(k + 1) B`` groups are
done, whichever they are. Group j is done no sooner than its path after its admission, and that waits until the version
of step ``j // B - L`` is READY: a publication after the step before that has ended. So the ends follow from each other,
one after the other. With L = 0 nothing overlaps.

*Trainer.* Steps follow each other: N times the fastest step, after the fastest first batch.

*Slots.* The time of tools over their slots, and that of functions that score over theirs.
"""

from bisect import insort
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from steelyard.allocation.architecture import check_tp
from steelyard.allocation.moving_cost import MovingCost
from steelyard.allocation.roofline import Roofline
from steelyard.allocation.serving_cost import ServingCost
from steelyard.allocation.snapshot import Limits
from steelyard.allocation.training_cost import TrainBatch, least_device_s
from steelyard.allocation.workload import GroupWork, TrajectoryWork
from steelyard.errors import InputError
from steelyard.sim.joint_bound import JointBound
from steelyard.sim.setup import SimSetup
from steelyard.types.record import Record

TERMS = ("work", "lag", "path", "trainer", "slots", "joint")
"""What may bind; the fields of :class:`Bound`, without their unit."""

_Floats = npt.NDArray[np.float64]
_MIXES = (0.0, 0.25, 0.5, 0.75, 1.0)


class Bound(Record, frozen=True, kw_only=True):
    """Seconds that no run goes below, by reason. See the module's text for why."""

    work_s: float
    lag_s: float
    path_s: float
    trainer_s: float
    slots_s: float
    joint_s: float = 0.0

    @property
    def makespan_s(self) -> float:
        """The largest of them."""
        return max(float(getattr(self, f"{name}_s")) for name in TERMS)

    @property
    def binding(self) -> str:
        """The name of the largest: what a faster run would have to change."""
        return max(TERMS, key=lambda name: float(getattr(self, f"{name}_s")))


def lower_bound(setup: SimSetup, limits: Limits | None = None) -> Bound:
    """The bound of one run that drops no group: it trains those that it admits, in the order of their admission.

    Args:
        limits: what no plan may leave; None: all devices may sample, and all may train.

    Raises:
        InputError: the model fits into no layout.
    """
    return _Bounds(setup, limits).bound()


class _Bounds:
    def __init__(self, setup: SimSetup, limits: Limits | None) -> None:
        self._setup = setup
        self._most_rollout = self._most_train = setup.num_devices
        if limits is not None:
            free = setup.num_devices - limits.min_reward
            self._most_rollout = min(free - limits.min_train, limits.max_rollout or free)
            self._most_train = min(free - limits.min_rollout, limits.max_train or free)
        self._roofline = Roofline(setup.device, setup.corrections)
        self._layouts = serving_layouts(setup)
        self._groups = setup.admitted_groups()
        moving = MovingCost(setup.model, self._roofline, setup.rates, setup.element_bytes)
        self._publish_s = moving.write_s() + min(
            moving.load_s(layout) + moving.swap_s(layout) for layout in self._layouts
        )
        self._train_device_s = [self._train_work_s(batch) for batch in self._batches()]

    def bound(self) -> Bound:
        setup = self._setup
        members = [[self._trajectory_path_s(one) for one in group.trajectories] for group in self._groups]
        paths = [max(group) for group in members]
        steps = [device_s / self._most_train for device_s in self._train_device_s]
        other_work_s = sum(self._train_device_s) + self._reward_work_s()
        step_held_s = self._step_held_s(steps)
        joint = JointBound(setup, self._layouts, self._groups, members, step_held_s=step_held_s)
        rollout_s = self._rollout_work_s()
        return Bound(
            work_s=max((rollout_s + other_work_s) / setup.num_devices, rollout_s / self._most_rollout),
            lag_s=(sum(paths) + step_held_s) / ((setup.max_policy_lag + 1) * setup.groups_per_batch),
            path_s=self._path_s(paths, steps),
            trainer_s=sum(steps) + self._first_batch_s(paths),
            slots_s=self._slots_s(),
            joint_s=max(joint.bound_s(setup.num_devices, other_work_s), joint.bound_s(self._most_rollout, 0.0)),
        )

    def _batches(self) -> list[tuple[GroupWork, ...]]:
        """Groups in the order of admission. Which step takes which is not known; sums do not depend on it."""
        size = self._setup.groups_per_batch
        return [self._groups[start : start + size] for start in range(0, len(self._groups), size)]

    def _step_held_s(self, steps: Sequence[float]) -> float:
        """For how long groups hold their places once they are scored, in sum: a step, and publication where it must
        have ended before the run does, for the last group was admitted then.

        The sum over steps does not depend on which step takes which group.
        """
        size, num_steps = self._setup.groups_per_batch, len(steps)
        num_published = max(0, num_steps - self._setup.max_policy_lag - 1)
        return size * (sum(steps) + num_published * self._publish_s)

    def _path_s(self, paths: Sequence[float], steps: Sequence[float]) -> float:
        """The end of the last step, from the ends of the ones before; see the module's text."""
        size, lag = self._setup.groups_per_batch, self._setup.max_policy_lag
        shortest_s = self._shortest_step_s()
        ends, done = list[float](), list[float]()
        for step in range(len(steps)):
            for batch in range(0 if step == 0 else step + lag, min(step + lag + 1, len(steps))):
                admitted_s = ends[batch - lag - 1] + self._publish_s if batch > lag else 0.0
                for path_s in paths[batch * size : (batch + 1) * size]:
                    insort(done, admitted_s + path_s)
            before_s = ends[-1] if ends else 0.0
            took_s = steps[step] if lag == 0 else shortest_s
            ends.append(max(before_s, done[(step + 1) * size - 1]) + took_s)
        return ends[-1]

    def _shortest_step_s(self) -> float:
        """A step on those groups that train the fastest: no step is shorter, whichever groups it takes."""
        alone = sorted(self._train_work_s((group,)) for group in self._groups)
        nothing_s = self._train_work_s(())
        size = self._setup.groups_per_batch
        return (sum(alone[:size]) - (size - 1) * nothing_s) / self._most_train

    def _first_batch_s(self, paths: Sequence[float]) -> float:
        """No step begins before a whole batch of groups is done, whichever they are."""
        size = self._setup.groups_per_batch
        first = sorted(paths[: size * (self._setup.max_policy_lag + 1)])
        return first[size - 1]

    def _slots_s(self) -> float:
        setup, trajectories = self._setup, [one for group in self._groups for one in group.trajectories]
        tools_s = sum(one.tool_s for one in trajectories) / setup.tool_slots if setup.tool_slots is not None else 0.0
        num_graders = setup.reward.num_slots
        graders_s = len(trajectories) * setup.reward.function_s / num_graders if num_graders is not None else 0.0
        return max(tools_s, graders_s)

    def _trajectory_path_s(self, trajectory: TrajectoryWork) -> float:
        """Alone on the fastest layout, turn by turn; then its score."""
        path_s = self._setup.reward.function_s + trajectory.tool_s
        for turn, context in zip(trajectory.turns, trajectory.contexts(), strict=True):
            held = context - turn.new_prompt_tokens
            decoded = turn.generated_tokens - 1
            # A step's time is convex in the context: the mean over tokens is at least the time at their mean context.
            mean_context = context + (turn.generated_tokens / 2 if decoded else 0)
            path_s += min(
                layout.prefill_s(max(1, turn.new_prompt_tokens), held) + decoded * layout.decode_step_s(1, mean_context)
                for layout in self._layouts
            )
        return path_s

    def _rollout_work_s(self) -> float:
        """Device-seconds; the best of several valid ways to mix arithmetic with traffic, and shares of the weights.

        A way charges a trajectory ``mix`` of its arithmetic and the rest of its traffic, of the weights ``share`` by
        context over KV memory and the rest by sequences over the batch; each in the layout that is best for it.
        """
        sampled = np.array([_sampled(one) for group in self._groups for one in group.trajectories])
        parts = [self._work_parts(layout, *sampled.T) for layout in self._layouts]
        most_s = 0.0
        for mix in _MIXES:
            for share in (0.0, 0.5, 1.0):
                in_layouts = [
                    mix * arithmetic_s + (1.0 - mix) * traffic_s(share) + talk_s
                    for arithmetic_s, traffic_s, talk_s in parts
                ]
                most_s = max(most_s, sum(np.minimum.reduce(in_layouts).tolist()))
        return most_s

    def _work_parts(
        self, layout: ServingCost, num_decoded: _Floats, num_prompt: _Floats, kv_read: _Floats, pairs: _Floats
    ) -> tuple[_Floats, Callable[[float], _Floats], _Floats]:
        """Device-seconds of each trajectory in one layout: arithmetic, traffic for a share, communication."""
        device, rates, model = self._setup.device, self._roofline.corrections, self._setup.model
        decode_flops = num_decoded * 2.0 * (model.active_parameters + model.head_parameters)
        decode_flops += model.attention_flops(1.0) * kv_read
        prefill_flops = num_prompt * 2.0 * model.active_parameters + model.attention_flops(1.0) * pairs
        arithmetic_s = decode_flops / device.peak_flops_per_s * rates.decode_compute
        arithmetic_s += prefill_flops / device.peak_flops_per_s * rates.prefill_compute
        weights, by_batch = layout.touched_bytes(1), num_decoded / self._setup.max_running
        kv_bytes = layout.kv_bytes_per_token * (kv_read + num_decoded)
        prefill_bytes = layout.tp * layout.kv_bytes_per_token * num_prompt

        def traffic_s(share: float) -> _Floats:
            of_weights = weights * (share * kv_read / layout.kv_capacity_tokens + (1.0 - share) * by_batch)
            return (layout.tp * (kv_bytes + of_weights) + prefill_bytes) / device.memory_bytes_per_s * rates.memory

        # What communication takes for each token; its latency is shared by a step of any size.
        a_token_s = layout.communication_s(2) - layout.communication_s(1)
        return arithmetic_s, traffic_s, layout.tp * (num_decoded + num_prompt) * a_token_s

    def _train_work_s(self, groups: Sequence[GroupWork]) -> float:
        batch = train_batch(groups)
        return least_device_s(self._setup.model, self._roofline, batch, self._setup.element_bytes)

    def _reward_work_s(self) -> float:
        """A forward pass of the reward model over every trajectory, its weights read for free."""
        model = self._setup.reward.model
        if model is None:
            return 0.0
        batch = train_batch(self._groups)
        flops = 2.0 * batch.num_tokens * model.active_parameters + model.attention_flops(batch.pairs)
        return self._roofline.work_s(flops, 0.0, self._roofline.corrections.prefill_compute)


def _sampled(trajectory: TrajectoryWork) -> tuple[float, float, float, float]:
    """Tokens that decoding steps sample, of prompts, of KV that they read, and pairs that prompts multiply.

    A prompt's last step samples its first token.
    """
    num_decoded = num_prompt = 0
    kv_read = pairs = 0.0
    for turn, context in zip(trajectory.turns, trajectory.contexts(), strict=True):
        num_decoded += turn.generated_tokens - 1
        num_prompt += turn.new_prompt_tokens
        kv_read += (turn.generated_tokens - 1) * (context + turn.generated_tokens / 2)
        pairs += turn.new_prompt_tokens * (context - turn.new_prompt_tokens / 2)
    return num_decoded, num_prompt, kv_read, pairs


def train_batch(groups: Sequence[GroupWork]) -> TrainBatch:
    """What an optimizer step computes for so many groups, each trajectory once, its segments apart."""
    num_tokens, pairs, longest = 0, 0.0, 0
    for group in groups:
        for trajectory in group.trajectories:
            segment = 0
            for turn in trajectory.turns:
                segment = 0 if turn.resets_context else segment
                added = turn.new_prompt_tokens + turn.generated_tokens
                pairs += added * segment + added * (added + 1) / 2
                segment += added
                num_tokens += added
                longest = max(longest, segment)
    return TrainBatch(num_tokens=num_tokens, pairs=pairs, longest_tokens=longest)


def serving_layouts(setup: SimSetup) -> tuple[ServingCost, ...]:
    """Every tensor-parallel size that the model, the node and the number of devices allow.

    Raises:
        InputError: there is none; says why the largest does not fit.
    """
    roofline = Roofline(setup.device, setup.corrections)
    found, reason = list[ServingCost](), "no device is left to serve"
    for tp in range(1, min(setup.num_devices, setup.device.devices_per_node) + 1):
        try:
            check_tp(setup.model, tp, roofline.device.devices_per_node)
            found.append(ServingCost(setup.model, roofline, tp, setup.element_bytes))
        except InputError as error:
            reason = str(error)
    if not found:
        raise InputError(
            f"{setup.name}: {setup.model.name} fits into no layout of {setup.num_devices} devices: {reason}"
        )
    return tuple(found)
