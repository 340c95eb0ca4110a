"""The cost model measured: points, the corrections that fit them, and what is left of error.

::

    engine, trainer --timed--> Point ... --fit--> Corrections --normalised--> Calibration (one JSON file)
                                 `-- held out ------------------------------> TermError of each term

Corrections are fitted to whole bursts of calls and whole training steps, as the simulator would predict them, so that
there is one model of time and one of batching. A fit is Gauss-Newton on the logarithms of the corrections, weighted by
Huber's rule (Huber, Robust Estimation of a Location Parameter, 1964): errors are relative, and one run that was
disturbed does not decide.
"""

import math
import statistics
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from steelyard.allocation.architecture import Architecture
from steelyard.allocation.devices import DeviceKind
from steelyard.allocation.engine_limits import EngineLimits
from steelyard.allocation.moving_cost import MovingRates
from steelyard.allocation.roofline import Corrections
from steelyard.errors import InputError
from steelyard.types.record import Record

FORMAT = 1
SERVING_FACTORS = ("prefill_compute", "decode_compute", "memory", "launch")
TRAINING_FACTORS = ("train_compute", "train_launch")
OVERLAPS = (0.0, 1.0)
"""Of compute and memory traffic; which it is, the fit decides: either all hides or nothing does."""
_COMPUTE = ("prefill_compute", "decode_compute", "train_compute")
_LAUNCHES = ("launch", "train_launch")
_SCALED = (*_COMPUTE, *_LAUNCHES, "memory")

_HEADROOM = 1e4
"""A fit starts from a device so much better than its data sheet that no correction meets its lower bound."""
_PRIOR_SIGMA = 5.0
"""Spread of a correction's logarithm around its start, in units of the measurements' own: what no point speaks of stays
where it was."""
_HUBER = 0.05
"""Relative error from which on a point counts less."""
_NUM_ITERATIONS = 40
_DERIVATIVE_STEP = 1e-3
_LARGEST_MOVE = 1.5
_SETTLED = 1e-4


class Burst(Record, frozen=True, kw_only=True, tag="burst"):
    """So many equal calls that come at once to an idle replica; it lasts until the last of them has its last token."""

    num_calls: int
    prompt_tokens: int
    new_tokens: int


class TrainStep(Record, frozen=True, kw_only=True, tag="train_step"):
    """An optimizer step over rows of one length."""

    num_rows: int
    row_tokens: int


Work = Burst | TrainStep
Predict = Callable[[Corrections, DeviceKind, Work], float]
"""Seconds that some work takes under corrections on a device, the way of a call to the engine and back apart."""


class Fit(Record, frozen=True, kw_only=True):
    """Corrections, the device that they are relative to, and what a call takes on its way to the engine and back."""

    corrections: Corrections
    device: DeviceKind
    call_s: float = 0.0


class Point(Record, frozen=True, kw_only=True):
    """One measurement, the median of several. ``term``: what it says something about. Held out: not fitted to."""

    term: str
    work: Burst | TrainStep
    measured_s: float
    is_held_out: bool

    def __post_init__(self) -> None:
        if not 0.0 < self.measured_s < math.inf:
            raise InputError(f"points of {self.term}: measured_s must be > 0, got {self.measured_s}")


class TermError(Record, frozen=True, kw_only=True):
    """How far predictions are from measurements that nothing was fitted to: shares of what was measured."""

    term: str
    num_points: int
    median_frac: float
    worst_frac: float


class Calibration(Record, frozen=True, kw_only=True):
    """What ``steelyard calibrate`` found out: a file.

    Attributes:
        engine: ``local``, ``vllm``.
        model: the architecture that it was measured with.
        device: the kind, its peaks raised to what was seen where that is more; corrections are relative to it.
        element_bytes: of weights and KV.
        max_running: sequences in a batch.
        busy_cores: cores that a replica keeps busy while it computes, on an otherwise idle machine; 0: not a CPU.
        errors: on points that were held out, by term.
        points: all of them, so that the fit can be repeated.
    """

    engine: str
    model: Architecture
    device: DeviceKind
    element_bytes: int
    max_running: int
    corrections: Corrections
    rates: MovingRates
    limits: EngineLimits
    busy_cores: float
    errors: tuple[TermError, ...]
    points: tuple[Point, ...]
    format: int = FORMAT


def encode_calibration(calibration: Calibration) -> bytes:
    """As JSON, indented."""
    return msgspec.json.format(msgspec.json.encode(calibration), indent=2) + b"\n"


def decode_calibration(data: bytes, where: str) -> Calibration:
    """A calibration from its file's bytes.

    Raises:
        InputError: they are no calibration, or of a later format; names the field.
    """
    try:
        calibration = msgspec.json.decode(data, type=Calibration)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InputError(f"{where} must be a calibration that `steelyard calibrate` wrote: {error}") from None
    if calibration.format != FORMAT:
        raise InputError(f"{where}: format must be {FORMAT}, got {calibration.format}: calibrate again")
    return calibration


def fit(points: Sequence[Point], factors: Sequence[str], start: Fit, predict: Predict) -> Fit:
    """What fits the points that are not held out.

    Args:
        factors: names of the corrections to fit; the others stay as in ``start``. ``call_s`` is fitted where it is
            above 0 at the start.
        start: where to begin, and what a factor that no point speaks of stays near.

    Raises:
        InputError: there are fewer points than factors.
    """
    fitted = [point for point in points if not point.is_held_out]
    num_wanted = len(factors) + (start.call_s > 0.0)
    if len(fitted) < num_wanted:
        raise InputError(f"a fit of {', '.join(factors)} must have at least {num_wanted} points, got {len(fitted)}")
    search = _Search(fitted, factors, start, predict)
    logs = _minimise(search.residuals, search.begin)
    return _normalised(search.at(logs), start.device)


def fit_serving(points: Sequence[Point], start: Fit, predict: Predict) -> Fit:
    """The better of the fits with and without overlap of compute and memory traffic."""
    fits = [
        fit(points, SERVING_FACTORS, msgspec.structs.replace(start, corrections=with_overlap), predict)
        for with_overlap in (msgspec.structs.replace(start.corrections, overlap=overlap) for overlap in OVERLAPS)
    ]
    return min(fits, key=lambda one: _mean_error([point for point in points if not point.is_held_out], one, predict))


def fit_all(serving: Sequence[Point], training: Sequence[Point], start: Fit, predict: Predict) -> Fit:
    """The better of the fits with and without overlap, over serving and training together.

    Serving alone may fit as well either way. Training then tells which of the two it is.
    """
    fits = []
    for overlap in OVERLAPS:
        corrections = msgspec.structs.replace(start.corrections, overlap=overlap)
        served = fit(serving, SERVING_FACTORS, msgspec.structs.replace(start, corrections=corrections), predict)
        alone = msgspec.structs.replace(served, call_s=0.0)
        trained = fit(training, TRAINING_FACTORS, alone, predict)
        fits.append(msgspec.structs.replace(trained, call_s=served.call_s))
    fitted = [point for point in (*serving, *training) if not point.is_held_out]
    return min(fits, key=lambda one: _mean_error(fitted, one, predict))


def predicted_s(work: Work, found: Fit, predict: Predict) -> float:
    """Seconds of some work, with the way of a call."""
    return predict(found.corrections, found.device, work) + (found.call_s if isinstance(work, Burst) else 0.0)


def errors_of(points: Sequence[Point], found: Fit, predict: Predict) -> tuple[TermError, ...]:
    """The error of each term over its points that were held out."""
    by_term: dict[str, list[float]] = {}
    for point in points:
        if point.is_held_out:
            error = abs(predicted_s(point.work, found, predict) / point.measured_s - 1.0)
            by_term.setdefault(point.term, []).append(error)
    return tuple(error_of(term, errors) for term, errors in by_term.items())


def error_of(term: str, relative_errors: Sequence[float]) -> TermError:
    """Median and worst of relative errors, at least one."""
    return TermError(
        term=term,
        num_points=len(relative_errors),
        median_frac=statistics.median(relative_errors),
        worst_frac=max(relative_errors),
    )


def _mean_error(points: Sequence[Point], found: Fit, predict: Predict) -> float:
    """Of the logarithms."""
    return statistics.fmean(abs(math.log(predicted_s(p.work, found, predict) / p.measured_s)) for p in points)


class _Search:
    """The corrections as a vector of logarithms, on a device that no correction is bounded on."""

    def __init__(self, points: Sequence[Point], factors: Sequence[str], start: Fit, predict: Predict) -> None:
        self._points, self._factors, self._predict = points, tuple(factors), predict
        self._easy = _eased(start.device)
        self._base = msgspec.structs.replace(
            start.corrections, **{name: getattr(start.corrections, name) * _HEADROOM for name in _SCALED}
        )
        self._fits_call = start.call_s > 0.0
        self._call_s = start.call_s
        values = [getattr(self._base, factor) for factor in self._factors]
        self.begin = np.log([*values, start.call_s] if self._fits_call else values)

    def at(self, logs: npt.NDArray[np.float64]) -> Fit:
        """What a vector stands for."""
        values = [float(value) for value in np.exp(logs)]
        changes = {factor: max(1.0, value) for factor, value in zip(self._factors, values, strict=False)}
        corrections = msgspec.structs.replace(self._base, **changes)
        return Fit(corrections=corrections, device=self._easy, call_s=values[-1] if self._fits_call else self._call_s)

    def residuals(self, logs: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Logarithms of predicted over measured."""
        found = self.at(logs)
        return np.log([predicted_s(point.work, found, self._predict) / point.measured_s for point in self._points])


def _minimise(
    residuals: Callable[[npt.NDArray[np.float64]], npt.NDArray[np.float64]], begin: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Gauss-Newton with Levenberg's damping (Levenberg 1944), reweighted by Huber's rule at every step."""
    at, damping = begin.copy(), 1e-3
    found = residuals(at)
    for _ in range(_NUM_ITERATIONS):
        slopes = np.array([(residuals(at + _unit(len(at), i)) - found) / _DERIVATIVE_STEP for i in range(len(at))]).T
        weights = np.minimum(1.0, _HUBER / np.maximum(np.abs(found), 1e-12))
        prior = np.eye(len(at)) * (_HUBER / _PRIOR_SIGMA) ** 2
        matrix = slopes.T @ (weights[:, None] * slopes) + prior
        wanted = slopes.T @ (weights * found) + prior @ (at - begin)
        move = np.clip(
            -np.linalg.solve(matrix + damping * np.diag(np.diag(matrix)), wanted), -_LARGEST_MOVE, _LARGEST_MOVE
        )
        tried = residuals(at + move)
        if _loss(tried, at + move - begin) <= _loss(found, at - begin):
            at, found, damping = at + move, tried, damping / 3
            if np.abs(move).max() < _SETTLED:
                break
        else:
            damping = max(damping, 1e-3) * 4
    return at


def _unit(size: int, index: int) -> npt.NDArray[np.float64]:
    unit = np.zeros(size)
    unit[index] = _DERIVATIVE_STEP
    return unit


def _loss(found: npt.NDArray[np.float64], moved: npt.NDArray[np.float64]) -> float:
    """Huber's loss, and the prior's."""
    size = np.abs(found)
    terms = np.where(size <= _HUBER, size**2 / 2, _HUBER * (size - _HUBER / 2))
    return float(terms.sum() + (_HUBER / _PRIOR_SIGMA) ** 2 * (moved**2).sum() / 2)


def _eased(device: DeviceKind) -> DeviceKind:
    return msgspec.structs.replace(
        device,
        peak_flops_per_s=device.peak_flops_per_s * _HEADROOM,
        memory_bytes_per_s=device.memory_bytes_per_s * _HEADROOM,
        launch_s=device.launch_s / _HEADROOM,
    )


def _normalised(found: Fit, device: DeviceKind) -> Fit:
    """The same times, relative to a device no worse than its data sheet nor than what was seen: no correction is
    below 1."""
    corrections, easy = found.corrections, found.device
    fastest = min(getattr(corrections, name) for name in _COMPUTE)
    seen = msgspec.structs.replace(
        device,
        peak_flops_per_s=max(device.peak_flops_per_s, easy.peak_flops_per_s / fastest),
        memory_bytes_per_s=max(device.memory_bytes_per_s, easy.memory_bytes_per_s / corrections.memory),
        launch_s=min(device.launch_s, easy.launch_s * min(getattr(corrections, name) for name in _LAUNCHES)),
    )
    compute = seen.peak_flops_per_s / easy.peak_flops_per_s
    changes = {name: max(1.0, getattr(corrections, name) * compute) for name in _COMPUTE}
    changes |= {name: max(1.0, getattr(corrections, name) * easy.launch_s / seen.launch_s) for name in _LAUNCHES}
    changes["memory"] = max(1.0, corrections.memory * seen.memory_bytes_per_s / easy.memory_bytes_per_s)
    return Fit(corrections=msgspec.structs.replace(corrections, **changes), device=seen, call_s=found.call_s)
