"""Requests to a server of ours that are repeated, with back-off, until they are answered or their deadline is over.

Only for requests that may arrive any number of times. *Waits for* the server; *unblocked by* its answer, the deadline,
or an answer that repeating cannot mend, which is raised as the server's own error.
"""

import asyncio
import logging
import random
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence

import aiohttp

from steelyard.errors import DeadlineExceeded, InputError, RemoteFailed, RunError, SteelyardError
from steelyard.metrics import Counters
from steelyard.processes.http_failures import failure_of
from steelyard.types import Record

_LOG = logging.getLogger(__name__)
TRY_AGAIN = frozenset({408, 429, 502, 503, 504})
"""Statuses that say nothing about the request itself."""

Sleep = Callable[[float], Awaitable[None]]


class RetrySettings(Record, frozen=True, kw_only=True):
    """``deadline_s``: one request with all its tries. ``try_deadline_s``: one try.

    ``backoff_s`` doubles from try to try up to ``max_backoff_s``; a random share of up to one half is taken off.
    """

    deadline_s: float = 30.0
    try_deadline_s: float = 10.0
    backoff_s: float = 0.05
    max_backoff_s: float = 2.0

    def wait_s(self, num_tries: int, draw: random.Random) -> float:
        """How long to wait after so many tries."""
        longest_s = min(self.max_backoff_s, self.backoff_s * 2.0 ** min(num_tries - 1, 30))
        return longest_s * (1.0 - 0.5 * draw.random())


class HttpRequests:
    """Sends requests to one server, or to those of several that answers.

    Args:
        url: base URL; several where others may take over, tried in turn.
        peer: how messages call the server, and the prefix of ``<peer>_client.retried``, which counts tries after the
            first.
        headers: of every request.
        draw: of the random share of the back-off.
        sleep: how the back-off is waited out.
        try_again: statuses after which a request is repeated.
    """

    def __init__(
        self,
        url: str | Sequence[str],
        peer: str,
        headers: Mapping[str, str],
        *,
        counters: Counters,
        draw: random.Random,
        settings: RetrySettings | None = None,
        sleep: Sleep = asyncio.sleep,
        try_again: frozenset[int] = TRY_AGAIN,
    ) -> None:
        self._urls = deque((url,) if isinstance(url, str) else url)
        self._peer = peer
        self._headers = dict(headers)
        self._counters = counters
        self._draw = draw
        self._settings = settings or RetrySettings()
        self._sleep = sleep
        self._try_again = try_again

    @property
    def url(self) -> str:
        """The server that is asked next."""
        return self._urls[0]

    async def send(
        self, http: aiohttp.ClientSession, method: str, path: str, body: bytes | None = None, *, wait_s: float = 0.0
    ) -> bytes:
        """The body of the answer.

        Args:
            wait_s: how long the server may wait before it answers; comes on top of the deadlines.

        Raises:
            DeadlineExceeded: no answer in time; names the last failure.
            SteelyardError: what the server said, by its own type.
        """
        limit_s, failure, num_tries = self._settings.deadline_s + wait_s, "no answer", 0
        try:
            async with asyncio.timeout(limit_s):
                while True:
                    url = self.url
                    outcome = await self._try(http, method, url + path, body, self._settings.try_deadline_s + wait_s)
                    if isinstance(outcome, bytes):
                        return outcome
                    failure, num_tries = outcome, num_tries + 1
                    _LOG.info("%s%s: try %d failed: %s", url, path, num_tries, failure)
                    self._try_next(url)
                    self._counters.add(f"{self._peer}_client.retried")
                    await self._sleep(self._settings.wait_s(num_tries, self._draw))
        except TimeoutError:
            what = f"an answer of the {self._peer} ({failure})"
            raise DeadlineExceeded(what, tuple(sorted(self._urls)), limit_s) from None

    def _try_next(self, failed: str) -> None:
        """Turn to the next server, unless another request that failed has done so."""
        if self.url == failed:
            self._urls.rotate(-1)

    async def _try(
        self, http: aiohttp.ClientSession, method: str, url: str, body: bytes | None, limit_s: float
    ) -> bytes | str:
        """One try: the answer's body, or why it should be tried again."""
        if http.closed:
            raise RunError(f"the client of the {self._peer} was closed")
        timeout = aiohttp.ClientTimeout(total=limit_s)
        try:
            async with http.request(
                method, url, data=body, headers=self._headers, timeout=timeout, allow_redirects=False
            ) as response:
                data, status = await response.read(), response.status
        except aiohttp.InvalidURL:
            raise InputError(f"the URL of the {self._peer} must be http://HOST:PORT, got {url}") from None
        except (aiohttp.ClientError, OSError) as error:
            # OSError includes the deadline of the try.
            return f"{type(error).__name__}: {error}"
        if status == 200:
            return data
        if status in self._try_again:
            return f"status {status}: {self._failure(url, status, data)}"
        raise self._failure(url, status, data)

    def _failure(self, url: str, status: int, data: bytes) -> SteelyardError:
        failure = failure_of(data, f"the {self._peer}", "a request")
        if failure is None:
            return RemoteFailed(f"{url} answered with status {status}, which is no answer of a {self._peer}")
        return failure
