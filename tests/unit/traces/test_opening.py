import asyncio
import sys
from pathlib import Path

import pytest

from steelyard.errors import ConfigError
from steelyard.testing.s3_server import S3Server
from steelyard.traces.opening import open_blob_store, open_objects


def test_one_process_reads_by_url_what_another_has_put(tmp_path: Path, s3: S3Server, bucket: str) -> None:
    async def scenario(url: str) -> None:
        stores = [open_blob_store(url, s3.settings()) for _ in range(2)]
        digest = await stores[0].put(b"artifact")
        assert await stores[1].get(digest) == b"artifact"
        for store in stores:
            await store.close()

    asyncio.run(scenario(f"file://{tmp_path}/artifacts"))
    asyncio.run(scenario(f"s3://{bucket}/artifacts"))


@pytest.mark.parametrize(
    "url", ["/tmp/blobs", "file:relative", "file://host/blobs", "http://host/blobs", "s3://", "gs://b"]
)
def test_a_place_of_another_kind_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"must be s3://bucket/prefix or file:///folder, got"):
        open_objects(url)


def test_a_missing_package_is_named_with_the_line_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "steelyard.traces.s3_objects", raising=False)
    monkeypatch.setitem(sys.modules, "s3fs", None)  # as if it were not installed
    with pytest.raises(
        ConfigError, match=r"needs the package s3fs; to install it, type: pip install 'steelyard\[s3\]'"
    ):
        open_objects("s3://bucket/prefix")
