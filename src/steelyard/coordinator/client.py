"""The coordinator from another machine: what a harness worker and a scorer need of it, over HTTP.

A call gets its number once and is repeated under it until an answer arrives, so that it has its effect once, whatever
gets lost. Calls that are made at the same time share requests.

*Consumes* calls. *Waits for* the server, each call with a deadline. *Unblocked by* the answer, the deadline, or an
error that repeating cannot mend. *Produces* the result, or the server's error as its own type.
"""

import asyncio
import random
from collections import deque
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self, TypeVar

import aiohttp
import msgspec

from steelyard.coordinator import protocol as p
from steelyard.coordinator.capability import worker_of
from steelyard.errors import DeadlineExceeded, InputError, Refused, RemoteFailed, RunError, SteelyardError
from steelyard.ids import IdSource
from steelyard.metrics import Counters
from steelyard.processes import frames
from steelyard.processes.http_failures import Failed
from steelyard.processes.http_requests import TRY_AGAIN, HttpRequests, RetrySettings, Sleep
from steelyard.types import ArtifactReport, AttemptFailure, Lease, Record, Score, ScoreJob

_ENCODER = msgspec.msgpack.Encoder()
_REPLY = msgspec.msgpack.Decoder(p.CallReply)
_TRY_AGAIN = TRY_AGAIN | {500}
"""A fault of the server may have hit another call of the request; a repetition has its effect once."""

ResultT = TypeVar("ResultT", bound=p.Result)


class ClientSettings(Record, frozen=True, kw_only=True):
    """``call_deadline_s``: one call with all its tries; a poll has its wait on top.

    ``try_deadline_s``: one try. ``backoff_s`` doubles from try to try up to ``max_backoff_s``, and a random share of up
    to one half is taken off. ``max_requests``: open at a time, polls aside.
    """

    call_deadline_s: float = 30.0
    try_deadline_s: float = 10.0
    backoff_s: float = 0.05
    max_backoff_s: float = 2.0
    max_requests: int = 4
    max_calls_per_request: int = p.MAX_CALLS

    def of_requests(self) -> RetrySettings:
        """Those for one request."""
        return RetrySettings(
            deadline_s=self.call_deadline_s,
            try_deadline_s=self.try_deadline_s,
            backoff_s=self.backoff_s,
            max_backoff_s=self.max_backoff_s,
        )


class _Pending:
    """A call that somebody waits for."""

    def __init__(self, call: p.Call, done: "asyncio.Future[p.Result]") -> None:
        self.call = call
        self.done = done


class CoordinatorClient:
    """A ``LeaseSource`` and a ``ScoreSource``. Use as an async context manager.

    Every method raises ``Refused`` where the coordinator refuses, and ``RunError`` where it cannot be reached within
    the deadline or the run has failed.

    Args:
        url: base URL of the server; several where standbys may take over, tried in turn.
        key: capability key; its ``worker_id`` is the only one that may be named.
        counters: ``coordinator_client.retried`` counts tries after the first.
        draw: of the random share of the back-off.
        sleep: how the back-off is waited out.

    Raises:
        InputError: the key has not the form of one, or there is no URL.
    """

    def __init__(
        self,
        url: str | Sequence[str],
        key: str,
        *,
        ids: IdSource,
        counters: Counters,
        draw: random.Random,
        settings: ClientSettings | None = None,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self.worker_id = worker_of(key)
        urls = (url,) if isinstance(url, str) else tuple(url)
        if not urls:
            raise InputError("url: must name at least one coordinator, got none")
        self._settings = settings or ClientSettings()
        self._requests = HttpRequests(
            [base.rstrip("/") for base in urls],
            "coordinator",
            {
                "Authorization": f"Bearer {key}",
                p.VERSION_HEADER: str(p.PROTOCOL_VERSION),
                "Content-Type": p.CONTENT_TYPE,
            },
            counters=counters,
            draw=draw,
            settings=self._settings.of_requests(),
            sleep=sleep,
            try_again=_TRY_AGAIN,
        )
        self._http: aiohttp.ClientSession | None = None
        self._calls = _Numbering(ids.new("ses"))
        self._polls = _Numbering(ids.new("ses"))
        self._queue: deque[_Pending] = deque()
        self._senders: set[asyncio.Task[None]] = set()
        self._polling = asyncio.Lock()
        self._unstarted: dict[str, None] = {}
        self._jobs: dict[str, str] = {}

    async def __aenter__(self) -> Self:
        # Deadlines are set for each request; the number of connections is bounded by that of the requests.
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None),
            auto_decompress=False,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End open requests, and with them the calls."""
        senders = list(self._senders)
        for sender in senders:
            sender.cancel()
        await asyncio.gather(*senders, return_exceptions=True)
        while self._queue:
            self._settle(self._queue.popleft(), RunError("the client of the coordinator was closed"))
        if self._http is not None:
            await self._http.close()

    # --- harness workers --------------------------------------------------------------------------

    async def lease(self, worker_id: str, max_leases: int, wait_s: float) -> Sequence[Lease]:
        """Up to ``max_leases`` leases; waits up to ``wait_s`` seconds for the first, then may return none."""
        self._require_own(worker_id)
        async with self._polling:
            num_asked = min(max_leases, p.MAX_GRANTS)
            call = p.LeaseCall(max_leases=num_asked, wait_s=float(wait_s), unstarted=tuple(self._unstarted))
            leases = _expect(p.Leased, await self._poll(call, wait_s)).leases
            self._unstarted.update((lease.attempt_id, None) for lease in leases)
            return leases

    async def start(self, attempt_id: str, attempt_number: int) -> None:
        """The attempt runs now. Raises ``Refused`` where it is no longer ours."""
        await self._report(attempt_id, p.StartCall(attempt_id=attempt_id, attempt_number=attempt_number))

    async def heartbeat(self, worker_id: str, attempts: Mapping[str, int]) -> Sequence[str]:
        """Renew the leases of live attempts (id to number); returns the ids of those that are lost."""
        self._require_own(worker_id)
        lost = _expect(p.Lost, await self._call(p.HeartbeatCall(attempt_ids=tuple(attempts)))).attempt_ids
        for attempt_id in lost:
            self._unstarted.pop(attempt_id, None)
        return lost

    async def artifact_ready(self, report: ArtifactReport) -> None:
        """The attempt is done. Raises ``Refused`` where it comes late or twice."""
        await self._report(report.attempt_id, p.ArtifactReadyCall(report=report))

    async def attempt_failed(self, failure: AttemptFailure) -> None:
        """The system could not carry it through. Raises ``Refused`` where it comes late or twice."""
        await self._report(failure.attempt_id, p.AttemptFailedCall(failure=failure))

    # --- scorers ----------------------------------------------------------------------------------

    async def lease_scores(self, worker_id: str, max_jobs: int, wait_s: float) -> Sequence[ScoreJob]:
        """Up to ``max_jobs`` jobs; none where there was none within ``wait_s`` seconds."""
        self._require_own(worker_id)
        async with self._polling:
            held = tuple(self._jobs.values())
            call = p.LeaseScoresCall(max_jobs=min(max_jobs, p.MAX_GRANTS), wait_s=float(wait_s), held=held)
            jobs = _expect(p.Jobs, await self._poll(call, wait_s)).jobs
            self._jobs.update((job.attempt_id, job.job_id) for job in jobs)
            return jobs

    async def score(self, score: Score) -> None:
        """Deliver. Raises ``Refused`` where the job is over."""
        await self._deliver(score.attempt_id, p.ScoreCall(score=score))

    async def artifact_lost(self, attempt_id: str, detail: str) -> None:
        """The artifact cannot be read back. Raises ``Refused`` where the attempt is not waiting to be scored."""
        await self._deliver(attempt_id, p.ArtifactLostCall(attempt_id=attempt_id, detail=detail))

    # --- machinery --------------------------------------------------------------------------------

    async def perform(self, call: p.Call, kind: type[ResultT], wait_s: float | None = None) -> ResultT:
        """The result of any call of the key's role, as the methods above and those of links beside this are made.

        Args:
            kind: the result's type.
            wait_s: how long the server may wait with its answer; None for a call that does not wait.
        """
        result = await (self._call(call) if wait_s is None else self._poll(call, wait_s))
        return _expect(kind, result)

    def _require_own(self, worker_id: str) -> None:
        if worker_id != self.worker_id:
            raise InputError(f"worker_id: must be {self.worker_id}, whom the key names, got {worker_id}")

    async def _report(self, attempt_id: str, call: p.Call) -> None:
        """Until the coordinator has answered, whatever it answers, the attempt stays on the list of the unstarted."""
        try:
            _expect(p.Done, await self._call(call))
        except Refused:
            self._unstarted.pop(attempt_id, None)
            raise
        self._unstarted.pop(attempt_id, None)

    async def _deliver(self, attempt_id: str, call: p.Call) -> None:
        try:
            _expect(p.Done, await self._call(call))
        except Refused:
            self._jobs.pop(attempt_id, None)
            raise
        self._jobs.pop(attempt_id, None)

    async def _call(self, call: p.Call) -> p.Result:
        """Put a call in line and wait for its result. Bounded by the deadline of the request that it goes with."""
        pending = _Pending(call, asyncio.get_running_loop().create_future())
        self._queue.append(pending)
        if len(self._senders) < self._settings.max_requests:
            sender = asyncio.create_task(self._send_queued(), name=f"calls of {self.worker_id}")
            self._senders.add(sender)
            sender.add_done_callback(self._senders.discard)
        deadline_s = self._settings.call_deadline_s
        try:
            async with asyncio.timeout(deadline_s):
                return await pending.done
        except TimeoutError:
            raise DeadlineExceeded("an answer of the coordinator", (self._requests.url,), deadline_s) from None

    async def _poll(self, call: p.Call, wait_s: float) -> p.Result:
        """A poll has a request and a numbering of its own, so that it holds up nothing else."""
        with self._polls.numbered([call]) as request:
            return (await self._request(request, wait_s))[0]

    async def _send_queued(self) -> None:
        """Send what is in line, as many calls a request as there are, until there is nothing left."""
        while self._queue and self._calls.num_free:
            limit = min(self._settings.max_calls_per_request, self._calls.num_free)
            batch: list[_Pending] = []
            while self._queue and len(batch) < limit:
                pending = self._queue.popleft()
                if not pending.done.done():
                    batch.append(pending)
            if batch:
                await self._send_batch(batch)

    async def _send_batch(self, batch: list[_Pending]) -> None:
        error: SteelyardError = RunError("the client of the coordinator was closed")
        results: Sequence[p.Result] = ()
        try:
            with self._calls.numbered([pending.call for pending in batch]) as request:
                results = await self._request(request, 0.0)
        except SteelyardError as failure:
            error = failure
        finally:
            for index, pending in enumerate(batch):
                self._settle(pending, results[index] if results else error)

    def _settle(self, pending: _Pending, result: p.Result | SteelyardError) -> None:
        if pending.done.done():
            return  # whoever asked has gone, by a deadline of its own
        if isinstance(result, SteelyardError):
            pending.done.set_exception(result)
        else:
            pending.done.set_result(result)

    async def _request(self, request: p.CallRequest, wait_s: float) -> Sequence[p.Result]:
        """The results of a request, which is repeated as it is until it is answered.

        Raises:
            DeadlineExceeded: no answer in time; names the last failure.
            SteelyardError: the request was refused as a whole, by the error's own type.
        """
        assert self._http is not None, "the client must be entered before it is used"
        url = self._requests.url
        data = await self._requests.send(self._http, "POST", p.CALLS_PATH, _ENCODER.encode(request), wait_s=wait_s)
        try:
            return _in_order(request, _REPLY.decode(data))
        except msgspec.MsgspecError as error:
            raise RemoteFailed(f"{url} must answer with a CallReply: {error}") from error


class _Numbering:
    """The numbers of one session, and which of them are not answered."""

    def __init__(self, session_id: str) -> None:
        self._session_id = session_id
        self._next = 0
        self._open: dict[int, None] = {}

    @property
    def num_free(self) -> int:
        """So many numbers may be given out before the oldest open one is answered."""
        return self._answered_below + p.MAX_OPEN_CALLS - self._next

    @property
    def _answered_below(self) -> int:
        # Numbers are opened in ascending order, and a dict keeps that order.
        return next(iter(self._open), self._next)

    def numbered(self, calls: Sequence[p.Call]) -> "_OpenNumbers":
        """A request with these calls; their numbers are open until the block ends, answered or given up."""
        first = self._next
        self._next += len(calls)
        self._open.update((first + index, None) for index in range(len(calls)))
        request = p.CallRequest(
            session_id=self._session_id,
            answered_below=self._answered_below,
            calls=tuple(p.NumberedCall(sequence=first + index, call=call) for index, call in enumerate(calls)),
        )
        return _OpenNumbers(self, request)

    def close(self, request: p.CallRequest) -> None:
        """Nobody asks for these answers again."""
        for numbered in request.calls:
            del self._open[numbered.sequence]


class _OpenNumbers:
    """A request whose numbers are in use inside the block."""

    def __init__(self, numbering: _Numbering, request: p.CallRequest) -> None:
        self._numbering = numbering
        self._request = request

    def __enter__(self) -> p.CallRequest:
        return self._request

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._numbering.close(self._request)


def _in_order(request: p.CallRequest, reply: p.CallReply) -> list[p.Result]:
    asked = [numbered.sequence for numbered in request.calls]
    answered = [answer.sequence for answer in reply.answers]
    if asked != answered:
        raise RemoteFailed(f"the answers must be to the calls {asked}, got answers to {answered}")
    return [answer.result for answer in reply.answers]


def _expect(kind: type[ResultT], result: p.Result) -> ResultT:
    """The result of the kind that the call has; the error where it failed."""
    if isinstance(result, kind):
        return result
    if isinstance(result, Failed):
        raise _error(result)
    raise RemoteFailed(f"the result must be {kind.__name__}, got {type(result).__name__}")


def _error(failed: Failed) -> SteelyardError:
    body = frames.ErrorBody(reason=failed.reason, message=failed.message)
    return frames.error_of(failed.kind, body, "the coordinator", "a call")
