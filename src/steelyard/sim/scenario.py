"""A scenario as people write it: devices, model, work, rules and a policy, in one YAML file."""

import random
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import Any, cast

import msgspec

from steelyard.allocation.architecture import Architecture, Experts
from steelyard.allocation.calibration import Calibration
from steelyard.allocation.devices import device_kind
from steelyard.allocation.engine_limits import EngineLimits
from steelyard.allocation.libra import LibraPolicy
from steelyard.allocation.moving_cost import MovingRates
from steelyard.allocation.planner import make_planner
from steelyard.allocation.policies import FixedPolicy, QueuePolicy, RatioPolicy
from steelyard.allocation.roofline import Corrections
from steelyard.allocation.snapshot import Limits, Policy, Split
from steelyard.allocation.synthetic import SyntheticSpec, draw_workload
from steelyard.allocation.workload import Workload
from steelyard.errors import InputError
from steelyard.keys import closest, in_our_words, refuse_unknown_keys
from steelyard.sim.faults import DeviceFailure, FailureRate, Faults, ToolOutage
from steelyard.sim.oracle import find_oracle
from steelyard.sim.setup import RewardWork, SimSetup, cluster_model
from steelyard.types.record import Record

ENTRY_POINTS = "steelyard.policies"

_OURS: Mapping[str, Callable[..., Policy]] = {"fixed": FixedPolicy, "queue": QueuePolicy, "ratio": RatioPolicy}
_OF_A_CLUSTER: Mapping[str, Callable[..., Policy]] = {"libra": LibraPolicy, "planner": make_planner}
"""Policies that are made for one cluster."""

ORACLE = "oracle"


class DevicesPart(Record, frozen=True, kw_only=True):
    """``kind`` is a name that :mod:`steelyard.allocation.devices` knows."""

    kind: str
    total: int


class TracesPart(Record, frozen=True, kw_only=True):
    """A workload from normalised traces. ``tool_s``: for calls that were not timed."""

    path: str
    group_size: int
    tool_s: float | None = None


class RewardPart(Record, frozen=True, kw_only=True):
    """How trajectories are scored; ``model`` is named as the policy's is."""

    function_s: float = 0.0
    slots: int | None = None
    model: str | None = None


class LimitsPart(Record, frozen=True, kw_only=True):
    """What no plan may leave."""

    min_rollout: int = 1
    min_train: int = 1
    min_reward: int = 0
    max_rollout: int | None = None
    max_train: int | None = None


class PolicyPart(Record, frozen=True, kw_only=True):
    """``kind`` is one of ours, or the name of an entry point; ``options`` are its own."""

    kind: str = "fixed"
    options: dict[str, Any] = msgspec.field(default_factory=dict)


class Scenario(Record, frozen=True, kw_only=True):
    """The whole file. Exactly one of ``synthetic`` and ``traces`` says what the work is.

    ``model`` is the name of a built-in architecture, or a Hugging Face directory or ``config.json``.
    ``calibration``: a file of ``steelyard calibrate``; what was measured takes the place of ``corrections``, ``rates``,
    ``engine`` and the device's data sheet.
    """

    name: str
    devices: DevicesPart
    model: str
    split: Split
    steps: int
    groups_per_batch: int
    max_policy_lag: int
    synthetic: SyntheticSpec | None = None
    traces: TracesPart | None = None
    limits: LimitsPart = LimitsPart()
    policy: PolicyPart = PolicyPart()
    reward: RewardPart = RewardPart()
    tool_slots: int | None = None
    start_s: float = 0.0
    end_s: float = 0.0
    max_live: int | None = None
    max_running: int = 256
    max_tokens: int = 32_768
    recompute_kv: bool = True
    corrections: Corrections = Corrections()
    rates: MovingRates = MovingRates()
    outages: tuple[ToolOutage, ...] = ()
    failures: tuple[DeviceFailure, ...] = ()
    failure_rate: FailureRate | None = None
    checkpoint_every: int = 10
    engine: EngineLimits = EngineLimits()
    calibration: str | None = None
    seed: int = 0


def read_scenario(tree: Any, where: str) -> Scenario:
    """The scenario of a parsed YAML file.

    Raises:
        InputError: names the key that is unknown, missing or of a wrong type.
    """
    if not isinstance(tree, dict):
        raise InputError(f"{where} must be a mapping of keys, got {type(tree).__name__}")
    try:
        refuse_unknown_keys(tree, Scenario, "scenario")
        scenario = msgspec.convert(tree, Scenario, strict=False)
    except msgspec.ValidationError as error:
        raise InputError(f"{where}: {in_our_words(str(error))}") from None
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
    if (scenario.synthetic is None) == (scenario.traces is None):
        raise InputError(f"{where}: exactly one of synthetic and traces must be given")
    return scenario


def make_setup(
    scenario: Scenario,
    read_traces: Callable[[TracesPart], Workload],
    read_model: Callable[[str], Architecture] | None = None,
    calibration: Calibration | None = None,
) -> SimSetup:
    """What is simulated.

    Args:
        read_traces: reads the files that ``traces`` names.
        read_model: the architecture that ``model`` or ``reward.model`` names; None: only built-in ones are known.
        calibration: what was measured of this kind of device.

    Raises:
        InputError: names what cannot be, and what would fit.
    """
    if scenario.synthetic is not None:
        workload = draw_workload(scenario.synthetic, scenario.name, random.Random(scenario.seed))
    else:
        assert scenario.traces is not None
        workload = read_traces(scenario.traces).regrouped(scenario.traces.group_size)
    reward, model_of = scenario.reward, read_model or known_model
    setup = SimSetup(
        name=scenario.name,
        device=device_kind(scenario.devices.kind),
        num_devices=scenario.devices.total,
        model=_model(scenario.model, model_of, calibration),
        corrections=scenario.corrections,
        workload=workload,
        num_steps=scenario.steps,
        groups_per_batch=scenario.groups_per_batch,
        max_policy_lag=scenario.max_policy_lag,
        rates=scenario.rates,
        reward=RewardWork(
            function_s=reward.function_s,
            num_slots=reward.slots,
            model=None if reward.model is None else model_of(reward.model),
        ),
        tool_slots=scenario.tool_slots,
        start_s=scenario.start_s,
        end_s=scenario.end_s,
        max_live=scenario.max_live,
        max_running=scenario.max_running,
        max_tokens=scenario.max_tokens,
        recompute_kv=scenario.recompute_kv,
        checkpoint_every=scenario.checkpoint_every,
        faults=Faults(outages=scenario.outages, failures=scenario.failures, failure_rate=scenario.failure_rate),
        engine=scenario.engine,
    )
    return setup if calibration is None else calibrated(setup, calibration)


def calibrated(setup: SimSetup, calibration: Calibration) -> SimSetup:
    """The same with what was measured in the place of what was guessed.

    Raises:
        InputError: it was measured on another kind of device.
    """
    if setup.device.name != calibration.device.name:
        raise InputError(
            f"{setup.name}: devices.kind must be {calibration.device.name}, on which the calibration was measured, got "
            f"{setup.device.name}"
        )
    return msgspec.structs.replace(
        setup,
        device=calibration.device,
        corrections=calibration.corrections,
        rates=calibration.rates,
        engine=calibration.limits,
        max_running=min(setup.max_running, calibration.max_running),
        element_bytes=calibration.element_bytes,
    )


def _model(name: str, model_of: Callable[[str], Architecture], calibration: Calibration | None) -> Architecture:
    """That of the calibration may be named, too."""
    if calibration is not None and name == calibration.model.name:
        return calibration.model
    return model_of(name)


def make_limits(scenario: Scenario) -> Limits:
    """The limits over all devices of the scenario."""
    part = scenario.limits
    return Limits(
        total=scenario.devices.total,
        min_rollout=part.min_rollout,
        min_train=part.min_train,
        min_reward=part.min_reward,
        max_rollout=part.max_rollout,
        max_train=part.max_train,
    )


def policy_of(scenario: Scenario, setup: SimSetup) -> Policy:
    """The scenario's policy; ``oracle`` plays many runs to find out what it does (option ``max_runs``).

    Raises:
        InputError: as :func:`make_policy`; the split cannot be.
    """
    part = scenario.policy
    if part.kind != ORACLE and part.kind not in _OF_A_CLUSTER:
        return make_policy(part)
    try:
        if part.kind in _OF_A_CLUSTER:
            return _OF_A_CLUSTER[part.kind](cluster_model(setup), **part.options)
        return find_oracle(setup, scenario.split, make_limits(scenario), scenario.seed, **part.options).policy
    except TypeError as error:
        raise InputError(f"policy.options must be what {part.kind} takes: {error}") from None


def make_policy(part: PolicyPart) -> Policy:
    """The policy by name, ours or one of another package (entry points of the group ``steelyard.policies``).

    Not those that are made for one setup: see :func:`policy_of`.

    Raises:
        InputError: there is none of that name, its package cannot be imported, or it does not take such options.
    """
    found = _OURS.get(part.kind) or _outside_policy(part.kind)
    try:
        policy = found(**part.options)
    except TypeError as error:
        raise InputError(f"policy.options must be what {part.kind} takes: {error}") from None
    if not callable(getattr(policy, "decide", None)):
        raise InputError(f"policy {part.kind} must have a method decide(snapshot), got {policy!r}")
    return policy


def policy_names() -> tuple[str, ...]:
    """All that can be chosen: ours, then those of other packages. A name of ours is never taken by another."""
    ours = (*_OURS, *_OF_A_CLUSTER, ORACLE)
    outside = sorted({point.name for point in entry_points(group=ENTRY_POINTS)} - set(ours))
    return (*ours, *outside)


def _outside_policy(name: str) -> Callable[..., Policy]:
    points = [point for point in entry_points(group=ENTRY_POINTS) if point.name == name]
    if not points:
        names = policy_names()
        raise InputError(
            f"policy.kind must be one of {', '.join(names)}, got {name!r}; the nearest is {closest(name, names)}"
        )
    places = sorted({point.value for point in points})
    if len(places) > 1:
        raise InputError(f"policy.kind {name} must be of one package, but {' and '.join(places)} both have it")
    try:
        found: object = points[0].load()
    except Exception as error:  # importing another package's module may raise anything
        raise InputError(
            f"policy {name} must be importable from {places[0]}, got {type(error).__name__}: {error}"
        ) from error
    if not callable(found):
        raise InputError(f"policy {name} must be a class or function at {places[0]}, got {found!r}")
    return cast("Callable[..., Policy]", found)


def known_model(name: str) -> Architecture:
    """A built-in architecture.

    Raises:
        InputError: there is none of that name.
    """
    found = KNOWN_MODELS.get(name)
    if found is None:
        raise InputError(f"model must be one of {', '.join(KNOWN_MODELS)}, got {name!r}")
    return found


def _dense(name: str, layers: int, hidden: int, inner: int, heads: int, kv_heads: int, vocab: int) -> Architecture:
    return Architecture(
        name=name,
        num_layers=layers,
        hidden_size=hidden,
        intermediate_size=inner,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=128,
        vocab_size=vocab,
    )


# Sizes as in the config.json that each model is published with.
_MODELS = (
    _dense("llama-3.1-8b", 32, 4096, 14336, 32, 8, 128256),
    _dense("llama-3.1-70b", 80, 8192, 28672, 64, 8, 128256),
    _dense("qwen2.5-7b", 28, 3584, 18944, 28, 4, 152064),
    _dense("qwen2.5-14b", 48, 5120, 13824, 40, 8, 152064),
    _dense("qwen2.5-32b", 64, 5120, 27648, 40, 8, 152064),
    Architecture(
        name="qwen3-30b-a3b",
        num_layers=48,
        hidden_size=2048,
        intermediate_size=6144,
        num_heads=32,
        num_kv_heads=4,
        head_dim=128,
        vocab_size=151936,
        experts=Experts(num_layers=48, num_experts=128, num_per_token=8, intermediate_size=768),
    ),
)
KNOWN_MODELS: Mapping[str, Architecture] = {model.name: model for model in _MODELS}
"""Architectures that a scenario may name."""
