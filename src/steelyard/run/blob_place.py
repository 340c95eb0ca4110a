"""The place of a run's blobs outside its directory: checked before a start, a folder for each run, logs at the end."""

import asyncio
import logging
import re
import secrets
from pathlib import Path

import msgspec

from steelyard.config import BlobsConfig, Config
from steelyard.errors import ConfigError, IntegrityError, StorageFailed
from steelyard.run.directory import RunDirectory
from steelyard.traces.objects import ObjectStore
from steelyard.traces.opening import open_objects

logger = logging.getLogger(__name__)

CHECK_PREFIX = "checks/"
LOG_PREFIX = "logs/"

_NUM_CHECK_TRIES = 2


def check_place(blobs: BlobsConfig) -> None:
    """Write, read and delete a small object, to know before a start that it can be done. Not inside an event loop.

    Raises:
        ConfigError: it cannot be done; says where and why, after two tries of ``call_deadline_s`` at most.
    """
    if blobs.url is None:
        return
    settings = msgspec.structs.replace(
        blobs, max_tries=_NUM_CHECK_TRIES, max_upload_s=_NUM_CHECK_TRIES * blobs.call_deadline_s
    )
    try:
        asyncio.run(_try_out(blobs.url, settings))
    except (StorageFailed, IntegrityError) as error:
        raise ConfigError(f"blobs.url must be a place that can be written and read, it is not: {error}") from None


async def _try_out(url: str, settings: BlobsConfig) -> None:
    key, data = f"{CHECK_PREFIX}{secrets.token_hex(8)}", b"steelyard was here"
    objects = open_objects(url, settings)
    try:
        await objects.put(key, data)
        if (found := await objects.get(key)) != data:
            raise IntegrityError(f"{url}/{key} must hold what was written a moment ago, holds {found[:50]!r}")
        await objects.delete(key)
    finally:
        await objects.close()


def with_own_folder(config: Config, directory: RunDirectory) -> Config:
    """The configuration of a new run: its blobs lie in a folder that no other run has."""
    if config.blobs.url is None:
        return config
    name = re.sub(r"[^A-Za-z0-9_]+", "-", directory.path.name)
    url = f"{config.blobs.url.rstrip('/')}/{name}-{secrets.token_hex(4)}"
    return msgspec.structs.replace(config, blobs=msgspec.structs.replace(config.blobs, url=url))


async def keep_logs(objects: ObjectStore, directory: RunDirectory, deadline_s: float) -> None:
    """Put copies of the run's logs and metrics beside its blobs. Where that fails it is logged, and no more."""
    paths = [directory.log, directory.metrics, *sorted(directory.process_logs.glob("*"))]
    try:
        async with asyncio.timeout(deadline_s):
            for path in paths:
                if (data := await asyncio.to_thread(_read, path)) is not None:
                    await objects.put(f"{LOG_PREFIX}{path.name}", data)
    except (StorageFailed, IntegrityError, TimeoutError) as error:
        logger.warning("the logs of the run are not all in %s: %s", objects.url, error)


def _read(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None
