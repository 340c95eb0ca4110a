"""The planner's answers by looking at every split that there is, and random small instances to hold them against.

Written apart from the planner on purpose: the same stated model (:mod:`steelyard.allocation.stage_rates`), evaluated
for one split after the other from the cost model itself, without tables, knapsacks or searches over periods.
"""

import math
import random
from collections.abc import Iterator, Sequence
from itertools import product

import numpy as np
import numpy.typing as npt

from steelyard.allocation.architecture import Architecture, Experts
from steelyard.allocation.cluster_model import ClusterModel
from steelyard.allocation.devices import DEVICE_KINDS
from steelyard.allocation.moving_cost import MovingCost, MovingRates
from steelyard.allocation.roofline import Corrections, Roofline
from steelyard.allocation.serving_cost import ServingCost, StepWork
from steelyard.allocation.snapshot import Limits, ReplicaSize, Split, split_of
from steelyard.allocation.training_cost import TrainBatch, TrainingCost, TrainLayout
from steelyard.allocation.work_sketch import GroupFacts, TrajectoryFacts, facts_of
from steelyard.allocation.workload import TrajectoryWork, TurnWork
from steelyard.errors import InputError
from steelyard.types.record import Record

Floats = npt.NDArray[np.float64]
_NUM_PACES = 96
_FAR = 1 << 20


class PlanInstance(Record, frozen=True, kw_only=True):
    """A cluster, what no plan may leave, and the work."""

    model: ClusterModel
    limits: Limits
    groups: tuple[GroupFacts, ...]


def random_instance(rng: random.Random, max_devices: int = 12) -> PlanInstance:
    """Devices, model, rules and work at random; not always one for which there is a plan."""
    total = rng.randint(2, max_devices)
    architecture, reward = _random_architecture(rng), rng.random() < 0.3
    size = rng.randint(1, 4)
    model = ClusterModel(
        device=DEVICE_KINDS[rng.choice(("A100", "A800", "H100", "H200", "CPU"))],
        architecture=architecture,
        groups_per_batch=rng.randint(1, 8),
        group_size=size,
        max_policy_lag=rng.choice((0, 0, 1, 2, 3)),
        corrections=Corrections(overlap=rng.choice((0.0, 0.7, 1.0)), memory=rng.uniform(1.0, 2.0)),
        rates=MovingRates(storage_bytes_per_s=10 ** rng.uniform(8.5, 10.5)),
        max_running=rng.choice((2, 16, 256)),
        max_live=rng.choice((None, None, rng.randint(1, 64))),
        tool_slots=rng.choice((None, rng.randint(1, 32))),
        start_s=rng.choice((0.0, 2.0)),
        reward_function_s=rng.choice((0.0, 0.5)),
        reward_slots=None if reward else rng.choice((None, 4)),
        reward_model=_random_architecture(rng) if reward else None,
        recompute_kv=rng.random() < 0.5,
    )
    least = 1 if reward else 0
    limits = Limits(
        total=total,
        min_rollout=rng.choice((0, 1, min(2, total - 1))),
        min_train=rng.choice((0, 1)),
        min_reward=min(least, max(0, total - 3)),
        max_rollout=rng.choice((None, None, max(2, total - 2))),
        max_train=rng.choice((None, None, max(1, total - 3))),
    )
    groups = tuple(
        GroupFacts(step=rng.randint(0, 3), members=tuple(_random_facts(rng) for _ in range(size)))
        for _ in range(rng.randint(1, 8))
    )
    return PlanInstance(model=model, limits=limits, groups=groups)


def _random_architecture(rng: random.Random) -> Architecture:
    heads = rng.choice((8, 12, 20, 28, 32))
    experts = Experts(num_layers=8, num_experts=16, num_per_token=2, intermediate_size=512)
    return Architecture(
        name="random",
        num_layers=rng.choice((8, 24, 48)),
        hidden_size=heads * 64,
        intermediate_size=heads * rng.choice((128, 512)),
        num_heads=heads,
        num_kv_heads=heads // rng.choice((1, 2, 4)),
        head_dim=64,
        vocab_size=rng.choice((1000, 50_000)),
        experts=experts if rng.random() < 0.2 else None,
    )


def _random_facts(rng: random.Random) -> TrajectoryFacts:
    turns = tuple(
        TurnWork(
            new_prompt_tokens=rng.randint(1, 2000),
            generated_tokens=max(1, round(rng.lognormvariate(4.0, 1.0))),
            tool_s=rng.choice((0.0, rng.expovariate(1.0))),
        )
        for _ in range(rng.randint(1, 6))
    )
    return facts_of(TrajectoryWork(turns=turns))


class ExhaustivePlan:
    """Every split of one instance, all trajectories counted alike.

    Raises:
        InputError: the model fits nowhere.
    """

    def __init__(self, instance: PlanInstance) -> None:
        self._model, self._limits = instance.model, instance.limits
        self._groups = [list(group.members) for group in instance.groups]
        self._members = [member for group in self._groups for member in group]
        self._roofline = Roofline(self._model.device, self._model.corrections)
        model = self._model
        self._moving = MovingCost(model.architecture, self._roofline, model.rates, model.element_bytes)
        self._costs = dict(self._fitting())
        if not self._costs:
            raise InputError("the model must fit into a replica")
        self._steps = {tp: self._steps_s(cost) for tp, cost in self._costs.items()}
        low = min(table[0][1] for table in self._steps.values())
        high = max(table[-1][1] for table in self._steps.values())
        self._paces = np.geomspace(low, high, _NUM_PACES)
        self._paths = {tp: self._path(tp) for tp in self._costs}
        self._rates = {tp: self._rate(tp) for tp in self._costs}
        self._train = dict[int, float]()
        for number in range(1, self._limits.total + 1):
            self._train[number] = self._train_s(number)

    def best(self) -> tuple[float, Split] | None:
        """The shortest period of any split within the limits, and one that has it; None: there is none."""
        found: tuple[float, Split] | None = None
        for sizes in self._pools():
            rollout = sum(size.tp * size.count for size in sizes)
            for train in range(1, self._limits.total - rollout + 1):
                for reward in range(self._limits.total - rollout - train + 1):
                    split = split_of(sizes, train, reward)
                    if self._limits.broken_by(split) is None:
                        period_s = self.period_s(split)
                        if period_s < math.inf and (found is None or period_s < found[0]):
                            found = (period_s, split)
        return found

    def period_s(self, split: Split) -> float:
        """Of one split; infinite where it cannot do the work."""
        model, lag, least = self._model, self._model.max_policy_lag, min(size.tp for size in split.sizes)
        step_s, score_s = self._train[split.train], self._score_s()
        if math.isinf(step_s) or (model.reward_model is not None and split.reward == 0):
            return math.inf
        rate = np.zeros(_NUM_PACES)
        for size in split.sizes:
            rate = rate + size.count * self._rates[size.tp]
        batch = model.groups_per_batch * model.group_size
        with np.errstate(divide="ignore"):
            sampled_s = self._mean([one.generated_tokens for one in self._members]) * batch / rate
        load_s = self._moving.load_s(self._costs[least], math.ceil(split.rollout / least))
        swap_s, write_s = self._moving.swap_s(self._costs[least]), self._moving.write_s()
        ready_s = write_s + load_s + swap_s
        slowest_s, mean_s = self._paths[least]
        if lag:
            pool_s = np.maximum(sampled_s + swap_s, (slowest_s + ready_s + step_s) / (lag + 1))
        else:
            pool_s = np.maximum(sampled_s, slowest_s) + ready_s + step_s
        others = [step_s, write_s, load_s + swap_s]
        if model.tool_slots is not None:
            others.append(self._mean([one.tool_s for one in self._members]) * batch / model.tool_slots)
        if model.reward_slots is not None:
            others.append(model.reward_function_s * batch / model.reward_slots)
        if model.reward_model is not None:
            others.append(score_s * batch / split.reward)
        if model.max_live is not None:
            pool_s = np.maximum(pool_s, mean_s * batch / model.max_live)
        return max(float(pool_s.min()), *others)

    def _pools(self) -> Iterator[list[ReplicaSize]]:
        """Every multiset of sizes that leaves a device for training."""
        sizes = sorted(self._costs)
        for counts in product(*(range((self._limits.total - 1) // tp + 1) for tp in sizes)):
            if 0 < sum(tp * count for tp, count in zip(sizes, counts, strict=True)) < self._limits.total:
                yield [ReplicaSize(tp=tp, count=count) for tp, count in zip(sizes, counts, strict=True) if count]

    def _fitting(self) -> Iterator[tuple[int, ServingCost]]:
        model = self._model
        longest = max(one.longest_context_tokens for one in self._members)
        for tp in range(1, min(self._limits.total, model.device.devices_per_node) + 1):
            try:
                cost = ServingCost(model.architecture, self._roofline, tp, model.element_bytes)
            except InputError:
                continue
            if cost.kv_capacity_tokens >= longest:
                yield tp, cost

    def _mean(self, values: Sequence[float]) -> float:
        return sum(values) / len(values)

    def _context(self) -> tuple[float, float]:
        """Mean context of decoded tokens, and what their sequences grow to."""
        decoded = sum(one.decoded_tokens for one in self._members)
        if decoded == 0:
            return (self._mean([one.longest_context_tokens for one in self._members]),) * 2
        held = sum(one.decoded_tokens * one.longest_context_tokens for one in self._members)
        return sum(one.kv_read_tokens for one in self._members) / decoded, held / decoded

    def _prompt_s(self, cost: ServingCost) -> tuple[float, float]:
        """What prompts add to a step that decodes: for a token, and for a pair."""
        one = cost.step_s(StepWork(num_decoding=1, kv_tokens=1.0))

        def work(pairs: float) -> float:
            wanted = StepWork(num_decoding=1, kv_tokens=1.0, prefill_tokens=_FAR, prefill_pairs=pairs, num_prompts=1)
            return cost.step_s(wanted) - one

        return work(0.0) / _FAR, (work(float(_FAR) * _FAR) - work(0.0)) / _FAR / _FAR

    def _prompts_s(self, cost: ServingCost) -> list[float]:
        token_s, pair_s = self._prompt_s(cost)
        return [one.prompt_tokens * token_s + one.prompt_pairs * pair_s for one in self._members]

    def _steps_s(self, cost: ServingCost) -> list[tuple[float, float]]:
        """Batches with the seconds of their step."""
        context, held = self._context()
        most = max(1.0, min(float(self._model.max_running), cost.kv_capacity_tokens / held))
        a_token_s = self._mean(self._prompts_s(cost)) / self._mean([one.generated_tokens for one in self._members])
        batches = [1.0 + index / 4 for index in range(60)] + [float(n) for n in range(16, 64)]
        batches += [64.0 * 64.0 ** (index / 159) for index in range(160)]
        looked_at = [batch for batch in batches if batch < most] + [most]
        return [(n, cost.decode_step_s(n, context) + n * a_token_s) for n in looked_at]  # type: ignore[arg-type]

    def _path(self, tp: int) -> tuple[Floats, Floats]:
        """By pace: the slowest of a batch on average over all batches that may be drawn, and the mean."""
        model, prompts_s = self._model, self._prompts_s(self._costs[tp])
        fixed = model.start_s + model.end_s + self._score_s()
        alone = [
            [one.generated_tokens * self._paces + one.tool_s + prompt_s + fixed]
            for one, prompt_s in zip(self._members, prompts_s, strict=True)
        ]
        mean_s = np.sum(alone, axis=0)[0] / len(alone)
        starts, largest = 0, list[Floats]()
        for group in self._groups:
            largest.append(np.max(alone[starts : starts + len(group)], axis=0)[0])
            starts += len(group)
        ordered, number = np.sort(largest, axis=0), len(largest)
        slowest_s = np.zeros(_NUM_PACES)
        for place in range(number):
            chance = ((place + 1) / number) ** model.groups_per_batch - (place / number) ** model.groups_per_batch
            slowest_s = slowest_s + chance * ordered[place]
        return slowest_s + model.max_policy_lag * self._moving.swap_s(self._costs[tp]), mean_s

    def _rate(self, tp: int) -> Floats:
        """Tokens a second of a replica by pace."""
        model, context = self._model, self._context()[0]
        token_s, pair_s = self._prompt_s(self._costs[tp])
        slowest_s, mean_s = self._paths[tp]
        again_s = np.zeros(_NUM_PACES)
        if model.recompute_kv:
            one_s = context * token_s + context * context / 2 * pair_s
            again_s = model.max_policy_lag * mean_s / slowest_s * one_s
            again_s = again_s / self._mean([one.generated_tokens for one in self._members])
        rates = np.zeros(_NUM_PACES)
        for batch, step_s in self._steps[tp]:
            taken_s = step_s + batch * again_s
            rates = np.where(taken_s <= self._paces, np.maximum(rates, batch / taken_s), rates)
        return rates

    def _score_s(self) -> float:
        model = self._model
        if model.reward_model is None:
            return model.reward_function_s
        tokens = [one.trained_tokens for one in self._members]
        work = StepWork(
            prefill_tokens=math.ceil(round(self._mean(tokens), 6)),
            prefill_pairs=self._mean([number**2 for number in tokens]) / 2,
            num_prompts=1,
        )
        cost = ServingCost(model.reward_model, self._roofline, 1, model.element_bytes)
        return cost.step_s(work) + model.reward_function_s

    def _train_s(self, num_devices: int) -> float:
        """The fastest layout of so many devices or fewer."""
        model, members = self._model, self._members
        number = model.groups_per_batch * model.group_size
        batch = TrainBatch(
            num_tokens=math.ceil(round(self._mean([one.trained_tokens for one in members]) * number, 6)),
            pairs=self._mean([one.train_pairs for one in members]) * number,
            longest_tokens=max(one.longest_train_tokens for one in members),
        )
        before_s = self._train[num_devices - 1] if num_devices > 1 else math.inf
        here_s = fastest_step_s(model.architecture, self._roofline, batch, num_devices, model.element_bytes)
        return min(before_s, here_s)


def fastest_step_s(
    architecture: Architecture, roofline: Roofline, batch: TrainBatch, num_devices: int, element_bytes: int = 2
) -> float:
    """An optimizer step in the fastest layout of exactly so many devices; infinite where none fits."""
    micro, sizes, best_s = 4096, (1, 2, 4, 8, 16), math.inf
    while micro < batch.longest_tokens:
        micro *= 2
    for tp, pp, cp, ep in product(sizes, sizes, (1, 2, 4), sizes if architecture.experts else (1,)):
        dp = num_devices // (tp * pp * cp)
        if tp * pp * cp * dp != num_devices or dp % ep:
            continue
        for recompute in (True, False):
            layout = TrainLayout(tp=tp, pp=pp, dp=dp, cp=cp, ep=ep, micro_batch_tokens=micro, recompute=recompute)
            try:
                cost = TrainingCost(architecture, roofline, layout, element_bytes)
            except InputError:
                continue
            best_s = min(best_s, cost.step_s(batch))
    return best_s
