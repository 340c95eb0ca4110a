"""Whether a cluster can do the work at all, found out before anything runs, with what would fit."""

from steelyard.allocation.roofline import Roofline
from steelyard.allocation.serving_cost import ServingCost
from steelyard.allocation.snapshot import Limits, Split
from steelyard.errors import InputError
from steelyard.sim.bound import serving_layouts
from steelyard.sim.setup import SimSetup
from steelyard.sim.train_stage import TrainLayouts


def check_fit(setup: SimSetup, split: Split, limits: Limits) -> None:
    """Whether a run can begin with ``split`` and keep within ``limits``.

    Raises:
        InputError: it cannot; names the field, and what would fit.
    """
    broken = limits.broken_by(split)
    if broken is None and split.total > setup.num_devices:
        broken = f"a split must use at most {setup.num_devices} devices, got {split.total}"
    if broken is not None:
        raise InputError(f"{setup.name}: {broken}")
    for field, number in (("split.rollout", split.rollout), ("split.train", split.train)):
        if number < 1:
            raise InputError(f"{setup.name}: {field} must be >= 1, got {number}")
    _check_reward(setup, split, limits)
    for size in split.sizes:
        check_serving(setup, size.tp)
    least = TrainLayouts(setup).least_devices(max(1, limits.min_train))
    if least > limits.min_train:
        raise InputError(
            f"{setup.name}: limits.min_train must be >= {least}, with which training fits, got {limits.min_train}"
        )


def _check_reward(setup: SimSetup, split: Split, limits: Limits) -> None:
    model = setup.reward.model
    if model is None:
        return
    for field, number in (("split.reward", split.reward), ("limits.min_reward", limits.min_reward)):
        if number < 1:
            raise InputError(f"{setup.name}: {field} must be >= 1, for {model.name} to score, got {number}")
    try:
        ServingCost(model, Roofline(setup.device, setup.corrections), 1, setup.element_bytes)
    except InputError as error:
        raise InputError(f"{setup.name}: reward.model must fit onto one device: {error}") from None


def check_serving(setup: SimSetup, tp: int) -> None:
    """Whether every call of the work fits into the KV memory of one replica of ``tp`` devices.

    Raises:
        InputError: it does not, or there can be no such replica; says what would fit.
    """
    layouts = {layout.tp: layout for layout in serving_layouts(setup)}
    limit = setup.engine.kv_tokens
    longest = max(one.longest_context_tokens for group in setup.workload.groups for one in group.trajectories)
    room = {one: cost.kv_capacity_tokens if limit is None else limit for one, cost in layouts.items()}
    if room.get(tp, 0) >= longest:
        return
    fitting = [str(one) for one, tokens in room.items() if tokens >= longest]
    would = f"{' or '.join(fitting)} would fit" if fitting else "none would fit: a smaller context or a larger device"
    if tp not in layouts:
        # Says whether the heads or the memory are in the way.
        try:
            ServingCost(setup.model, Roofline(setup.device, setup.corrections), tp, setup.element_bytes)
        except InputError as error:
            raise InputError(f"{setup.name}: rollout_tp cannot be {tp}: {error}; {would}") from None
    raise InputError(
        f"{setup.name}: rollout_tp must be one with KV memory for the longest context, {longest} tokens, got "
        f"{tp} with room for {room.get(tp, 0)}; {would}"
    )
