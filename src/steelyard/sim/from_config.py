"""A scenario from the configuration of a run: what it says is taken, what it does not say is assumed and told.

A configuration says how many devices have which role, how a batch is made and how far attempts may go. It does not say
of which kind devices are, nor how long trajectories will be. Both are assumed here, in words for people, and can be
given instead.
"""

from steelyard.allocation.architecture import Architecture
from steelyard.allocation.devices import device_kind
from steelyard.allocation.roofline import Corrections, Roofline
from steelyard.allocation.serving_cost import ServingCost
from steelyard.allocation.snapshot import Split
from steelyard.allocation.synthetic import LengthSpec, SyntheticSpec
from steelyard.config import Config
from steelyard.errors import InputError
from steelyard.sim.scenario import DevicesPart, LimitsPart, PolicyPart, RewardPart, Scenario, TracesPart
from steelyard.types.record import Record

DEFAULT_MODEL = "qwen2.5-7b"
"""Simulated where a configuration names a model that is not there."""
DEFAULT_DEVICE = "H100"

_MOST_GROUPS = 2_000
"""Drawn at most; a longer run meets them again."""
_TOOL_MEDIAN_FRAC = 0.2


class Assumed(Record, frozen=True, kw_only=True):
    """A scenario, and one line for each thing that the configuration does not say."""

    scenario: Scenario
    notes: tuple[str, ...]


class Choices(Record, frozen=True, kw_only=True):
    """What stands beside a configuration.

    Attributes:
        name: of the scenario.
        model: how the policy's architecture is named in the scenario; ``reward_model`` likewise, None: a function.
        architecture: of ``model``, to see how many devices a replica takes.
        device: the kind of all devices; None: :data:`DEFAULT_DEVICE`, which is told.
        traces: the work; None: it is drawn.
        notes: what was assumed already.
    """

    name: str
    model: str
    architecture: Architecture
    reward_model: str | None = None
    device: str | None = None
    traces: TracesPart | None = None
    notes: tuple[str, ...] = ()


def scenario_of(config: Config, choices: Choices) -> Assumed:
    """The scenario that a configuration describes.

    Raises:
        InputError: it describes none; names the key.
    """
    notes = list(choices.notes)
    if choices.device is None:
        notes.append(f"devices are taken to be {DEFAULT_DEVICE}s (--device KIND says otherwise)")
    device = choices.device or DEFAULT_DEVICE
    resources = config.resources
    used = resources.rollout_gpus + resources.train_gpus + resources.reward_gpus
    total = resources.total_gpus if resources.total_gpus is not None else used
    if total < used:
        raise InputError(f"resources.total_gpus must be >= {used}, the sum of the roles, got {total}")
    if choices.reward_model is not None and resources.reward_gpus < 1:
        raise InputError(f"resources.reward_gpus must be >= 1 for model.reward, got {resources.reward_gpus}")
    if choices.reward_model is None and resources.reward_gpus:
        notes.append(f"no model.reward is given, so the {resources.reward_gpus} reward devices stand idle")
    tp = _rollout_tp(choices.architecture, device, resources.rollout_gpus)
    if tp > 1:
        notes.append(f"a replica takes {tp} devices, for the model does not fit into fewer")
    if config.weights.mode == "pinned":
        notes.append(
            "a replica goes over to new weights in place, and keeps the KV of its attempts (weights.mode pinned)"
        )
    if choices.traces is None:
        notes.append(_words_of_work(config))
    scenario = Scenario(
        name=choices.name,
        devices=DevicesPart(kind=device, total=total),
        model=choices.model,
        split=Split(
            rollout=resources.rollout_gpus, train=resources.train_gpus, reward=resources.reward_gpus, rollout_tp=tp
        ),
        steps=config.train.max_steps,
        groups_per_batch=config.groups_per_batch,
        max_policy_lag=config.admission.max_policy_lag,
        synthetic=_drawn_work(config) if choices.traces is None else None,
        traces=choices.traces,
        limits=_limits(config),
        policy=_policy(config),
        reward=_reward(config, choices.reward_model),
        max_live=config.rollout.max_concurrent * max(1, config.rollout.num_workers),
        max_running=config.inference.max_running,
        max_tokens=config.rollout.max_tokens,
        # A pinned attempt keeps its version and so its KV; computing that again is what segmented attempts pay.
        recompute_kv=config.weights.mode == "segmented" and config.weights.kv == "recompute",
        seed=config.run.seed,
    )
    return Assumed(scenario=scenario, notes=tuple(notes))


def _policy(config: Config) -> PolicyPart:
    allocation, scheduler = config.allocation, config.scheduler
    kind = allocation.policy or ("queue" if scheduler.enabled else "fixed")
    options = dict(allocation.options)
    if kind == "queue":
        options = {
            "adjust_interval_steps": scheduler.adjust_interval_steps,
            "queue_weight": scheduler.queue_weight,
            **options,
        }
    return PolicyPart(kind=kind, options=options)


def _limits(config: Config) -> LimitsPart:
    """Those of the scheduler; where nobody moves devices, the split itself is within its limits."""
    resources, scheduler = config.resources, config.scheduler
    if _policy(config).kind == "fixed":
        return LimitsPart(
            min_rollout=resources.rollout_gpus, min_train=resources.train_gpus, min_reward=resources.reward_gpus
        )
    return LimitsPart(
        min_rollout=scheduler.min_rollout_gpus,
        min_train=scheduler.min_train_gpus,
        # No key says how many a reward model may come down to: it keeps one.
        min_reward=min(1, resources.reward_gpus),
        max_rollout=scheduler.max_rollout_gpus,
    )


def _rollout_tp(architecture: Architecture, device: str, num_devices: int) -> int:
    """The fewest devices that hold a replica, and share the rollout devices evenly."""
    roofline, reason = Roofline(device_kind(device), Corrections()), ""
    for tp in range(1, num_devices + 1):
        if num_devices % tp:
            continue
        try:
            ServingCost(architecture, roofline, tp)
        except InputError as error:
            reason = str(error)
            continue
        return tp
    raise InputError(f"resources.rollout_gpus must be enough for a replica of {architecture.name}: {reason}")


def _drawn_work(config: Config) -> SyntheticSpec:
    """Work within the configuration's limits: half of them in the median, with a spread of 0.6 in the logarithm."""
    rollout, context = config.rollout, config.model.max_context_tokens
    call_s = config.sandbox.call_deadline_s
    return SyntheticSpec(
        num_groups=min(_MOST_GROUPS, max(1, config.train.max_steps) * config.groups_per_batch),
        group_size=rollout.group_size,
        turns=LengthSpec(median=max(1.0, rollout.max_turns / 2), sigma=0.6, longest=rollout.max_turns),
        generated_tokens=LengthSpec(median=max(1.0, rollout.max_tokens / 2), sigma=0.6, longest=rollout.max_tokens),
        first_prompt_tokens=LengthSpec(median=max(1.0, context / 8), sigma=0.3, longest=max(1.0, context / 2)),
        tool_result_tokens=LengthSpec(median=max(1.0, context / 64), sigma=0.6, longest=max(1.0, context / 4)),
        tool_s=LengthSpec(median=call_s * _TOOL_MEDIAN_FRAC, sigma=1.0, longest=call_s),
        max_context_tokens=context,
    )


def _words_of_work(config: Config) -> str:
    work = _drawn_work(config)
    return (
        f"trajectories are drawn, as a configuration does not tell their lengths (--traces FILE does): around "
        f"{work.turns.median:g} turns of {work.generated_tokens.median:g} sampled tokens and {work.tool_s.median:g} s "
        f"in a tool, at most {work.turns.longest:g} of {work.generated_tokens.longest:g} and "
        f"{work.tool_s.longest:g} s, in a context of at most {work.max_context_tokens:,} tokens"
    )


def _reward(config: Config, model: str | None) -> RewardPart:
    """A reward model scores on the devices of its pool, a function in the slots of the scorers."""
    if model is not None:
        return RewardPart(model=model)
    return RewardPart(slots=config.scoring.num_workers * config.scoring.concurrency or None)
