"""A training run of the quickstart whose tokens a real vLLM server samples: three steps, and the audit of them."""

import os
import re
import select
import shlex
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import steelyard
from steelyard.cli.main import EXIT_BAD_INPUT, EXIT_DONE, EXIT_RUN_FAILED
from steelyard.coordinator.events import VersionLoaded, VersionReady
from steelyard.testing.small_runs import command, environment, free_port, journal_events, write_small_config
from steelyard.testing.tiny_model import write_small_model
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


@pytest.mark.skipif(not PYTHON.exists(), reason=f"needs {PYTHON}, which `make venv-vllm` makes")
@pytest.mark.timeout(500)
def test_a_server_that_was_started_as_the_document_says_serves_a_run_by_its_url(tmp_path: Path) -> None:
    policy, run = write_small_model(tmp_path / "policy"), tmp_path / "run"
    with server_of_the_document(policy, tmp_path / "vllm.log") as url:
        config = write_small_config(
            tmp_path,
            policy,
            run={"dir": str(run)},
            train={"max_steps": 2},
            admission={"max_policy_lag": 0},
            inference={"engine": "vllm", "vllm": {"url": url}},
        )
        trained = subprocess.run(
            command("train", config), capture_output=True, text=True, timeout=200, env=environment(), check=False
        )
        assert trained.returncode == EXIT_DONE, trained.stderr + trained.stdout
        with urllib.request.urlopen(f"{url}/health", timeout=10) as answer:
            assert answer.status == 200, "a server that is not ours outlives the run"
    proofs = [event.proof for event in journal_events(run) if isinstance(event, VersionLoaded)]
    assert {proof.version for proof in proofs} == {0, 1, 2}
    assert proofs[-1].weights_digest == read_manifest(run / "weights/v000002").weights_digest
    refused = subprocess.run(
        command("train", config, f"run.dir={tmp_path / 'other'}"),
        capture_output=True, text=True, timeout=100, env=environment(), check=False,
    )  # fmt: skip
    assert refused.returncode == EXIT_RUN_FAILED and "Traceback" not in refused.stderr, refused.stderr
    assert "vllm of replica-0: /health: no answer" in refused.stderr


@contextmanager
def server_of_the_document(policy: Path, log: Path) -> Iterator[str]:
    """The command of docs/vllm.md with the places filled in; the server's URL once it answers."""
    text = (ROOT / "docs/vllm.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^    (PYTHONPATH=(?:.*\\\n)*.*)$", text, re.MULTILINE)
    words = shlex.split(block.replace("\\\n", " ").replace("<site-packages>", str(Path(steelyard.__file__).parents[1])))
    settings = dict(word.split("=", 1) for word in words if re.match("[A-Z_]+=", word))
    arguments = [str(policy) if word == "POLICY" else word for word in words[len(settings) :]]
    assert arguments[0] == "python"
    port = free_port()
    with log.open("wb") as out:
        server = subprocess.Popen(
            [PYTHON, *arguments[1:], "--port", str(port)],
            env={**os.environ, **settings}, stdout=out, stderr=out, start_new_session=True,
        )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    try:
        while not answers(url):
            assert server.poll() is None, log.read_text(errors="replace")[-3000:]
            select.select([], [], [], 0.2)
        yield url
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait(20)


def answers(url: str) -> bool:
    """Whether the server says that it is well."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=10) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


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
