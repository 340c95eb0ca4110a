"""What a run says of itself to those who want to work for it: before the first lease they can tell whether they fit."""

import asyncio
import random
from collections.abc import Sequence

import aiohttp
import msgspec

from steelyard.coordinator import protocol as p
from steelyard.errors import RemoteFailed
from steelyard.metrics import Counters
from steelyard.processes.http_requests import HttpRequests, RetrySettings, Sleep
from steelyard.types import Record

RUN_PATH = "/v1/run"


class RunDescription(Record, frozen=True, kw_only=True):
    """The parts of a run that a worker or scorer elsewhere must have alike.

    ``options_digest`` is over ``environment.options``; ``verifier_version`` is that of the environment's grader;
    ``artifacts_url`` is where artifacts lie, as the run itself sees it; ``lease_s`` is the period of a lease.
    """

    environment: str
    environment_version: str
    options_digest: str
    verifier_version: str
    artifacts_url: str
    lease_s: float


_DECODER = msgspec.msgpack.Decoder(RunDescription)


async def read_description(
    urls: Sequence[str],
    key: str,
    *,
    counters: Counters,
    draw: random.Random,
    settings: RetrySettings | None = None,
    sleep: Sleep = asyncio.sleep,
) -> RunDescription:
    """Ask whichever coordinator of ``urls`` answers, again and again until the deadline of ``settings``.

    Raises:
        DeadlineExceeded: it does not answer.
        Refused: it does not take the key.
        ProtocolMismatch: it speaks another version.
        RemoteFailed, InputError: it is no coordinator of a run.
    """
    headers = {"Authorization": f"Bearer {key}", p.VERSION_HEADER: str(p.PROTOCOL_VERSION)}
    bases = [url.rstrip("/") for url in urls]
    requests = HttpRequests(bases, "coordinator", headers, counters=counters, draw=draw, settings=settings, sleep=sleep)
    async with aiohttp.ClientSession() as http:
        data = await requests.send(http, "GET", RUN_PATH)
    try:
        return _DECODER.decode(data)
    except msgspec.MsgspecError as error:
        raise RemoteFailed(f"{' or '.join(bases)} must describe its run, and does not: {error}") from error
