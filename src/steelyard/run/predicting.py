"""A live run beside what a calibration says of it (``allocation.calibration``): rows of both times."""

from pathlib import Path

from steelyard.allocation.calibration import Calibration, decode_calibration
from steelyard.allocation.run_prediction import Compared, RunPrediction, Sampled
from steelyard.config import Config
from steelyard.errors import ConfigError
from steelyard.observe.rows import PredictionRow, StepRow
from steelyard.run.calibrating import architecture_of
from steelyard.types import EngineStats


def calibration_of(config: Config) -> Calibration | None:
    """The calibration that the configuration names.

    Raises:
        ConfigError: its file cannot be read.
        InputError: it is no calibration.
    """
    if config.allocation.calibration is None:
        return None
    path = Path(config.allocation.calibration)
    try:
        return decode_calibration(path.read_bytes(), str(path))
    except OSError as error:
        raise ConfigError(f"allocation.calibration must be a readable file, got {path}: {error.strerror}") from None


def prediction_of(config: Config, model_dir: Path) -> RunPrediction | None:
    """Predictions for a run of the policy in ``model_dir``; None where no calibration is named.

    Raises:
        ConfigError, InputError: the calibration cannot be read, or the policy is none that the cost model knows.
    """
    calibration = calibration_of(config)
    if calibration is None:
        return None
    return RunPrediction(
        calibration,
        architecture_of(model_dir),
        num_train=config.resources.train_gpus,
        micro_batch_tokens=config.train.micro_batch_tokens,
    )


def step_rows(prediction: RunPrediction, row: StepRow) -> list[PredictionRow]:
    """What a step took beside what it should have taken."""
    found = (
        prediction.trained(row.num_tokens, row.num_trajectories, int(row.tokens_max), row.train_s),
        prediction.published(row.publish_s),
        prediction.loaded(row.load_s),
    )
    return [_row(row.at_s, one) for one in found if one is not None]


def sampling_rows(
    prediction: RunPrediction, stats: EngineStats, before: EngineStats, at_s: float
) -> list[PredictionRow]:
    """What a replica computed between two samples beside what it should have taken."""
    found = prediction.sampled(
        Sampled(
            decode_tokens=stats.decode_tokens - before.decode_tokens,
            prefill_tokens=stats.prefill_tokens - before.prefill_tokens,
            num_running=(stats.num_running + before.num_running) / 2.0,
            kv_tokens=(stats.kv_tokens_in_use + before.kv_tokens_in_use) / 2.0,
            busy_s=stats.busy_s - before.busy_s,
        )
    )
    return [] if found is None else [_row(at_s, found)]


def _row(at_s: float, found: Compared) -> PredictionRow:
    known = found.known
    return PredictionRow(
        at_s=at_s,
        term=known.term,
        predicted_s=found.predicted_s,
        observed_s=found.observed_s,
        factor=known.factor,
        error_frac=known.error_frac,
        num_observed=known.num_observed,
    )
