"""A whole run whose blobs are in S3: killed, resumed, audited; what is spoiled there is found by its name."""

import asyncio
import re
import shutil
from collections import Counter
from pathlib import Path

import pytest

from steelyard import config_file
from steelyard.cli.main import EXIT_BAD_INPUT, EXIT_CHECK_FAILED, EXIT_DONE, EXIT_RUN_FAILED, main
from steelyard.coordinator import events as e
from steelyard.processes.faults import FaultPlan
from steelyard.testing.forgery import ForgedRun
from steelyard.testing.rehearsal import rehearse
from steelyard.testing.s3_proxy import Answer, CutUpload, Fate, LoseAnswer, Pass, S3Proxy
from steelyard.testing.s3_server import S3Server
from steelyard.testing.small_runs import command, environment, journal_events, steelyard, write_small_config
from steelyard.testing.tiny_model import write_tiny_model

DEADLINE_S = 100.0
KILLED = -9


class RunOnS3:
    """A run that was killed twice and came to its end."""

    def __init__(self, home: Path, s3: S3Server, bucket: str) -> None:
        self.path = home / "run"
        self.s3 = s3
        self.bucket = bucket
        self.config = write_small_config(
            home,
            write_tiny_model(home / "policy"),
            run={"dir": str(self.path)},
            blobs={"url": f"s3://{bucket}/runs", "endpoint_url": s3.url, "region": "us-east-1"},
            algorithm={"entropy_coef": 0.01},
            train={"checkpoint_every": 3},
            eval={"num_tasks": 2, "greedy": False},
        )
        plans = (
            FaultPlan(process="control", point="event:ARTIFACT_READY:before"),
            FaultPlan(process="control", point="event:STEP_BEGUN:after"),
        )
        for number, plan in enumerate(plans):
            path = self.path if number else self.config
            ended = rehearse(path, home, plan, is_resume=bool(number), deadline_s=DEADLINE_S)
            assert ended.returncode == KILLED, ended.stderr
        ended = rehearse(self.path, home, None, is_resume=True, deadline_s=DEADLINE_S)
        assert ended.returncode == EXIT_DONE, ended.stderr

    @property
    def folder(self) -> str:
        """The run's folder in the bucket."""
        url = config_file.load(self.path / "config.yaml").blobs.url
        assert url is not None
        return url.removeprefix(f"s3://{self.bucket}/")

    def keys(self, kind: str) -> set[str]:
        """Names of the run's objects of a kind."""
        start = f"{self.folder}/{kind}/"
        return {key.removeprefix(start) for key in self.s3.keys(self.bucket) if key.startswith(start)}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, s3: S3Server) -> RunOnS3:
    s3.make_bucket("whole-run")
    return RunOnS3(tmp_path_factory.mktemp("s3"), s3, "whole-run")


@pytest.mark.timeout(400)
def test_a_run_that_was_killed_and_resumed_passes_the_audit_from_s3_alone(
    run: RunOnS3, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.folder.startswith("runs/run-")
    events = journal_events(run.path)
    assert isinstance(events[-1], e.RunFinished)
    reports = [event.report for event in events if isinstance(event, e.ArtifactReady)]
    copies = list((run.path / "traces" / "sealed").iterdir())
    assert len(copies) < len(reports) / 2, "of attempts that are over nothing is kept on this disk"
    for folder in ("traces/sealed", "artifacts"):
        shutil.rmtree(run.path / folder, ignore_errors=True)
    assert main(["audit", str(run.path)]) == EXIT_DONE, capsys.readouterr().out
    assert {report.attempt_id for report in reports} <= run.keys("traces")
    assert {f"{r.artifact_digest[:2]}/{r.artifact_digest}" for r in reports} <= run.keys("artifacts")
    assert {"log.jsonl", "metrics.jsonl", "trainer.log"} <= run.keys("logs")
    assert run.keys("checks") == set()


@pytest.mark.timeout(400)
def test_a_rollout_is_shown_from_s3(run: RunOnS3, capsys: pytest.CaptureFixture[str]) -> None:
    report = next(event.report for event in journal_events(run.path) if isinstance(event, e.ArtifactReady))
    assert main(["show", str(run.path), report.attempt_id]) == EXIT_DONE
    assert report.trace.digest in capsys.readouterr().out


@pytest.mark.timeout(400)
def test_the_sweep_deletes_what_nobody_refers_to_and_the_audit_still_passes(
    run: RunOnS3, capsys: pytest.CaptureFixture[str]
) -> None:
    reports = [event.report for event in journal_events(run.path) if isinstance(event, e.ArtifactReady)]
    run.s3.write(run.bucket, f"{run.folder}/traces/att_stranger", b"sealed and refused")
    run.s3.write(run.bucket, "runs/another-run/traces/att_1", b"not ours")
    assert main(["sweep", str(run.path)]) == EXIT_DONE
    assert "att_stranger" in run.keys("traces"), "it may be on its way"
    capsys.readouterr()
    assert main(["sweep", str(run.path), "--min-age", "0"]) == EXIT_DONE
    said = re.search(r"deleted (\d+) traces and (\d+) artifacts", capsys.readouterr().out)
    assert said is not None
    assert int(said[1]) >= 1
    assert run.keys("traces") == {report.attempt_id for report in reports}
    assert run.keys("artifacts") == {f"{r.artifact_digest[:2]}/{r.artifact_digest}" for r in reports}
    assert "runs/another-run/traces/att_1" in run.s3.keys(run.bucket)
    assert main(["audit", str(run.path)]) == EXIT_DONE, capsys.readouterr().out


@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", ["traces", "artifacts"])
@pytest.mark.parametrize("is_deleted", [False, True], ids=["changed", "missing"])
def test_a_blob_that_is_changed_or_missing_in_s3_is_named(
    run: RunOnS3, kind: str, is_deleted: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    forged = ForgedRun(run.path)
    attempt_id = forged.trained_attempts()[0]
    digest = next(
        event["report"]["artifact_digest"]
        for event in forged.events()
        if event["kind"] == "ARTIFACT_READY" and event["report"]["attempt_id"] == attempt_id
    )
    key = f"{run.folder}/traces/{attempt_id}" if kind == "traces" else f"{run.folder}/artifacts/{digest[:2]}/{digest}"
    before = run.s3.read(run.bucket, key)
    if is_deleted:
        run.s3.client.delete_object(Bucket=run.bucket, Key=key)
    else:
        run.s3.write(run.bucket, key, before[:-1] + bytes([before[-1] ^ 1]))
    try:
        assert main(["audit", str(run.path)]) == EXIT_CHECK_FAILED
        broken = {line.split()[0] for line in capsys.readouterr().out.splitlines() if " BROKEN " in line}
    finally:
        run.s3.write(run.bucket, key, before)
    assert broken == ({"traces_stored", "batch_tokens"} if kind == "traces" else {"artifacts_scored"})


@pytest.mark.timeout(400)
def test_a_store_out_of_reach_is_no_verdict_on_the_run(
    run: RunOnS3, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(run.path, tmp_path / "run")
    path = tmp_path / "run" / "config.yaml"
    path.write_text(path.read_text().replace(run.s3.url, "http://127.0.0.1:9"))
    assert main(["audit", str(tmp_path / "run")]) == EXIT_RUN_FAILED
    assert f"cannot read s3://{run.bucket}/{run.folder}/traces/att_" in capsys.readouterr().err


@pytest.mark.timeout(400)
def test_a_dry_run_says_that_the_bucket_is_missing_and_that_all_is_well(run: RunOnS3, tmp_path: Path) -> None:
    missing = steelyard("train", run.config, "--dry-run", "blobs.url=s3://no-such-bucket/runs", cwd=tmp_path)
    assert missing.returncode == EXIT_BAD_INPUT
    assert "blobs.url must be a place that can be written and read" in missing.stderr
    assert "NoSuchBucket" in missing.stderr
    assert "Traceback" not in missing.stderr
    fine = steelyard("train", run.config, "--dry-run", cwd=tmp_path)
    assert fine.returncode == EXIT_DONE, fine.stderr
    assert list(tmp_path.iterdir()) == []


# --- errors in the middle of an upload ----------------------------------------------------------------


class Weather:
    """What S3 does to uploads: the first few of each kind are cut off, refused, or carried out without an answer."""

    def __init__(self) -> None:
        self.num_puts: Counter[str] = Counter()

    def __call__(self, request: str, number: int) -> Fate:
        kind = next((kind for kind in ("traces", "artifacts") if f"/{kind}/" in request), None)
        if kind is None or not request.startswith("PUT"):
            return Pass()
        self.num_puts[kind] += 1
        fates: tuple[Fate, ...] = (CutUpload(100), CutUpload(0), Answer(503, "SlowDown"), Answer(500, "InternalError"))
        return (*fates, LoseAnswer(), LoseAnswer(), *[Pass()] * 1000)[self.num_puts[kind] - 1]


async def train_through(weather: Weather, s3: S3Server, home: Path, policy: Path, bucket: str) -> str:
    """A whole run whose uploads have one try each; returns what it said to standard error."""
    proxy = S3Proxy(s3.url, weather)
    config = write_small_config(
        home,
        policy,
        run={"dir": str(home / "run")},
        blobs={
            "url": f"s3://{bucket}/runs",
            "endpoint_url": await proxy.start(),
            "region": "us-east-1",
            "max_tries": 1,
        },
        rollout={"max_attempts": 20},
        train={"checkpoint_every": 3},
    )
    running = await asyncio.create_subprocess_exec(
        *command("train", config), env=environment(), stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(DEADLINE_S):
            _, errors = await running.communicate()
    finally:
        if running.returncode is None:
            running.kill()
        await proxy.stop()
    assert running.returncode == EXIT_DONE, errors.decode()
    path = home / "run" / "config.yaml"
    path.write_text(re.sub(r"endpoint_url: .*", f"endpoint_url: {s3.url}", path.read_text()))
    return errors.decode()


@pytest.mark.timeout(400)
def test_an_attempt_whose_upload_fails_is_tried_again_and_nothing_is_lost(
    tmp_path: Path, s3: S3Server, bucket: str, capsys: pytest.CaptureFixture[str]
) -> None:
    weather = Weather()
    said = asyncio.run(train_through(weather, s3, tmp_path, write_tiny_model(tmp_path / "policy"), bucket))
    assert "Traceback" not in said
    events = journal_events(tmp_path / "run")
    failed = [event for event in events if isinstance(event, e.InfraFailed)]
    assert {event.reason for event in failed} == {"StorageFailed"}
    assert {kind for kind in ("traces", "artifacts") for event in failed if f"/{kind}/" in event.detail} == {
        "traces",
        "artifacts",
    }
    for event in failed:
        assert f"cannot write s3://{bucket}/runs/run-" in event.detail
        assert "test-secret" not in event.detail
        assert event.lost_tokens > 0
    assert sum(isinstance(event, e.RolloutRetried) for event in events) == len(failed)
    assert main(["audit", str(tmp_path / "run")]) == EXIT_DONE, capsys.readouterr().out
    assert main(["sweep", str(tmp_path / "run"), "--min-age", "0"]) == EXIT_DONE
    assert main(["audit", str(tmp_path / "run")]) == EXIT_DONE, capsys.readouterr().out
