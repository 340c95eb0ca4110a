"""Opening a store of objects by its URL, here or in another process or on another machine."""

from pathlib import Path
from urllib.parse import urlsplit

from steelyard.config import BlobsConfig
from steelyard.errors import ConfigError
from steelyard.traces.blobs import BlobStore
from steelyard.traces.local_objects import LocalObjects
from steelyard.traces.objects import ObjectStore


def open_objects(url: str, settings: BlobsConfig | None = None) -> ObjectStore:
    """The store at ``s3://bucket/prefix`` or ``file:///folder``, which other processes may have open too.

    Nothing is asked of a server yet: that it cannot be reached shows in the first call.

    Args:
        settings: where the server is, deadlines and tries; ``settings.url`` is not looked at. None: the defaults.

    Raises:
        ConfigError: the URL is of another kind, or the package that it needs is missing.
        StorageFailed: the folder cannot be made.
    """
    settings = settings or BlobsConfig()
    parts = urlsplit(url)
    if parts.scheme == "s3" and parts.netloc:
        try:
            from steelyard.traces.s3_objects import S3Objects  # noqa: PLC0415 (an optional dependency, and slow to load)
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"blobs.url {url} needs the package {error.name}; to install it, type: pip install 'steelyard[s3]'"
            ) from None
        return S3Objects(url, settings)
    if parts.scheme == "file" and not parts.netloc and Path(parts.path).is_absolute():
        return LocalObjects(Path(parts.path), spare_younger_s=settings.max_upload_s)
    raise ConfigError(f"blobs.url must be s3://bucket/prefix or file:///folder, got {url}")


def open_blob_store(url: str, settings: BlobsConfig | None = None) -> BlobStore:
    """The content-addressed blobs that lie at ``url``; see :func:`open_objects`."""
    return BlobStore(open_objects(url, settings))
