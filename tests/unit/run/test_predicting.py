"""A live run beside its calibration: the file is checked at once, rows say predicted and observed."""

import json
from pathlib import Path

import pytest

from steelyard import config_file
from steelyard.allocation.calibration import Calibration, encode_calibration
from steelyard.allocation.devices import device_kind
from steelyard.allocation.engine_limits import EngineLimits
from steelyard.allocation.moving_cost import MovingRates
from steelyard.allocation.roofline import Corrections
from steelyard.clock import SystemClock
from steelyard.config import Config
from steelyard.errors import ConfigError, InputError
from steelyard.metrics import MetricsFile
from steelyard.observe.display import QuietDisplay
from steelyard.observe.report_tables import facts
from steelyard.observe.rows import PredictionRow, of_type, read_rows
from steelyard.run.calibrating import architecture_of
from steelyard.run.news import News
from steelyard.run.predicting import prediction_of, sampling_rows
from steelyard.testing.metrics_rows import make_step
from steelyard.testing.toy_devices import TOY_MODEL
from steelyard.types import EngineStats

MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 160,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512,
    "tie_word_embeddings": True,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    calibration = Calibration(
        engine="local",
        model=TOY_MODEL,
        device=device_kind("CPU"),
        element_bytes=4,
        max_running=64,
        corrections=Corrections(),
        rates=MovingRates(),
        limits=EngineLimits(),
        busy_cores=1.0,
        errors=(),
        points=(),
    )
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    (tmp_path / "found.json").write_bytes(encode_calibration(calibration))
    return tmp_path


def config(folder: Path, name: str = "found.json") -> Config:
    return config_file.load(None, [f"model.policy={folder}", f"allocation.calibration={folder / name}"])


def test_steps_are_written_beside_what_they_should_take_and_the_report_says_so(folder: Path) -> None:
    assert architecture_of(folder).num_layers == 2
    file = MetricsFile(folder / "metrics.jsonl")
    news = News(file, QuietDisplay(), SystemClock())
    news.row(make_step(0))
    news.compare_with(prediction_of(config(folder), folder))
    for step in range(1, 4):
        news.row(make_step(step))
    file.close()
    rows = read_rows(folder / "metrics.jsonl").rows
    found = of_type(rows, PredictionRow)
    assert [row.num_observed for row in found if row.term == "training"] == [1, 2, 3]
    assert all(row.predicted_s > 0.0 and row.observed_s > 0.0 for row in found)
    names = [fact.name for fact in facts(rows)]
    assert "training, observed over calibrated" in names


def stats(decode: int, busy_s: float) -> EngineStats:
    return EngineStats(
        replica_id="r", num_running=8, num_waiting=0, kv_tokens_in_use=800, kv_tokens_capacity=4000, prefill_tokens=0,
        decode_tokens=decode, cached_tokens=0, busy_s=busy_s, versions=(0,),
    )  # fmt: skip


def test_a_replica_is_compared_over_the_time_between_two_samples(folder: Path) -> None:
    prediction = prediction_of(config(folder), folder)
    assert prediction is not None
    (row,) = sampling_rows(prediction, stats(900, 3.0), stats(100, 1.0), 5.0)
    assert (row.term, row.observed_s, row.at_s) == ("sampling", 2.0, 5.0)
    assert sampling_rows(prediction, stats(900, 3.0), stats(900, 3.0), 6.0) == []


def test_without_a_calibration_nothing_is_predicted(folder: Path) -> None:
    assert prediction_of(config_file.load(None, []), folder) is None


def test_a_calibration_that_cannot_be_read_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"allocation.calibration must be a readable file, got .*nowhere.json"):
        prediction_of(config(folder, "nowhere.json"), folder)
    (folder / "found.json").write_text("{}")
    with pytest.raises(InputError, match=r"found.json must be a calibration that `steelyard calibrate` wrote"):
        prediction_of(config(folder), folder)
