"""Measures what a run with some configuration would take on this machine, and fits the cost model to it.

Each point is measured several times, in rounds over all of them, so that a disturbance of some seconds spoils no point
whole; the median counts. Every second point of a term is held out.
"""

import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import xxhash

from steelyard.allocation.architecture import Architecture, read_architecture
from steelyard.allocation.calibration import (
    SERVING_FACTORS,
    Burst,
    Calibration,
    Fit,
    Point,
    TermError,
    TrainStep,
    error_of,
    errors_of,
    fit_all,
    fit_serving,
)
from steelyard.allocation.devices import device_kind
from steelyard.allocation.engine_limits import EngineLimits
from steelyard.allocation.moving_cost import MovingCost, MovingRates
from steelyard.allocation.roofline import Corrections, Roofline
from steelyard.allocation.serving_cost import ServingCost
from steelyard.config import Config
from steelyard.errors import InputError
from steelyard.inference.kv_ranges import RANGE_TOKENS
from steelyard.run.directory import RunDirectory
from steelyard.run.measured_work import Calls, train_and_publish
from steelyard.run.one_replica import REPLICA, OneReplica, opened_replica
from steelyard.sim.predicted import Prediction

PREFILL, DECODE, MIXED, TRAINING, WRITE, LOAD = "prefill", "decode", "mixed", "training", "publication", "load"

_DECODE_TOKENS = 33
_VLLM_BATCHED_TOKENS = 2048
"""vLLM's default of ``--max-num-batched-tokens`` for a server on a CPU."""
_VLLM_BLOCK_TOKENS = 32
_LOCAL_BLOCK_TOKENS = 1
_FLOAT_BYTES = 4
_TRIAL_BYTES = 64 << 20
_START_CALL_S = 2e-3
_LEAST_BUSY_S = 0.25
"""Shorter bursts say little of the share of cores: CPU time is counted in hundredths of a second."""
_STEP_ROUNDS = 2
_WARM_UP_TOKENS = 512
"""Of prompts in a burst, at most, where it is run to warm up: what is long warms nothing that is not warm by then."""
OnProgress = Callable[[str], None]


@dataclass(frozen=True)
class _Planned:
    term: str
    work: Burst | TrainStep
    is_held_out: bool


async def calibrate(
    config: Config, model_dir: Path, directory: RunDirectory, sockets: Path, num_rounds: int, on_progress: OnProgress
) -> Calibration:
    """Start one replica and one trainer as the run would, measure them, and fit.

    Args:
        directory: a run directory with its folders, for weights and logs.
        sockets: a short path.
        num_rounds: how often each burst is measured.

    Raises:
        ConfigError: the engine cannot be measured.
        InputError: the policy's architecture is not one that the cost model knows, or its sizes leave too few points.
        RunError: a process died, or a call did not do what it was asked for.
    """
    model = architecture_of(model_dir)
    _check_enough(config)
    async with opened_replica(config, model_dir, directory, sockets) as one:
        training = await _measure_training(one, model, sockets, on_progress)
        serving = await calibrate_serving(one, model, num_rounds, on_progress)
        started_s = time.perf_counter()
    stopped_s = time.perf_counter() - started_s
    prediction = prediction_for(config, model, serving.limits)
    found = fit_all(serving.points, training, _start(), prediction)
    rates, moving_errors = _moving(one, model, found, _rates(directory.path, one.start_s, stopped_s))
    return msgspec.structs.replace(
        serving,
        device=found.device,
        corrections=found.corrections,
        rates=rates,
        limits=msgspec.structs.replace(serving.limits, call_s=found.call_s),
        errors=(*errors_of((*serving.points, *training), found, prediction), *moving_errors),
        points=(*serving.points, *training),
    )


async def calibrate_serving(
    one: OneReplica, model: Architecture, num_rounds: int, on_progress: OnProgress
) -> Calibration:
    """What can be said of the replica alone; the rest is as it is guessed before any measurement.

    Raises:
        RunError: the replica died, or a call did not do what it was asked for.
    """
    limits = await limits_of(one)
    measuring = _Bursts(one, model, num_rounds, on_progress)
    points = await measuring.points(limits.kv_tokens or 0)
    prediction = prediction_for(one.config, model, limits)
    found = fit_serving(points, _start(), prediction)
    return Calibration(
        engine=one.config.inference.engine,
        model=model,
        device=found.device,
        element_bytes=_FLOAT_BYTES,
        max_running=one.config.inference.max_running,
        corrections=found.corrections,
        rates=MovingRates(),
        limits=msgspec.structs.replace(limits, call_s=found.call_s),
        busy_cores=measuring.busy_cores,
        errors=errors_of(points, found, prediction),
        points=points,
    )


def _start() -> Fit:
    return Fit(corrections=Corrections(), device=device_kind("CPU"), call_s=_START_CALL_S)


def prediction_for(config: Config, model: Architecture, limits: EngineLimits) -> Prediction:
    """What the simulator says of a run with this configuration."""
    return Prediction(
        model=model,
        element_bytes=_FLOAT_BYTES,
        max_running=config.inference.max_running,
        limits=limits,
        micro_batch_tokens=config.train.micro_batch_tokens,
    )


def _check_enough(config: Config) -> None:
    """Refuse sizes that leave fewer points to fit to than there is to fit, before minutes are spent on them."""
    context, running = config.model.max_context_tokens, config.inference.max_running
    planned = planned_bursts(context, running, config.inference.kv_tokens)
    num_fitted, num_wanted = sum(not one.is_held_out for one in planned), len(SERVING_FACTORS) + 1
    if num_fitted < num_wanted:
        raise InputError(
            f"model.max_context_tokens and inference.max_running must leave at least {num_wanted} bursts to fit to, "
            f"got {context} and {running}, which leave {num_fitted}"
        )


def architecture_of(model_dir: Path) -> Architecture:
    """What the policy's ``config.json`` describes.

    Raises:
        InputError: it cannot be read, or the cost model does not know such a decoder.
    """
    path = model_dir / "config.json"
    try:
        return read_architecture(json.loads(path.read_bytes()), model_dir.name)
    except (OSError, ValueError) as error:
        raise InputError(f"{path} must be a model's configuration: {error}") from None


async def limits_of(one: OneReplica) -> EngineLimits:
    """How the replica's engine makes up its batches."""
    inference = one.config.inference
    is_vllm = inference.engine == "vllm"
    stats = await one.router.replicas[REPLICA].stats()
    return EngineLimits(
        chunk_tokens=_VLLM_BATCHED_TOKENS if is_vllm else inference.prefill_chunk_tokens,
        kv_tokens=stats.kv_tokens_capacity,
        block_tokens=_VLLM_BLOCK_TOKENS if is_vllm else _LOCAL_BLOCK_TOKENS,
        range_tokens=0 if is_vllm else RANGE_TOKENS,
    )


def planned_bursts(max_context: int, max_running: int, kv_tokens: int) -> list[_Planned]:
    """What is measured of serving: prompts alone by length, then batches by size and by context.

    A batch is as large as it can be and as small; contexts are short and as long as fit.
    """
    longest = max_context - _DECODE_TOKENS - 1
    lengths = _doubling(16, longest)
    found = [
        _Planned(PREFILL, Burst(num_calls=1, prompt_tokens=length, new_tokens=1), place % 2 == 1)
        for place, length in enumerate(lengths)
    ]
    contexts = sorted({min(16, longest), max(16, longest // 4), longest})
    for place, context in enumerate(contexts):
        room = kv_tokens // (context + _DECODE_TOKENS)
        batches = list(_doubling(1, min(max_running, max(1, room))))
        found += [
            _Planned(
                DECODE, Burst(num_calls=batch, prompt_tokens=context, new_tokens=_DECODE_TOKENS), (place + at) % 2 == 1
            )
            for at, batch in enumerate(batches)
        ]
    # More calls than run at once, and prompts beside a batch: nothing is fitted to these.
    waves = [(2 * max_running, min(64, longest), _DECODE_TOKENS), (max_running, max(1, longest // 2), 9)]
    found += [
        _Planned(MIXED, Burst(num_calls=number, prompt_tokens=prompt, new_tokens=new), True)
        for number, prompt, new in waves
        if min(number, max_running) * (prompt + new) <= kv_tokens
    ]
    return found


def planned_steps(max_context: int, micro_batch_tokens: int) -> list[_Planned]:
    """What is measured of training: steps of a part of a micro-batch up to a whole one, of short rows and of long."""
    rows = [min(64, max_context), max(1, max_context // 2)]
    sizes = [(rows[0], 0.1), (rows[1], 0.25), (rows[1], 0.5), (rows[0], 0.25), (rows[0], 0.5), (rows[1], 1.0)]
    return [
        _Planned(
            TRAINING,
            TrainStep(num_rows=max(1, round(micro_batch_tokens * size / length)), row_tokens=length),
            place % 2 == 1,
        )
        for place, (length, size) in enumerate(sizes)
    ]


async def _measure_training(
    one: OneReplica, model: Architecture, folder: Path, on_progress: OnProgress
) -> tuple[Point, ...]:
    """Every step twice; the first of all warms up and is not counted."""
    config = one.config
    planned = planned_steps(config.model.max_context_tokens, config.train.micro_batch_tokens)
    await train_and_publish(one, _step(planned[0]), model.vocab_size, folder)
    one.write_s.clear()
    one.load_s.clear()
    taken: list[list[float]] = [[] for _ in planned]
    for number in range(_STEP_ROUNDS):
        for step, times in zip(planned, taken, strict=True):
            times.append(await train_and_publish(one, _step(step), model.vocab_size, folder))
        on_progress(f"training, round {number + 1} of {_STEP_ROUNDS}")
    return _points(planned, taken)


class _Bursts:
    def __init__(self, one: OneReplica, model: Architecture, num_rounds: int, on_progress: OnProgress) -> None:
        self._one = one
        self._calls = Calls(one, model.vocab_size, seed=0)
        self._num_rounds = num_rounds
        self._on_progress = on_progress
        self._busy: list[float] = []

    @property
    def busy_cores(self) -> float:
        """Cores that the replica kept busy: of its bursts, the one that was disturbed least."""
        return max(self._busy, default=0.0)

    async def points(self, kv_tokens: int) -> tuple[Point, ...]:
        """Every burst once a round, after one round of the short ones that warms up."""
        config = self._one.config
        planned = planned_bursts(config.model.max_context_tokens, config.inference.max_running, kv_tokens)
        taken: list[list[float]] = [[] for _ in planned]
        for one in planned:
            if _burst(one).num_calls * _burst(one).prompt_tokens <= _WARM_UP_TOKENS:
                await self._burst(_burst(one))
        for number in range(1, self._num_rounds + 1):
            for one, times in zip(planned, taken, strict=True):
                times.append(await self._burst(_burst(one)))
            self._on_progress(f"serving, round {number} of {self._num_rounds}")
        return _points(planned, taken)

    async def _burst(self, work: Burst) -> float:
        before_s = self._one.cpu_s()
        took_s = await self._calls.burst(work)
        if took_s >= _LEAST_BUSY_S:
            self._busy.append((self._one.cpu_s() - before_s) / took_s)
        return took_s


def _points(planned: Sequence[_Planned], taken: Sequence[Sequence[float]]) -> tuple[Point, ...]:
    return tuple(
        Point(term=one.term, work=one.work, measured_s=statistics.median(times), is_held_out=one.is_held_out)
        for one, times in zip(planned, taken, strict=True)
    )


def _burst(planned: _Planned) -> Burst:
    assert isinstance(planned.work, Burst)
    return planned.work


def _step(planned: _Planned) -> TrainStep:
    assert isinstance(planned.work, TrainStep)
    return planned.work


def _doubling(first: int, last: int) -> list[int]:
    """``first``, twice that, and so on, and ``last``."""
    sizes = [min(first, last)]
    while sizes[-1] * 2 <= last:
        sizes.append(sizes[-1] * 2)
    return sizes if sizes[-1] == last else [*sizes, last]


def _rates(folder: Path, start_s: float, release_s: float) -> MovingRates:
    """Rates of storage and of hashing here, by a file of some size."""
    data, path = os.urandom(_TRIAL_BYTES), folder / "trial"
    started_s = time.perf_counter()
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    stored_s = time.perf_counter() - started_s
    path.unlink()
    started_s = time.perf_counter()
    xxhash.xxh3_128_digest(data)
    hashed_s = time.perf_counter() - started_s
    return MovingRates(
        storage_bytes_per_s=_TRIAL_BYTES / stored_s,
        digest_bytes_per_s=_TRIAL_BYTES / hashed_s,
        swap_bytes_per_s=_TRIAL_BYTES / hashed_s,
        start_s=start_s,
        release_s=release_s,
    )


def _moving(
    one: OneReplica, model: Architecture, found: Fit, rates: MovingRates
) -> tuple[MovingRates, tuple[TermError, ...]]:
    """What publications and loads took beyond their bytes becomes their overhead; every second one is held out."""
    roofline = Roofline(found.device, found.corrections)
    serving = ServingCost(model, roofline, 1, _FLOAT_BYTES)
    bare = MovingCost(model, roofline, rates, _FLOAT_BYTES)
    load_s = bare.load_s(serving) + bare.swap_s(serving)
    write_over_s = max(0.0, statistics.median(one.write_s[::2]) - bare.write_s())
    load_over_s = max(0.0, statistics.median(one.load_s[::2]) - load_s)
    errors = (
        error_of(WRITE, [abs((bare.write_s() + write_over_s) / took_s - 1.0) for took_s in one.write_s[1::2]]),
        error_of(LOAD, [abs((load_s + load_over_s) / took_s - 1.0) for took_s in one.load_s[1::2]]),
    )
    found_rates = msgspec.structs.replace(rates, write_overhead_s=write_over_s, load_overhead_s=load_over_s)
    return found_rates, errors
