"""The tolerances of a run: what its configuration gives, else what was measured for its engine and dtype.

The emulated engine computes nothing with weights: its proofs are exact, and its log-probabilities agree with nobody's.
"""

from steelyard.config import Config
from steelyard.errors import ConfigError
from steelyard.weights.tolerance import Noise, measured_noise

EMULATED = "emulated"


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
    if given is None and config.inference.engine == EMULATED:
        return 0.0
    return given if given is not None else _noise(config).probe_tolerance


def token_tolerance(config: Config) -> float:
    """By how much a recorded log-probability may differ from one that is computed again, in nats.

    Raises:
        ConfigError: no tolerance is given, and none was measured for this engine; or the engine uses no weights.
    """
    if config.inference.engine == EMULATED:
        raise ConfigError(f"inference.engine must compute with the weights to be audited deeply, got {EMULATED}")
    given = config.inference.probe_tolerance
    return given if given is not None else _noise(config).token_tolerance


def mismatch_bound(config: Config) -> float | None:
    """What the 99th percentile of the differences between engine and trainer should not exceed, in nats.

    None where nothing can be expected of the engine.

    Raises:
        ConfigError: none is given, and none was measured for this engine.
    """
    given = config.inference.mismatch_bound
    if given is None and config.inference.engine == EMULATED:
        return None
    return given if given is not None else _noise(config).mismatch_bound


def _noise(config: Config) -> Noise:
    return measured_noise(config.inference.engine, config.weights.dtype)
