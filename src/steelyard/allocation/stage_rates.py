"""The planner's model of steady rates: what a training batch takes in every stage, for every split at once.

A *period* is the time from one optimizer step to the next. With ``S`` the step's seconds, ``P`` from its end until the
first replica serves its version, ``L`` the lag bound, ``B`` the groups of a batch, all in seconds a batch::

    rollout   need / A + swap                the pool samples ``need`` tokens at ``A`` a second, and stands still while
                                             weights change
    path      (W + P + S) / (L + 1)          the slowest member of a batch's groups takes ``W``: its step waits for it
    train     S
    tools     tool seconds over slots
    reward    scoring seconds over devices or slots
    publish   the slower of writing a version and of loading and taking it in
    live      mean seconds of a trajectory times the batch over the attempts that may be under way

    period  = the largest of them;      with L = 0:  max(W, need / A) + P + S in the place of rollout and path

``A`` and ``W`` hang together by the *pace*: seconds from a sequence's token to its next. A replica of ``t`` devices
whose batch is ``n`` has the pace of its step: decoding ``n`` sequences at the mean context, and the prompts that come
with so many tokens (those of turns, and the contexts that are computed again when weights change). At pace ``p`` it
holds the largest batch whose step is no longer, within its KV memory; ``A`` is the sum over replicas: additive, so that
the best multiset of sizes is a knapsack. ``W`` grows with the pace, ``need / A`` falls: the best pace is where they
meet. By Little's law a pool holds no more sequences than are admitted; here the path term says so: what needs more than
``L + 1`` periods is not admitted yet. Paces are looked at on a grid of :data:`NUM_PACES`.

A pool's loads share the store as if all of its replicas were of its smallest size.
"""

import math
from collections.abc import Mapping

import msgspec
import numpy as np
import numpy.typing as npt

from steelyard.allocation.architecture import check_tp
from steelyard.allocation.cluster_model import ClusterModel
from steelyard.allocation.moving_cost import MovingCost
from steelyard.allocation.roofline import Roofline
from steelyard.allocation.serving_cost import ServingCost, StepWork
from steelyard.allocation.snapshot import Split
from steelyard.allocation.train_table import TrainTable
from steelyard.allocation.work_estimate import WorkEstimate, whole_tokens
from steelyard.errors import InputError
from steelyard.types.record import Record

Floats = npt.NDArray[np.float64]

NUM_PACES = 96
_MANY = 1 << 20


class Factors(Record, frozen=True, kw_only=True):
    """By what observed times exceed predicted ones. ``by_size``: of pools whose smallest replicas have that TP size, in
    the place of ``rollout``; where one was observed it knows more than the rest do."""

    rollout: float = 1.0
    train: float = 1.0
    by_size: Mapping[int, float] = msgspec.field(default_factory=dict)

    def of_size(self, tp: int) -> float:
        """Of replicas of ``tp`` devices."""
        return self.by_size.get(tp, self.rollout)


class Periods(Record, frozen=True, kw_only=True):
    """Seconds a training batch, by stage; see the module's text. ``pace_s``: from token to token."""

    rollout_s: float
    path_s: float
    train_s: float
    tools_s: float
    reward_s: float
    publish_s: float
    live_s: float
    pace_s: float
    period_s: float

    @property
    def bottleneck(self) -> str:
        """The stage that takes longest."""
        return max(STAGES, key=lambda name: float(getattr(self, f"{name}_s")))


STAGES = ("rollout", "path", "train", "tools", "reward", "publish", "live")
"""The fields of :class:`Periods` of which the largest is the period, where weights may lag."""


class Size:
    """What a replica of one size does at every pace.

    Attributes:
        tokens_per_s: by pace; 0 where even a single sequence is slower.
        prompt_token_s, prompt_pair_s: what a prompt adds to a step, for each token and each pair of tokens.
    """

    def __init__(self, cost: ServingCost, kv_tokens: int) -> None:
        self.cost, self.kv_tokens = cost, kv_tokens
        alone = StepWork(num_decoding=1, kv_tokens=1.0)
        base_s = cost.step_s(alone)

        def added_s(pairs: float) -> float:
            work = StepWork(
                num_decoding=1, kv_tokens=1.0, prefill_tokens=_MANY, prefill_pairs=pairs * _MANY, num_prompts=1
            )
            return cost.step_s(work) - base_s

        without_s = added_s(0.0)
        self.prompt_token_s = without_s / _MANY
        self.prompt_pair_s = (added_s(float(_MANY)) - without_s) / _MANY / _MANY
        self.tokens_per_s: Floats = np.zeros(0)


class StageRates:
    """The model for one cluster, one estimate of the work and one number of devices.

    Attributes:
        sizes: TP sizes that hold the work's longest context, in rising order.
        paces_s: the grid.
        need_tokens: that a batch samples.
        by_size: what replicas do.
        paths_s: by smallest size of a pool: seconds of the slowest member of a batch at each pace, score included.
        mean_paths_s: the same of a trajectory on average.
        train_s: by number of devices.

    Raises:
        InputError: the model fits into no replica, or training into no layout; says why.
    """

    def __init__(
        self, model: ClusterModel, work: WorkEstimate, num_devices: int, factors: Factors | None = None
    ) -> None:
        self.model, self.work, self.num_devices = model, work, num_devices
        self.factors = factors if factors is not None else Factors()
        self._roofline = Roofline(model.device, model.corrections)
        moving = MovingCost(model.architecture, self._roofline, model.rates, model.element_bytes)
        self.by_size = self._replica_sizes()
        self.sizes = tuple(self.by_size)
        self.need_tokens = work.mean(work.generated_tokens) * model.batch_trajectories
        self._batches = {tp: self._grid(size) for tp, size in self.by_size.items()}
        steps = {tp: self._steps_s(tp) for tp in self.sizes}
        self.paces_s = np.geomspace(
            min(float(one[0]) for one in steps.values()), max(float(one[-1]) for one in steps.values()), NUM_PACES
        )
        self.paths_s, self.mean_paths_s = dict[int, Floats](), dict[int, Floats]()
        self.switch_s, self._swap_s, self._load = dict[int, float](), dict[int, float](), dict[int, tuple[float, ...]]()
        self._write_s = moving.write_s()
        self._reward = self._reward_s()
        for tp, size in self.by_size.items():
            self._swap_s[tp] = moving.swap_s(size.cost)
            self.switch_s[tp] = moving.switch_s(size.cost)
            self._load[tp] = _line(moving, size.cost, model.rates.load_overhead_s)
            self.paths_s[tp], self.mean_paths_s[tp] = self._paths(tp)
        for tp, size in self.by_size.items():
            size.tokens_per_s = self._tokens_per_s(tp, steps[tp])
        batch = work.train_batch(model.batch_trajectories)
        self.train_table = TrainTable(model.architecture, self._roofline, batch, num_devices, model.element_bytes)
        self.train_s = self.train_table.step_s * self.factors.train

    # --- replicas -------------------------------------------------------------------------------------

    def _replica_sizes(self) -> dict[int, Size]:
        model, found, reason = self.model, dict[int, Size](), "no device is left to serve"
        longest = max(self.work.longest_context_tokens, float(model.longest_context_tokens))
        for tp in range(1, min(self.num_devices, model.device.devices_per_node) + 1):
            try:
                check_tp(model.architecture, tp, self._roofline.device.devices_per_node)
                cost = ServingCost(model.architecture, self._roofline, tp, model.element_bytes)
            except InputError as error:
                reason = str(error)
                continue
            limit = model.engine.kv_tokens
            kv_tokens = cost.kv_capacity_tokens if limit is None else limit
            if kv_tokens < longest:
                reason = f"at tp = {tp} KV memory holds {kv_tokens} tokens, the longest context is {longest:.0f}"
                continue
            found[tp] = Size(cost, kv_tokens)
        if not found:
            raise InputError(
                f"{model.architecture.name} must fit into a replica of at most {self.num_devices} devices: {reason}"
            )
        return found

    def _grid(self, size: Size) -> Floats:
        """Batches that are looked at: finely where they are small."""
        most = max(1.0, min(float(self.model.max_running), size.kv_tokens / self.work.held_context_tokens))
        grid = np.concatenate([np.arange(1.0, 16.0, 0.25), np.arange(16.0, 64.0), np.geomspace(64.0, 4096.0, 160)])
        return np.append(grid[grid < most], most)

    def _steps_s(self, tp: int) -> Floats:
        """A replica's step at each batch, prompts of turns included."""
        size, work = self.by_size[tp], self.work
        context = work.mean_context_tokens
        decode_s = np.array([size.cost.decode_step_s(batch, context) for batch in self._batches[tp].tolist()])
        a_token_s = work.mean(self._prompts_s(size)) / work.mean(work.generated_tokens)
        return np.asarray((decode_s + self._batches[tp] * a_token_s) * self.factors.of_size(tp))

    def _prompts_s(self, size: Size) -> Floats:
        """What the prompts of each trajectory add to steps."""
        return np.asarray(size.prompt_token_s * self.work.prompt_tokens + size.prompt_pair_s * self.work.prompt_pairs)

    def _tokens_per_s(self, tp: int, steps_s: Floats) -> Floats:
        """At each pace, the most that a batch within it samples; with what is computed again when weights change.

        A trajectory of mean length meets as many changes of weights as its share of the longest path, which meets L.
        """
        size, work, model = self.by_size[tp], self.work, self.model
        again_s = np.zeros(NUM_PACES)
        if model.recompute_kv and model.max_policy_lag:
            context = work.mean_context_tokens
            one_s = (size.prompt_token_s * context + size.prompt_pair_s * context**2 / 2.0) * self.factors.of_size(tp)
            met = model.max_policy_lag * self.mean_paths_s[tp] / self.paths_s[tp]
            again_s = met * one_s / work.mean(work.generated_tokens)
        batches = self._batches[tp][:, None]
        taken_s = steps_s[:, None] + batches * again_s
        return np.asarray(np.where(taken_s <= self.paces_s, batches / taken_s, 0.0).max(axis=0))

    def _paths(self, tp: int) -> tuple[Floats, Floats]:
        """Seconds of the slowest member of a batch, and of a trajectory on average, by pace."""
        work, model = self.work, self.model
        fixed_s = work.tool_s + work.turns * model.engine.call_s + model.start_s + model.end_s
        fixed_s = fixed_s + self._reward[1] + self._prompts_s(self.by_size[tp]) * self.factors.of_size(tp)
        all_s = work.generated_tokens[:, None] * self.paces_s + fixed_s[:, None]
        changes_s = model.max_policy_lag * self._swap_s[tp]
        mean_s = work.mean(work.generated_tokens) * self.paces_s + work.mean(fixed_s)
        return work.slowest(all_s, model.groups_per_batch) + changes_s, mean_s

    def _reward_s(self) -> tuple[float, float]:
        """Device-seconds of scoring a batch, and what one score takes."""
        model, work = self.model, self.work
        if model.reward_model is None:
            return 0.0, model.reward_function_s
        try:
            cost = ServingCost(model.reward_model, self._roofline, 1, model.element_bytes)
        except InputError as error:
            raise InputError(f"reward.model must fit onto one device: {error}") from None
        tokens = work.mean(work.trained_tokens)
        pairs = work.mean(work.trained_tokens**2) / 2.0
        one_s = cost.step_s(StepWork(prefill_tokens=whole_tokens(tokens), prefill_pairs=pairs, num_prompts=1))
        one_s = one_s + model.reward_function_s
        return one_s * model.batch_trajectories, one_s

    # --- periods --------------------------------------------------------------------------------------

    @property
    def fixed_s(self) -> float:
        """What no split changes: tools and graders that are functions."""
        return max(self.tools_s, self._function_s)

    @property
    def tools_s(self) -> float:
        """Tool seconds of a batch over the slots."""
        slots = self.model.tool_slots
        return 0.0 if slots is None else self.work.mean(self.work.tool_s) * self.model.batch_trajectories / slots

    @property
    def _function_s(self) -> float:
        slots, model = self.model.reward_slots, self.model
        return 0.0 if slots is None else model.reward_function_s * model.batch_trajectories / slots

    @property
    def reward_device_s(self) -> float:
        """Device-seconds of scoring a batch; 0 where no model scores."""
        return self._reward[0]

    def live_s(self, tp: int) -> Floats:
        """The period that the limit on live attempts allows, by pace."""
        if self.model.max_live is None:
            return np.zeros(NUM_PACES)
        return np.asarray(self.mean_paths_s[tp] * self.model.batch_trajectories / self.model.max_live)

    def swap_s(self, tp: int) -> float:
        """For so long replicas stand still when weights change."""
        return self._swap_s[tp]

    def ready_s(self, tp: int, num_devices: Floats) -> Floats:
        """From a step's end to the first replica that serves its version, for pools whose smallest size is ``tp``."""
        return np.asarray(self._write_s + self._loads_s(tp, num_devices) + self._swap_s[tp])

    def publish_s(self, tp: int, num_devices: Floats) -> Floats:
        """The slower part of a publication: versions follow each other no faster."""
        return np.maximum(self._write_s, self._loads_s(tp, num_devices) + self._swap_s[tp])

    def _loads_s(self, tp: int, num_devices: Floats) -> Floats:
        overhead_s, alone_s, each_s = self._load[tp]
        return np.asarray(overhead_s + np.maximum(alone_s, each_s * np.ceil(num_devices / tp)))

    def periods(self, split: Split) -> Periods:
        """What a split achieves, at its best pace.

        Raises:
            InputError: a role cannot do its work with so many devices.
        """
        self._check(split)
        tp = min(size.tp for size in split.sizes)
        rate = sum((size.count * self.by_size[size.tp].tokens_per_s for size in split.sizes), np.zeros(NUM_PACES))
        with np.errstate(divide="ignore"):
            sampled_s = self.need_tokens / rate
        train_s, lag = float(self.train_s[split.train]), self.model.max_policy_lag
        pool = np.array(float(split.rollout))
        ready_s, publish_s = float(self.ready_s(tp, pool)), float(self.publish_s(tp, pool))
        reward_s = max(self._function_s, self.reward_device_s / split.reward if split.reward else 0.0)
        live_s = self.live_s(tp)
        if lag:
            rollout_s = sampled_s + self._swap_s[tp]
            path_s = (self.paths_s[tp] + ready_s + train_s) / (lag + 1)
        else:
            rollout_s = sampled_s + ready_s + train_s
            path_s = self.paths_s[tp] + ready_s + train_s
        others_s = max(train_s, self.tools_s, reward_s, publish_s)
        periods_s = np.maximum(np.maximum(rollout_s, path_s), np.maximum(live_s, others_s))
        # Where all paces are alike the slowest that is still best loads the devices least.
        at = int(np.argmin(periods_s))
        return Periods(
            rollout_s=float(rollout_s[at]),
            path_s=float(path_s[at]),
            train_s=train_s,
            tools_s=self.tools_s,
            reward_s=reward_s,
            publish_s=publish_s,
            live_s=float(live_s[at]),
            pace_s=float(self.paces_s[at]),
            period_s=float(periods_s[at]),
        )

    def _check(self, split: Split) -> None:
        unknown = [size.tp for size in split.sizes if size.tp not in self.by_size]
        if unknown:
            fitting = ", ".join(map(str, self.sizes))
            raise InputError(f"rollout_tp must be one that holds the longest context ({fitting}), got {unknown[0]}")
        if not split.sizes:
            raise InputError("rollout must have at least one replica, got none")
        if not 0 < split.train <= self.num_devices or not math.isfinite(self.train_s[split.train]):
            least = self.train_table.least_devices
            raise InputError(f"train must be >= {least}, with which a layout fits, got {split.train}")
        if self.model.reward_model is not None and split.reward < 1:
            raise InputError(f"reward must be >= 1, for {self.model.reward_model.name} to score, got {split.reward}")


def _line(moving: MovingCost, cost: ServingCost, overhead_s: float) -> tuple[float, float, float]:
    """A load as a line: overhead, what it takes alone, and what each replica that loads beside it adds to the store's
    share."""
    return overhead_s, moving.load_s(cost, 0) - overhead_s, (moving.load_s(cost, _MANY) - overhead_s) / _MANY
