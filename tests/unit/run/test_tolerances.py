"""What a run's tolerances are: given, measured, or asked for."""

import pytest

from steelyard.config import Config, InferenceConfig, WeightsConfig
from steelyard.errors import ConfigError
from steelyard.run.tolerances import check_tolerances, mismatch_bound, probe_tolerance, token_tolerance
from steelyard.weights.tolerance import NOISE, measured_noise


def config(**inference: object) -> Config:
    return Config(inference=InferenceConfig(**inference))  # type: ignore[arg-type]


def test_what_was_measured_for_engine_and_dtype_holds_unless_something_is_given() -> None:
    noise = measured_noise("local", "bfloat16")
    measured = Config(weights=WeightsConfig(dtype="bfloat16"))
    assert probe_tolerance(measured) == noise.probe_tolerance
    assert token_tolerance(measured) == noise.token_tolerance
    assert mismatch_bound(measured) == noise.mismatch_bound
    assert probe_tolerance(config(probe_tolerance=0.5)) == token_tolerance(config(probe_tolerance=0.5)) == 0.5
    assert mismatch_bound(config(mismatch_bound=0.25)) == 0.25


def test_every_tolerance_stands_well_above_what_was_measured() -> None:
    for noise in NOISE.values():
        assert 0.0 < 2.0 * noise.probe_max <= noise.probe_tolerance <= noise.token_tolerance
        assert noise.mismatch_bound > 0.0


def test_where_nothing_was_measured_the_error_names_the_key_and_what_was() -> None:
    with pytest.raises(ConfigError, match=r"inference\.probe_tolerance must be given .* 2 devices.*local float32 x1"):
        measured_noise("local", "float32", 2)


def test_the_emulated_engine_uses_no_weights() -> None:
    emulated = config(engine="emulated")
    check_tolerances(emulated)
    assert probe_tolerance(emulated) == 0.0
    assert mismatch_bound(emulated) is None
    with pytest.raises(ConfigError, match="audited deeply"):
        token_tolerance(emulated)
