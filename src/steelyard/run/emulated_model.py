"""The time model of emulated engines: the cost model, for the device and the model of the configuration."""

import json
from dataclasses import dataclass
from pathlib import Path

import msgspec

from steelyard.allocation.architecture import Architecture, read_architecture
from steelyard.allocation.calibration import Calibration, decode_calibration
from steelyard.allocation.devices import device_kind
from steelyard.allocation.moving_cost import MovingCost, MovingRates
from steelyard.allocation.roofline import Corrections, Roofline
from steelyard.allocation.serving_cost import ServingCost, StepWork, prompt_work
from steelyard.config import EmulatedConfig
from steelyard.errors import ConfigError, InputError
from steelyard.sim.scenario import known_model

_ELEMENT_BYTES = 2


@dataclass(frozen=True)
class CostTimes:
    """A :class:`steelyard.inference.time_model.TimeModel` of one device."""

    serving: ServingCost
    moving: MovingCost

    def step_s(self, num_decoding: int, kv_tokens: int, prefill_tokens: int, context_tokens: int) -> float:
        """See :meth:`steelyard.inference.time_model.TimeModel.step_s`."""
        work = prompt_work(prefill_tokens, context_tokens) if prefill_tokens else StepWork()
        return self.serving.step_s(msgspec.structs.replace(work, num_decoding=num_decoding, kv_tokens=kv_tokens))

    def load_s(self) -> float:
        """See :meth:`steelyard.inference.time_model.TimeModel.load_s`."""
        return self.moving.load_s(self.serving) + self.moving.swap_s(self.serving)


def emulated_times(emulated: EmulatedConfig) -> CostTimes:
    """What the configuration describes.

    Raises:
        ConfigError: there is no such device or model, it does not fit, or the calibration is of another device.
    """
    try:
        return _times(emulated)
    except InputError as error:
        raise ConfigError(f"inference.emulated: {error}") from None


def _times(emulated: EmulatedConfig) -> CostTimes:
    model, found = _model(emulated.model), _calibration(emulated)
    if found is None:
        roofline, rates, element_bytes = (
            Roofline(device_kind(emulated.device), Corrections()), MovingRates(), _ELEMENT_BYTES,
        )  # fmt: skip
    else:
        roofline, rates, element_bytes = Roofline(found.device, found.corrections), found.rates, found.element_bytes
    serving = ServingCost(model, roofline, 1, element_bytes)
    return CostTimes(serving, MovingCost(model, roofline, rates, element_bytes))


def _model(name: str) -> Architecture:
    """A folder with a ``config.json``, or one that is known by name."""
    path = Path(name) / "config.json"
    if not path.is_file():
        return known_model(name)
    try:
        return read_architecture(json.loads(path.read_bytes()), name)
    except (OSError, ValueError) as error:
        raise InputError(f"{path} must be a model's configuration: {error}") from None


def _calibration(emulated: EmulatedConfig) -> Calibration | None:
    if emulated.calibration is None:
        return None
    path = Path(emulated.calibration)
    try:
        found = decode_calibration(path.read_bytes(), str(path))
    except OSError as error:
        raise InputError(f"calibration must be a readable file, got {path}: {error.strerror}") from None
    if found.device.name != device_kind(emulated.device).name:
        raise InputError(f"device must be {found.device.name}, on which {path} was measured, got {emulated.device}")
    return found
