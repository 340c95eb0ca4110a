import asyncio
from pathlib import Path

import msgspec
import pytest

from steelyard import config_file
from steelyard.config import BlobsConfig, Config
from steelyard.errors import ConfigError
from steelyard.run.blob_place import check_place, keep_logs, with_own_folder
from steelyard.run.directory import RunDirectory
from steelyard.run.stores import Stores, artifacts_url
from steelyard.testing.s3_server import S3Server
from steelyard.traces.local_objects import LocalObjects
from steelyard.traces.opening import open_blob_store

replace = msgspec.structs.replace


def with_blobs(**keys: object) -> Config:
    return config_file.from_tree({"blobs": keys})


def test_a_place_that_can_be_written_passes_and_nothing_stays_there(tmp_path: Path, s3: S3Server, bucket: str) -> None:
    check_place(BlobsConfig())
    check_place(BlobsConfig(url=f"file://{tmp_path}/blobs"))
    check_place(replace(s3.settings(), url=f"s3://{bucket}/runs"))
    assert [path for path in (tmp_path / "blobs").rglob("*") if path.is_file()] == []
    assert s3.keys(bucket) == []


def test_a_place_that_cannot_is_bad_input_that_names_it(tmp_path: Path, s3: S3Server) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match=r"blobs.url must be a place that can be written.*Not a directory"):
        check_place(BlobsConfig(url=f"file://{tmp_path}/file"))
    with pytest.raises(ConfigError, match=r"blobs.url must.*s3://no-such-bucket/runs/checks/\w+: .*404 NoSuchBucket"):
        check_place(replace(s3.settings(), url="s3://no-such-bucket/runs"))
    with pytest.raises(ConfigError, match=r"blobs.url must.*EndpointConnectionError.*\(2 tries\)"):
        check_place(replace(s3.settings("http://127.0.0.1:9"), url="s3://bucket/runs"))


def test_each_run_has_a_folder_of_its_own_in_the_same_place() -> None:
    directory = RunDirectory(Path("/runs/my run (2)-001"))
    config = with_blobs(url="s3://bucket/runs/")
    urls = {with_own_folder(config, directory).blobs.url for _ in range(2)}
    assert len(urls) == 2
    assert all(url is not None and url.startswith("s3://bucket/runs/my-run-2-001-") for url in urls)
    for url in urls:
        assert with_blobs(url=url).blobs.url == url
    assert with_own_folder(Config(), directory) == Config()


def test_other_processes_find_the_artifacts_by_url(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run")
    assert artifacts_url(directory, BlobsConfig()) == f"file://{tmp_path}/run/artifacts"
    assert artifacts_url(directory, BlobsConfig(url="s3://bucket/run-1")) == "s3://bucket/run-1/artifacts"
    assert artifacts_url(directory, BlobsConfig(url="file:///blobs/run-1/")) == "file:///blobs/run-1/artifacts"
    store = open_blob_store(artifacts_url(directory, BlobsConfig()))
    asyncio.run(store.close())


def test_a_folder_of_artifacts_is_there_before_the_first_artifact(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run")
    directory.make_folders()
    blobs = BlobsConfig(url=f"file://{tmp_path}/blobs")
    stores = Stores.open(directory, lambda _: None, blobs)
    assert Path(artifacts_url(directory, blobs).removeprefix("file://")).is_dir()
    asyncio.run(stores.close())


def test_logs_are_kept_beside_the_blobs_and_a_store_that_fails_is_only_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = RunDirectory(tmp_path / "run")
    directory.make_folders()
    directory.log.write_text("log")
    (directory.process_logs / "replica-0.log").write_text("replica")

    async def scenario() -> list[str]:
        objects = LocalObjects(tmp_path / "blobs")
        await keep_logs(objects, directory, 10.0)
        kept = [info.key for info in await objects.list()]
        (directory.process_logs / ".no key").write_text("")
        await keep_logs(objects, directory, 10.0)
        await objects.close()
        return kept

    assert asyncio.run(scenario()) == ["logs/log.jsonl", "logs/replica-0.log"]
    assert "the logs of the run are not all in" in caplog.text


WRONG: dict[str, dict[str, object]] = {
    "blobs.url must be null, s3://bucket/prefix or file:///folder, got http://host/x": {"url": "http://host/x"},
    "blobs.url must be null, s3://bucket/prefix or file:///folder, got s3://b/../c": {"url": "s3://b/../c"},
    "blobs.url must hold no credentials": {"url": "s3://key:secret@bucket/x"},
    "blobs.endpoint_url must hold no credentials": {
        "url": "s3://bucket/x", "endpoint_url": "http://key:secret@host",
    },
    "blobs.endpoint_url must be null unless blobs.url is s3": {"endpoint_url": "http://host:9000"},
    "blobs.region must be null unless blobs.url is s3": {"url": "file:///blobs", "region": "eu-west-1"},
    "blobs.endpoint_url must look like https://host:port, got host:9000": {
        "url": "s3://bucket/x", "endpoint_url": "host:9000",
    },
    r"blobs.max_upload_s must be >= blobs.call_deadline_s \(10.0\), got 5.0": {"max_upload_s": 5},
    "blobs.max_tries must be >= 1, got 0": {"max_tries": 0},
}  # fmt: skip


@pytest.mark.parametrize("message", WRONG)
def test_what_cannot_work_is_refused_in_the_words_of_the_field(message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        with_blobs(**WRONG[message])
    assert "secret" not in str(caught.value)
