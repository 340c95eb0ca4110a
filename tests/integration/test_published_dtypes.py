"""A run that publishes in another dtype than it trains in, in several shards: it trains, resumes, and can be proven."""

import json
from pathlib import Path

import pytest

from steelyard.cli.main import EXIT_DONE
from steelyard.coordinator.events import VersionLoaded, VersionOrphaned, VersionPublished
from steelyard.observe.rows import StepRow, of_type, read_rows
from steelyard.processes.faults import FaultPlan
from steelyard.testing.rehearsal import rehearse
from steelyard.testing.small_runs import journal_events, steelyard, write_small_config
from steelyard.testing.tiny_model import write_tiny_model
from steelyard.weights.manifest import read_manifest
from steelyard.weights.shards import INDEX_NAME


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("run")
    config = write_small_config(
        home,
        write_tiny_model(home / "policy"),
        run={"dir": str(home / "run")},
        algorithm={"entropy_coef": 0.01},
        train={"max_steps": 3, "checkpoint_every": 3},
        weights={"dtype": "bfloat16", "max_shard_bytes": 100_000},
    )
    ended = steelyard("train", config)
    assert ended.returncode == EXIT_DONE, ended.stderr
    return home / "run"


def test_versions_are_bfloat16_in_several_shards_and_each_load_proved_them(run: Path) -> None:
    directory = sorted((run / "weights").glob("v*"))[-1]
    manifest = read_manifest(directory)
    assert manifest.dtype == "bfloat16"
    assert {parameter.dtype for parameter in manifest.parameters} == {"bfloat16"}
    assert len(list(directory.glob("model-*.safetensors"))) > 1
    assert set(json.loads((directory / INDEX_NAME).read_bytes())["weight_map"]) == {p.name for p in manifest.parameters}
    events = journal_events(run)
    published = {event.version: event.weights_digest for event in events if isinstance(event, VersionPublished)}
    loaded = [event.proof for event in events if isinstance(event, VersionLoaded)]
    assert {0, 1} <= {proof.version for proof in loaded} <= set(published)
    assert all(proof.weights_digest == published[proof.version] for proof in loaded)


def test_the_mismatch_of_each_step_is_that_of_rounding_and_bounded(run: Path) -> None:
    steps = of_type(read_rows(run / "metrics.jsonl").rows, StepRow)
    assert [step.engine for step in steps] == ["local"] * 3
    first = steps[0].mismatch
    assert first is not None and first.num_tokens > 0
    assert 1e-6 < first.abs_p99 <= (steps[0].mismatch_bound or 0.0)
    assert 0.0 <= first.kl_k3 < 0.01


def test_a_deep_audit_recomputes_from_the_shards_and_says_what_rests_on_the_digest_alone(run: Path) -> None:
    ended = steelyard("audit", run, "--deep")
    assert ended.returncode == EXIT_DONE, ended.stdout + ended.stderr
    (line,) = [line for line in ended.stdout.splitlines() if line.startswith("logprobs_recomputed")]
    assert int(line.split()[2]) > 0
    events = journal_events(run)
    loaded = {event.proof.version for event in events if isinstance(event, VersionLoaded)}
    blind = [
        event.version
        for event in events
        if isinstance(event, VersionPublished) and event.version and not event.separates_parent
    ]
    assert ("note: the probe cannot tell" in ended.stdout) == bool(loaded & set(blind))


def test_steps_that_are_replayed_after_a_crash_give_the_versions_that_were_published(tmp_path: Path) -> None:
    config = write_small_config(
        tmp_path,
        write_tiny_model(tmp_path / "policy"),
        run={"dir": str(tmp_path / "run")},
        algorithm={"entropy_coef": 0.01},
        train={"max_steps": 4, "checkpoint_every": 4},
        weights={"dtype": "bfloat16", "max_shard_bytes": 100_000},
    )
    fault = FaultPlan(process="trainer", point="stepped", occurrence=3, whole_run=True)
    crashed = rehearse(config, tmp_path, fault, is_resume=False, deadline_s=100.0)
    assert crashed.returncode != EXIT_DONE
    ended = steelyard("train", "--resume", tmp_path / "run")
    assert ended.returncode == EXIT_DONE, ended.stderr
    assert not any(isinstance(event, VersionOrphaned) for event in journal_events(tmp_path / "run"))
    assert steelyard("audit", tmp_path / "run").returncode == EXIT_DONE
