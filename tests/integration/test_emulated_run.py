"""A run by the command line whose devices are not there."""

import shutil
from pathlib import Path

import pytest

from steelyard.observe.rows import EngineRow, RouterRow, StepRow, of_type, read_rows
from steelyard.testing.small_runs import steelyard, write_small_config
from steelyard.testing.tiny_model import write_tiny_model

NUM_REPLICAS = 12


@pytest.mark.timeout(200)
def test_a_run_with_emulated_engines_goes_all_the_way_and_says_that_its_tokens_mean_nothing(tmp_path: Path) -> None:
    config = write_small_config(
        tmp_path,
        write_tiny_model(tmp_path / "policy"),
        inference={
            "engine": "emulated",
            "kv_tokens": 4096,
            "emulated": {"time_scale": 10.0, "median_output_tokens": 6.0},
        },
        resources={"rollout_gpus": NUM_REPLICAS},
        # Without it samples whose rewards are all alike are left out of the step, and nothing is compared.
        algorithm={"kl_coef": 0.01},
    )
    trained = steelyard("train", config, f"run.dir={tmp_path / 'run'}", cwd=tmp_path)
    assert trained.returncode == 0, trained.stderr
    assert "come from no weights" in trained.stdout
    rows = read_rows(tmp_path / "run" / "metrics.jsonl").rows
    steps = of_type(rows, StepRow)
    assert [step.step for step in steps] == [0, 1, 2]
    compared = [step for step in steps if step.mismatch is not None]
    assert compared, "some tokens came from the weights that the gradient was computed at"
    for step in compared:
        assert step.mismatch is not None and step.mismatch.abs_p99 > 0.1, "nats, where real engines differ by rounding"
        assert (step.engine, step.mismatch_bound) == ("emulated", None)
    assert of_type(rows, RouterRow)[-1].weights == {f"replica-{index}": 1.0 for index in range(NUM_REPLICAS)}
    assert {row.replica_id for row in of_type(rows, EngineRow)} <= {f"replica-{n}" for n in range(NUM_REPLICAS)}
    assert not list((tmp_path / "run").rglob("replica-*.log")), "all engines are one process"
    audited = steelyard("audit", tmp_path / "run")
    assert audited.returncode == 0, audited.stdout
    deep = steelyard("audit", tmp_path / "run", "--deep")
    assert deep.returncode == 2, (deep.returncode, deep.stdout, deep.stderr)
    assert "inference.engine must compute with the weights" in deep.stderr
    shutil.rmtree(tmp_path / "run")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("inference.emulated.time_scale=0", "inference.emulated.time_scale must be a finite number > 0, got 0.0"),
        ("inference.emulated.output_sigma=-1", "inference.emulated.output_sigma must be a finite number >= 0"),
        ("inference.router.hedge_quantile=1", "inference.router.hedge_quantile must be null, or >= 0.5 and < 1"),
        ("inference.router.queue_deadline_s=-1", "inference.router.queue_deadline_s must be null or a finite number"),
        ("inference.emulated.num_parms=1", "inference.emulated"),
    ],
)
def test_the_dry_run_finds_what_cannot_be(tmp_path: Path, override: str, message: str) -> None:
    config = write_small_config(tmp_path, tmp_path / "nowhere", inference={"engine": "emulated"})
    found = steelyard("train", config, "--dry-run", override, cwd=tmp_path)
    assert found.returncode == 2
    assert message in found.stderr and "Traceback" not in found.stderr
