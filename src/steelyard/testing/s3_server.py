"""A real S3 server on the loopback, in a process of its own: moto's, which keeps everything in memory.

``python -m steelyard.testing.s3_server`` serves until its standard input ends, and says its URL first.
"""

import contextlib
import subprocess
import sys
import urllib.request
from collections.abc import Iterator

import boto3
from moto.server import ThreadedMotoServer

from steelyard.config import BlobsConfig

REGION = "us-east-1"
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "test-key",
    "AWS_SECRET_ACCESS_KEY": "test-secret",
    "AWS_EC2_METADATA_DISABLED": "true",
}
"""Environment variables for whoever talks to the server. The server takes any until :meth:`S3Server.lock`."""

_START_DEADLINE_S = 60.0


class S3Server:
    """A running server, looked at and changed past all of our own code.

    Args:
        url: its base URL.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.client = boto3.client(
            "s3",
            endpoint_url=url,
            region_name=REGION,
            aws_access_key_id=CREDENTIALS["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
        )

    def close(self) -> None:
        """Close the connections to it."""
        self.client.close()

    def make_bucket(self, name: str) -> str:
        """A new bucket; returns its URL."""
        self.client.create_bucket(Bucket=name)
        return f"s3://{name}"

    def settings(self, endpoint_url: str | None = None, **changes: object) -> BlobsConfig:
        """For a client of this server, or of a proxy in front of it."""
        keys = {"endpoint_url": endpoint_url or self.url, "region": REGION, **changes}
        return BlobsConfig(**keys)  # type: ignore[arg-type]

    def keys(self, bucket: str) -> list[str]:
        """All keys of a bucket, ordered."""
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=bucket)
        return sorted(entry["Key"] for page in pages for entry in page.get("Contents", ()))

    def read(self, bucket: str, key: str) -> bytes:
        """An object's bytes."""
        data: bytes = self.client.get_object(Bucket=bucket, Key=key)["Body"].read()
        return data

    def write(self, bucket: str, key: str, data: bytes) -> None:
        """Put an object, in place of another."""
        self.client.put_object(Bucket=bucket, Key=key, Body=data)

    def lock(self) -> None:
        """From now on credentials are checked, and nobody has valid ones."""
        headers = {"Content-Type": "text/plain"}
        request = urllib.request.Request(f"{self.url}/moto-api/reset-auth", data=b"0", headers=headers, method="POST")
        with urllib.request.urlopen(request, timeout=_START_DEADLINE_S):
            pass


@contextlib.contextmanager
def s3_server() -> Iterator[S3Server]:
    """Start a server; it ends with the block, and with this process however that ends."""
    command = [sys.executable, "-m", "steelyard.testing.s3_server"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            assert url.startswith("http"), "the S3 server did not start"
            with contextlib.closing(S3Server(url)) as server:
                yield server
        finally:
            process.kill()


def main() -> None:
    """Serve until standard input ends."""
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    sys.stdout.write(f"http://{host}:{port}\n")
    sys.stdout.flush()
    sys.stdin.read()


if __name__ == "__main__":
    main()
