"""A simulation of a run that was: its work, and devices as fast as they were in it.

Speeds are taken from the first half of the run, so that what the simulation says of the second half is a prediction.
"""

import statistics
from collections.abc import Sequence

import msgspec

from steelyard.allocation.devices import DeviceKind
from steelyard.allocation.engine_limits import EngineLimits
from steelyard.allocation.moving_cost import MovingCost, MovingRates
from steelyard.allocation.observed_speeds import EngineSpeed, ObservedTurn, fit_engine, predicted_calls_s
from steelyard.allocation.online import OnlineCalibration, OnlineError
from steelyard.allocation.roofline import Corrections, Roofline
from steelyard.allocation.serving_cost import ServingCost
from steelyard.config import Config
from steelyard.run.observed import ObservedRun, ObservedStep
from steelyard.sim.bound import train_batch
from steelyard.sim.setup import RewardWork, SimSetup
from steelyard.sim.train_stage import StepRecord, TrainLayouts
from steelyard.types import Record

_LIMITLESS = 1e15
"""Operations and bytes per second of a device whose every cost is what was measured, far above any roofline."""
_LEAST_S = 1e-6
CALLS, TRAINING, PUBLICATION = "model calls", "training", "publication"
"""The terms of a run that are predicted and observed step by step."""
_ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class Speeds(Record, frozen=True, kw_only=True):
    """Devices as fast as in a run. ``num_steps``: those from which they were learnt."""

    device: DeviceKind
    corrections: Corrections
    rates: MovingRates
    engine: EngineLimits
    serving: EngineSpeed
    start_s: float
    end_s: float
    grading_s: float
    num_steps: int


def learn_speeds(observed: ObservedRun, setup: SimSetup, kind: DeviceKind) -> Speeds:
    """The speeds of the first half of a run.

    Args:
        setup: the run as it was, on devices of ``kind``, whose memory and links hold here as well.

    Raises:
        InputError: the run has too few model calls.
    """
    steps = observed.steps[: (len(observed.steps) + 1) // 2]
    until_s = steps[-1].ended_at_s
    turns = [turn for turn in observed.turns if turn.ended_at_s <= until_s]
    serving = fit_engine(turns)
    model = setup.model
    device = msgspec.structs.replace(
        kind,
        name=f"{kind.name} as in the run",
        peak_flops_per_s=_LIMITLESS,
        memory_bytes_per_s=_LIMITLESS,
        launch_s=serving.step_s / model.num_layers,
    )
    # Siblings share prompts, of which an engine computes one: over all that join a context, a token costs less.
    computed, joined = sum(turn.computed_tokens for turn in turns), sum(turn.joined_tokens for turn in turns)
    prompt_token_s = serving.prompt_token_s * min(1.0, computed / max(1, joined))
    decode_flops = 2.0 * (model.active_parameters + model.head_parameters)
    corrections = Corrections(
        decode_compute=max(1.0, serving.sequence_s * _LIMITLESS / decode_flops),
        prefill_compute=max(1.0, prompt_token_s * _LIMITLESS / (2.0 * model.active_parameters)),
        train_compute=1.0,
        memory=1.0,
    )
    with_device = msgspec.structs.replace(setup, device=device, corrections=corrections)
    train_compute = _train_compute(observed, steps, with_device)
    return Speeds(
        device=device,
        corrections=msgspec.structs.replace(corrections, train_compute=train_compute),
        rates=_rates(steps, with_device),
        engine=EngineLimits(chunk_tokens=observed.config.inference.prefill_chunk_tokens, call_s=serving.call_s),
        serving=serving,
        start_s=observed.start_s,
        end_s=observed.end_s,
        grading_s=observed.grading_s,
        num_steps=len(steps),
    )


def with_speeds(setup: SimSetup, speeds: Speeds) -> SimSetup:
    """``setup`` on devices of those speeds; a scoring function takes what it took."""
    reward = setup.reward
    if reward.model is None:
        reward = RewardWork(function_s=speeds.grading_s, num_slots=None)
    return msgspec.structs.replace(
        setup,
        device=speeds.device,
        corrections=speeds.corrections,
        rates=speeds.rates,
        engine=speeds.engine,
        start_s=speeds.start_s,
        end_s=speeds.end_s,
        reward=reward,
    )


def element_bytes(config: Config) -> int:
    """Of the weights and the KV of an engine."""
    return _ELEMENT_BYTES[config.weights.dtype]


class Agreement(Record, frozen=True, kw_only=True):
    """How well a simulation predicts a run. ``late``: over the steps from which no speed was learnt; None without any.

    Times in seconds; errors are shares of what was observed, positive where the simulation is slower. ``terms``: what
    took how much longer than predicted in those steps, and how well the correction that follows it predicts the next.
    """

    observed_s: float
    predicted_s: float
    observed_late_s: float | None
    predicted_late_s: float | None
    terms: tuple[OnlineError, ...] = ()

    @property
    def error_frac(self) -> float:
        """Of the whole time."""
        return self.predicted_s / self.observed_s - 1.0

    @property
    def late_error_frac(self) -> float | None:
        """Of the time of the steps that were not learnt from."""
        if self.observed_late_s is None or self.predicted_late_s is None:
            return None
        return self.predicted_late_s / self.observed_late_s - 1.0


def agreement(observed: ObservedRun, predicted: Sequence[StepRecord], speeds: Speeds, setup: SimSetup) -> Agreement:
    """Compare the steps of a run with those of its simulation.

    Args:
        setup: the run as it was, without its speeds.
    """
    num_learnt = speeds.num_steps
    ends = [step.ended_at_s - step.publish_s - observed.started_at_s for step in observed.steps]
    told = [step.ended_at_s for step in predicted]
    has_late = num_learnt < len(ends)
    return Agreement(
        observed_s=ends[-1],
        predicted_s=told[-1],
        observed_late_s=ends[-1] - ends[num_learnt - 1] if has_late else None,
        predicted_late_s=told[-1] - told[num_learnt - 1] if has_late else None,
        terms=terms_since(observed, speeds, with_speeds(setup, speeds)).errors(),
    )


def terms_since(observed: ObservedRun, speeds: Speeds, setup: SimSetup) -> OnlineCalibration:
    """Each term corrected step by step, over the steps from which no speed was learnt.

    Args:
        setup: with those speeds.
    """
    found = OnlineCalibration()
    layouts, devices = TrainLayouts(setup), observed.config.resources.train_gpus
    write_s = MovingCost(
        setup.model, Roofline(setup.device, setup.corrections), setup.rates, setup.element_bytes
    ).write_s()
    calls = sorted(zip(observed.turns, predicted_calls_s(observed.turns, speeds.serving), strict=True), key=_end_s)
    since_s = observed.steps[speeds.num_steps - 1].ended_at_s
    for step in observed.steps[speeds.num_steps :]:
        batch = train_batch([setup.workload.group(place) for place in step.places])
        trained_s = step.ended_at_s - step.publish_s - step.begun_at_s
        found = found.observed(TRAINING, layouts.best(devices, batch).step_s(batch), trained_s)
        found = found.observed(PUBLICATION, write_s, step.publish_s)
        ended = [(turn, said_s) for turn, said_s in calls if since_s < turn.ended_at_s <= step.ended_at_s]
        took_s = sum(turn.ended_at_s - turn.started_at_s for turn, _ in ended)
        found = found.observed(CALLS, sum(said_s for _, said_s in ended), took_s)
        since_s = step.ended_at_s
    return found


def _end_s(call: tuple[ObservedTurn, float]) -> float:
    return call[0].ended_at_s


def _train_compute(observed: ObservedRun, steps: Sequence[ObservedStep], setup: SimSetup) -> float:
    """The correction with which training steps take as long as they took in sum: the time is linear in it."""
    slower = msgspec.structs.replace(setup.corrections, train_compute=2.0)
    once, twice = TrainLayouts(setup), TrainLayouts(msgspec.structs.replace(setup, corrections=slower))
    devices = observed.config.resources.train_gpus
    took_s = once_s = twice_s = 0.0
    for step in steps:
        batch = train_batch([setup.workload.group(place) for place in step.places])
        took_s += step.ended_at_s - step.publish_s - step.begun_at_s
        once_s += once.best(devices, batch).step_s(batch)
        twice_s += twice.best(devices, batch).step_s(batch)
    return max(1.0, 1.0 + (took_s - once_s) / (twice_s - once_s))


def _rates(steps: Sequence[ObservedStep], setup: SimSetup) -> MovingRates:
    """Rates with which publication takes as long as it took: half of it to write, half to load, without the proof."""
    endless = msgspec.structs.replace(
        setup.rates, storage_bytes_per_s=_LIMITLESS, digest_bytes_per_s=_LIMITLESS, swap_bytes_per_s=_LIMITLESS
    )
    roofline = Roofline(setup.device, setup.corrections)
    moving = MovingCost(setup.model, roofline, endless, setup.element_bytes)
    proof_s = moving.swap_s(ServingCost(setup.model, roofline, 1, setup.element_bytes))
    moved_s = statistics.median(step.publish_s + step.load_s for step in steps) - proof_s
    rate = setup.model.num_parameters * setup.element_bytes / (max(_LEAST_S, moved_s) / 2.0)
    return msgspec.structs.replace(endless, storage_bytes_per_s=rate)
