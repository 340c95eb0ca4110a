"""What must hold of any cost model, as functions of a random case; tests try a few cases, a benchmark many."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import TypeVar

from steelyard.allocation.architecture import Architecture, Experts
from steelyard.allocation.devices import DEVICE_KINDS, DeviceKind
from steelyard.allocation.moving_cost import MovingCost, MovingRates
from steelyard.allocation.roofline import IDEAL, Corrections, Roofline
from steelyard.allocation.serving_cost import ServingCost, StepWork, prompt_work
from steelyard.allocation.training_cost import TrainBatch, TrainingCost, TrainLayout, least_device_s
from steelyard.errors import InputError

_SIZES = (1, 2, 4, 8)
_EXACT = 1e-9
_EDGE_FRAC = 0.15
"""Share of the drawn numbers that are the least or the largest that there may be."""

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, a device, layouts for serving and for training, and work for both."""

    architecture: Architecture
    device: DeviceKind
    corrections: Corrections
    tp: int
    work: StepWork
    more_work: StepWork
    batch: int
    context_tokens: float
    prompt_tokens: tuple[int, int]
    num_replicas: int
    layout: TrainLayout
    train_batch: TrainBatch
    more_train: TrainBatch

    @property
    def roofline(self) -> Roofline:
        """The device with its corrections."""
        return Roofline(self.device, self.corrections)

    def serving(self, tp: int | None = None) -> ServingCost:
        """One replica; of the drawn size if none is given."""
        return ServingCost(self.architecture, self.roofline, self.tp if tp is None else tp)

    def training(self) -> TrainingCost:
        """The trainer."""
        return TrainingCost(self.architecture, self.roofline, self.layout)


def draw_case(rng: Random) -> Case:
    """A random case. Its layouts may be ones that the cost model refuses."""
    return Case(
        architecture=_architecture(rng),
        device=rng.choice(list(DEVICE_KINDS.values())),
        corrections=Corrections(
            prefill_compute=_real(rng, 1, 5),
            decode_compute=_real(rng, 1, 5),
            train_compute=_real(rng, 1, 5),
            memory=_real(rng, 1, 5),
            communication=_real(rng, 1, 5),
            launch=_real(rng, 0, 5),
            overlap=_real(rng, 0, 1),
        ),
        tp=rng.choice(_SIZES),
        work=_work(rng),
        more_work=_work(rng),
        batch=_whole(rng, 1, 4096),
        context_tokens=_real(rng, 0, 100_000),
        prompt_tokens=(_whole(rng, 1, 20_000), _whole(rng, 0, 20_000)),
        num_replicas=_whole(rng, 1, 64),
        layout=_layout(rng),
        train_batch=_train_batch(rng),
        more_train=_train_batch(rng),
    )


def holds(check: Callable[[Case], bool], case: Case) -> bool | None:
    """Whether a property holds of a case; None where the cost model refuses the case's layouts."""
    try:
        return check(case)
    except InputError:
        return None


def _more_work_takes_no_less(case: Case) -> bool:
    cost = case.serving()
    return _at_most(cost.step_s(case.work), cost.step_s(_sum(case.work, case.more_work)))


def _decode_per_device_never_rises_with_tp(case: Case) -> bool:
    one, many = case.serving(1), case.serving()
    return _at_most(many.decode_rate_limit(case.context_tokens), one.decode_rate_limit(case.context_tokens))


def _no_batch_exceeds_the_limit_of_its_rate(case: Case) -> bool:
    cost = case.serving()
    rate = case.batch / cost.decode_step_s(case.batch, case.context_tokens) / case.tp
    return rate <= cost.decode_rate_limit(case.context_tokens) * (1 + 1e-6)


def _nothing_is_faster_than_the_roofline(case: Case) -> bool:
    ideal = ServingCost(case.architecture, Roofline(case.device, IDEAL), case.tp)
    fields = {name: getattr(case.corrections, name) for name in Corrections.__struct_fields__}
    real = ServingCost(case.architecture, Roofline(case.device, Corrections(**{**fields, "launch": 1.0})), case.tp)
    return _at_most(ideal.step_s(case.work), real.step_s(case.work))


def _a_prompt_in_two_parts_takes_no_less(case: Case) -> bool:
    first, second = case.prompt_tokens
    cost = case.serving()
    pairs = prompt_work(first).prefill_pairs + (prompt_work(second, first).prefill_pairs if second else 0.0)
    in_parts_s = cost.prefill_s(first) + cost.prefill_s(second, first)
    same_pairs = math.isclose(pairs, prompt_work(first + second).prefill_pairs)
    return same_pairs and _at_most(cost.prefill_s(first + second), in_parts_s)


def _a_larger_replica_holds_no_less_kv(case: Case) -> bool:
    return case.serving(1).kv_capacity_tokens <= case.serving().kv_capacity_tokens


def _utilisation_is_at_most_one(case: Case) -> bool:
    return 0.0 < case.training().utilisation(case.train_batch) <= 1.0 + _EXACT


def _a_larger_batch_takes_no_less(case: Case) -> bool:
    cost, one, more = case.training(), case.train_batch, case.more_train
    both = TrainBatch(
        num_tokens=one.num_tokens + more.num_tokens,
        pairs=one.pairs + more.pairs,
        longest_tokens=max(one.longest_tokens, more.longest_tokens),
    )
    return _at_most(cost.step_s(one), cost.step_s(both))


def _no_layout_trains_with_less_device_time_than_the_least(case: Case) -> bool:
    least_s = least_device_s(case.architecture, case.roofline, case.train_batch)
    return _at_most(least_s, case.training().step_s(case.train_batch) * case.layout.num_devices)


def _more_replicas_are_published_to_no_sooner(case: Case) -> bool:
    cost, moving = case.serving(), MovingCost(case.architecture, case.roofline, MovingRates())
    return moving.publish_s(cost, case.num_replicas + 1) >= moving.publish_s(cost, case.num_replicas)


def _a_switch_takes_longer_than_loading(case: Case) -> bool:
    cost, moving = case.serving(), MovingCost(case.architecture, case.roofline, MovingRates())
    return moving.switch_s(cost) > moving.load_s(cost) + moving.swap_s(cost)


def _a_network_moves_bytes_at_its_rate_in_bytes(case: Case) -> bool:
    num_bytes = 1e9 * case.num_replicas
    return case.roofline.transfer_s(num_bytes) * case.device.network_bytes_per_s >= num_bytes * (1 - _EXACT)


PROPERTIES: Mapping[str, Callable[[Case], bool]] = {
    "more work takes no less time": _more_work_takes_no_less,
    "decode per device never rises with tp, batch and memory unlimited": _decode_per_device_never_rises_with_tp,
    "no batch exceeds the limit of its decode rate": _no_batch_exceeds_the_limit_of_its_rate,
    "nothing is faster than the roofline": _nothing_is_faster_than_the_roofline,
    "a prompt in two parts is as much attention, in no less time": _a_prompt_in_two_parts_takes_no_less,
    "a larger replica holds no less KV": _a_larger_replica_holds_no_less_kv,
    "model FLOPs utilisation is at most 1": _utilisation_is_at_most_one,
    "a larger training batch takes no less time": _a_larger_batch_takes_no_less,
    "no layout trains with less device time than the least": _no_layout_trains_with_less_device_time_than_the_least,
    "more replicas are published to no sooner": _more_replicas_are_published_to_no_sooner,
    "a switch of roles takes longer than loading": _a_switch_takes_longer_than_loading,
    "a network moves bytes, not bits": _a_network_moves_bytes_at_its_rate_in_bytes,
}
"""By what they say."""


def _at_most(least: float, most: float) -> bool:
    return least <= most * (1 + _EXACT)


def _sum(one: StepWork, more: StepWork) -> StepWork:
    return StepWork(**{name: getattr(one, name) + getattr(more, name) for name in StepWork.__struct_fields__})


def _real(rng: Random, least: float, most: float) -> float:
    if rng.random() < _EDGE_FRAC:
        return float(rng.choice((least, most)))
    return rng.uniform(least, most)


def _whole(rng: Random, least: int, most: int) -> int:
    if rng.random() < _EDGE_FRAC:
        return rng.choice((least, most))
    # As many small ones as large ones.
    return round(math.exp(rng.uniform(math.log(least + 1), math.log(most + 1)))) - 1 if least < most else least


def _architecture(rng: Random) -> Architecture:
    kv_heads, num_layers = rng.choice(_SIZES), _whole(rng, 2, 96)
    experts = None
    if rng.random() < 0.5:
        num_experts = rng.choice((8, 16, 64, 128))
        experts = Experts(
            num_layers=rng.randint(1, num_layers),
            num_experts=num_experts,
            num_per_token=rng.randint(1, 8),
            intermediate_size=_whole(rng, 1, 16) * 128,
        )
    return Architecture(
        name="random",
        num_layers=num_layers,
        hidden_size=_whole(rng, 1, 64) * 128,
        intermediate_size=_whole(rng, 1, 200) * 128,
        num_heads=kv_heads * rng.choice(_SIZES),
        num_kv_heads=kv_heads,
        head_dim=rng.choice((64, 128)),
        vocab_size=_whole(rng, 1000, 200_000),
        is_tied=rng.random() < 0.5,
        experts=experts,
    )


def _work(rng: Random) -> StepWork:
    return StepWork(
        num_decoding=_whole(rng, 0, 512),
        kv_tokens=_real(rng, 0, 1e6),
        prefill_tokens=_whole(rng, 0, 8192),
        prefill_pairs=_real(rng, 0, 1e8),
        num_prompts=_whole(rng, 0, 8),
    )


def _layout(rng: Random) -> TrainLayout:
    dp = rng.choice(_SIZES)
    return TrainLayout(
        tp=rng.choice(_SIZES),
        pp=rng.choice((1, 2, 4)),
        dp=dp,
        cp=rng.choice((1, 2)),
        ep=rng.choice([ep for ep in _SIZES if dp % ep == 0]),
        micro_batch_tokens=_whole(rng, 1, 64) * 1024,
        recompute=rng.random() < 0.5,
    )


def _train_batch(rng: Random) -> TrainBatch:
    length, number = _whole(rng, 1, 1024), _whole(rng, 1, 2000)
    return TrainBatch(num_tokens=length * number, pairs=number * length * (length + 1) / 2, longest_tokens=length)
