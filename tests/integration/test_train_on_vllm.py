"""A training run of the quickstart whose tokens a real vLLM server samples: three steps, and the audit of them."""

import subprocess
from pathlib import Path

import pytest

from steelyard.cli.main import EXIT_BAD_INPUT, EXIT_DONE
from steelyard.coordinator.events import VersionLoaded, VersionReady
from steelyard.testing.small_runs import command, environment, journal_events
from steelyard.weights.manifest import read_manifest

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-vllm/bin/python"
STEPS = 3
RUN_DEADLINE_S = 560.0

WISHES = (
    "inference.engine=vllm", f"train.max_steps={STEPS}", "train.batch_size=32", "admission.max_policy_lag=0",
    "eval.num_tasks=0", "eval.num_unseen_templates=0", "observe.display=plain", "observe.report=false",
)  # fmt: skip


@pytest.mark.skipif(not PYTHON.exists(), reason=f"needs {PYTHON}, which `make venv-vllm` makes")
@pytest.mark.timeout(700)
def test_the_quickstart_trains_on_vllm_and_its_audit_passes(tmp_path: Path) -> None:
    run = tmp_path / "run"
    wishes = (*WISHES, f"inference.vllm.python={PYTHON}", f"run.dir={run}")
    trained = subprocess.run(
        command("train", ROOT / "examples/quickstart.yaml", *wishes),
        capture_output=True, text=True, timeout=RUN_DEADLINE_S, env=environment(), check=False,
    )  # fmt: skip
    assert trained.returncode == EXIT_DONE, trained.stderr + trained.stdout
    events = journal_events(run)
    assert {event.version for event in events if isinstance(event, VersionReady)} == set(range(STEPS + 1))
    proofs = {event.proof.version: event.proof for event in events if isinstance(event, VersionLoaded)}
    newest = read_manifest(run / "weights" / f"v{STEPS:06d}")
    assert proofs[STEPS].weights_digest == newest.weights_digest
    assert all(proof.probe_max_error <= proof.probe_tolerance for proof in proofs.values())
    # Every token is computed again from the stored weights: what vLLM recorded is what the trainer's module says.
    audited = subprocess.run(
        command("audit", "--deep", run), capture_output=True, text=True, timeout=120, env=environment(), check=False
    )
    assert audited.returncode == EXIT_DONE, audited.stdout
    assert "logprobs_recomputed" in audited.stdout and "audit passed" in audited.stdout


def test_a_missing_environment_says_how_to_make_it(tmp_path: Path) -> None:
    refused = subprocess.run(
        command(
            "train", ROOT / "examples/quickstart.yaml", *WISHES, "inference.vllm.python=/nowhere/python",
            f"run.dir={tmp_path / 'run'}",
        ),
        capture_output=True, text=True, timeout=60, env=environment(), check=False,
    )  # fmt: skip
    assert refused.returncode == EXIT_BAD_INPUT
    assert refused.stderr.count("\n") == 1 and refused.stdout == ""
    assert "inference.vllm.python must be the Python of an environment with vLLM, got /nowhere/python" in refused.stderr
    assert "`make venv-vllm`" in refused.stderr and not (tmp_path / "run").exists()
