"""Objects in S3, or in any server that speaks it, through s3fs.

The library's own repetitions are switched off: tries, pauses and deadlines are counted here, in one place. (aiohttp
sends a request a second time at once where the connection ended before an answer; that is one try.) An object is put
with a single PUT request, which S3 carries out whole or not at all.

*Consumes* calls; *waits for* the server, ``call_deadline_s`` for one try and a limit for all of them; *unblocked by*
the answer, or by an error that repeating cannot mend; *produces* the answer, or StorageFailed.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, TypeVar

import aiohttp
import s3fs
from botocore import exceptions as boto
from botocore.parsers import ResponseParserError

from steelyard.config import BlobsConfig
from steelyard.errors import IntegrityError, StorageFailed
from steelyard.traces.objects import ObjectInfo, check_key

Value = TypeVar("Value")
Sleep = Callable[[float], Awaitable[None]]

_MAX_OPEN_CALLS = 32
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 5.0
_MAX_PUT_BYTES = 5 << 30
"""S3 takes no more in one PUT request."""

_MISSING = frozenset({"NoSuchKey", "404"})
_PASSING = frozenset(
    {"RequestTimeout", "IncompleteBody", "BadDigest", "XAmzContentSHA256Mismatch", "OperationAborted", "SlowDown"}
)
"""Error codes that a repetition may mend although their status says that the request was at fault."""

_PASSING_ERRORS = (
    OSError,
    aiohttp.ClientError,
    boto.HTTPClientError,
    boto.ConnectionError,
    boto.IncompleteReadError,
    ResponseParserError,
)
"""What comes without an answer: no connection, one that ended, half an answer, none in time."""


class Fault(NamedTuple):
    """Why a try failed. ``is_passing``: another one may succeed. ``is_missing``: there is no such object."""

    text: str
    is_passing: bool = False
    is_missing: bool = False


class S3Objects:
    """Objects below ``s3://bucket/prefix``. Belongs to the event loop of its first call.

    Args:
        url: the place.
        settings: deadlines, tries, and where the server is; credentials are found by the library.
        sleep: how pauses between tries are made.
        draw: takes up to one half off each pause, so that many callers do not come back at once.
    """

    def __init__(
        self,
        url: str,
        settings: BlobsConfig,
        *,
        sleep: Sleep = asyncio.sleep,
        draw: random.Random | None = None,
    ) -> None:
        self._url = url.rstrip("/")
        self._root = self._url.removeprefix("s3://")
        self._settings = settings
        self._sleep = sleep
        self._draw = draw or random.Random()
        self._files: Any = None
        self._open_calls = asyncio.Semaphore(_MAX_OPEN_CALLS)

    @property
    def url(self) -> str:
        """``s3://bucket/prefix``."""
        return self._url

    async def put(self, key: str, data: bytes) -> None:
        """Returns when S3 has said that it has the whole object."""
        path = self._path(key)
        if len(data) > _MAX_PUT_BYTES:
            raise StorageFailed(f"an object must be at most {_MAX_PUT_BYTES} bytes, {self._url}/{key} has {len(data)}")

        async def put(files: Any) -> None:
            # A chunk larger than the data keeps the library from putting it in parts.
            await files._pipe_file(path, data, chunksize=_MAX_PUT_BYTES)

        await self._call("write", key, put, limit_s=self._settings.max_upload_s)

    async def get(self, key: str) -> bytes:
        """Read the object with one GET request."""
        path = self._path(key)

        async def get(files: Any) -> bytes:
            data: bytes = await files._cat_file(path)
            return data

        try:
            return await self._call("read", key, get, may_miss=True)
        except _NoSuchObject:
            raise IntegrityError(f"{self._url}/{key} must exist, and does not") from None

    async def exists(self, key: str) -> bool:
        """Ask with one HEAD request."""
        path = self._path(key)

        async def head(files: Any) -> None:
            bucket, name, _ = files.split_path(path)
            await files._call_s3("head_object", Bucket=bucket, Key=name)

        try:
            await self._call("look for", key, head, may_miss=True)
        except _NoSuchObject:
            return False
        return True

    async def list(self, prefix: str = "") -> tuple[ObjectInfo, ...]:
        """List page by page, each page a call of its own."""
        found: list[ObjectInfo] = []
        token: str | None = None
        while True:
            page = await self._call("list", prefix, self._page(prefix, token))
            found += [self._info(entry) for entry in page.get("Contents", ())]
            token = page.get("NextContinuationToken") if page.get("IsTruncated") else None
            if token is None:
                return tuple(sorted(found, key=lambda info: info.key))

    async def delete(self, key: str) -> None:
        """Delete; S3 does not say whether there was one."""
        path = self._path(key)
        try:
            await self._call("delete", key, lambda files: files._rm_file(path), may_miss=True)
        except _NoSuchObject:
            return

    async def close(self) -> None:
        """Close the connections."""
        files, self._files = self._files, None
        if files is not None and files._s3 is not None:
            await files._s3.close()

    def _page(self, prefix: str, token: str | None) -> Callable[[Any], Awaitable[dict[str, Any]]]:
        async def page(files: Any) -> dict[str, Any]:
            bucket, root, _ = files.split_path(self._root)
            more = {} if token is None else {"ContinuationToken": token}
            start = f"{root}/{prefix}" if root else prefix
            answer: dict[str, Any] = await files._call_s3("list_objects_v2", Bucket=bucket, Prefix=start, **more)
            return answer

        return page

    def _info(self, entry: dict[str, Any]) -> ObjectInfo:
        root = self._root.partition("/")[2]
        return ObjectInfo(
            key=entry["Key"][len(root) + 1 if root else 0 :],
            num_bytes=entry["Size"],
            modified_at_s=entry["LastModified"].timestamp(),
        )

    def _path(self, key: str) -> str:
        return f"{self._root}/{check_key(key)}"

    async def _call(
        self,
        doing: str,
        key: str,
        make: Callable[[Any], Awaitable[Value]],
        *,
        limit_s: float | None = None,
        may_miss: bool = False,
    ) -> Value:
        """Call until it succeeds, cannot, was tried ``max_tries`` times, or the limit for all tries is reached.

        Raises:
            StorageFailed: names bucket and key, and the last fault.
            _NoSuchObject: the server said so, and ``may_miss``.
        """
        settings = self._settings
        if limit_s is None:
            limit_s = (settings.call_deadline_s + _LONGEST_PAUSE_S) * settings.max_tries
        fault = Fault("no answer")
        num_tries = 0
        try:
            async with asyncio.timeout(limit_s), self._open_calls:
                files = await self._connected()
                while num_tries < settings.max_tries:
                    if num_tries:
                        await self._sleep(self._pause_s(num_tries))
                    num_tries += 1
                    try:
                        async with asyncio.timeout(settings.call_deadline_s):
                            return await make(files)
                    except (*_PASSING_ERRORS, boto.BotoCoreError, boto.ClientError) as error:
                        fault = self._fault(error)
                    if fault.is_missing and may_miss:
                        raise _NoSuchObject
                    if not fault.is_passing:
                        break
        except TimeoutError:
            fault = Fault(f"{fault.text}, and {limit_s:g} s are over")
        tries = "1 try" if num_tries == 1 else f"{num_tries} tries"
        raise StorageFailed(f"cannot {doing} {self._url}/{key}: {fault.text} ({tries})")

    async def _connected(self) -> Any:
        if self._files is None:
            settings = self._settings
            self._files = s3fs.S3FileSystem(
                asynchronous=True,
                skip_instance_cache=True,
                use_listings_cache=False,
                endpoint_url=settings.endpoint_url,
                max_concurrency=1,
                client_kwargs={"region_name": settings.region} if settings.region else {},
                config_kwargs={
                    # Longer than ours, which is the one that decides and that is named.
                    "connect_timeout": 2 * settings.call_deadline_s,
                    "read_timeout": 2 * settings.call_deadline_s,
                    "max_pool_connections": _MAX_OPEN_CALLS,
                    "retries": {"total_max_attempts": 1, "mode": "standard"},
                },
            )
            self._files.retries = 1
        try:
            await self._files.set_session()
        except (boto.BotoCoreError, ValueError, OSError) as error:
            # Of the library's own files: an unknown profile, an unreadable configuration. No server was asked.
            raise StorageFailed(f"cannot open {self._url}: {type(error).__name__}: {error}") from None
        return self._files

    def _pause_s(self, num_tries: int) -> float:
        longest_s = min(_FIRST_PAUSE_S * (1 << (num_tries - 1)), _LONGEST_PAUSE_S)
        return longest_s * (1 - self._draw.random() / 2)

    def _fault(self, error: Exception) -> Fault:
        """What an error means. Its text is the server's code and message, or that of the connection."""
        answer = getattr(error.__cause__ or error, "response", None)
        if isinstance(answer, dict):
            code = str(answer.get("Error", {}).get("Code", "unknown"))
            message = " ".join(str(answer.get("Error", {}).get("Message", "")).split())[:200]
            status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
            text = f"the server answered {status} {code}: {message}"
            is_passing = status >= 500 or status in {0, 200, 408, 429} or code in _PASSING
            return Fault(text, is_passing=is_passing, is_missing=code in _MISSING)
        if isinstance(error, TimeoutError):
            return Fault(f"no answer within {self._settings.call_deadline_s:g} s", is_passing=True)
        return Fault(f"{type(error).__name__}: {error}", is_passing=isinstance(error, _PASSING_ERRORS))


class _NoSuchObject(Exception):
    """There is no object under the key."""
