"""The tolerances of a run: what its configuration gives, else what was measured for its engine and dtype."""

from steelyard.config import Config
from steelyard.weights.tolerance import Noise, measured_noise


def check_tolerances(config: Config) -> None:
    """Check that a tolerance is given or was measured.

    Raises:
        ConfigError: neither.
    """
    probe_tolerance(config)
    mismatch_bound(config)


def probe_tolerance(config: Config) -> float:
    """By how much a load may differ in the log-probabilities of its probe, in nats.

    Raises:
        ConfigError: none is given, and none was measured for this engine.
    """
    given = config.inference.probe_tolerance
    return given if given is not None else _noise(config).probe_tolerance


def token_tolerance(config: Config) -> float:
    """By how much a recorded log-probability may differ from one that is computed again, in nats.

    Raises:
        ConfigError: no tolerance is given, and none was measured for this engine.
    """
    given = config.inference.probe_tolerance
    return given if given is not None else _noise(config).token_tolerance


def mismatch_bound(config: Config) -> float:
    """What the 99th percentile of the differences between engine and trainer should not exceed, in nats.

    Raises:
        ConfigError: none is given, and none was measured for this engine.
    """
    given = config.inference.mismatch_bound
    return given if given is not None else _noise(config).mismatch_bound


def _noise(config: Config) -> Noise:
    return measured_noise(config.inference.engine, config.weights.dtype)
