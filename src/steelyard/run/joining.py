"""What a worker and a scorer on another machine share: key, own folder, whether they fit the run, when to stop."""

import asyncio
import contextlib
import fcntl
import logging
import random
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Generic, Protocol, TypeVar
from urllib.parse import urlsplit

from steelyard.clock import Clock, SystemClock
from steelyard.config import BlobsConfig, Config
from steelyard.coordinator.capability import Role, role_of, worker_of
from steelyard.coordinator.client import ClientSettings, CoordinatorClient
from steelyard.coordinator.description import RunDescription, read_description
from steelyard.digests import digest_bytes
from steelyard.durable import storage_errors
from steelyard.environments.base import Environment, Services
from steelyard.environments.registry import make_environment
from steelyard.errors import ConfigError, InputError, Refused, StorageFailed
from steelyard.ids import RandomIds
from steelyard.log import log_to_file
from steelyard.metrics import Counters
from steelyard.processes.http_requests import RetrySettings
from steelyard.processes.supervision import end_all, supervise
from steelyard.run.patience import Patience
from steelyard.sandbox.function_calls import run_function_calls
from steelyard.sandbox.registry import end_abandoned_sandboxes
from steelyard.traces.blobs import BlobStore
from steelyard.traces.opening import open_blob_store
from steelyard.types import Record

NEWS_EVERY_S = 30.0
_CALL_DEADLINE_S = 10.0
_SWEPT_WITHIN_S = 3.0
_LOOK_AGAIN_S = 0.05

Value = TypeVar("Value")


class JoinOptions(Record, frozen=True, kw_only=True):
    """What the command line says.

    ``coordinators``: URLs, several where standbys may take over. ``artifacts``: where artifacts lie as this machine
    sees it; None takes what the run says. ``home``: where notes and logs are kept. ``lost_after_s``: how long the
    coordinator may be silent. ``drain_s``: how long work under way may go on after a stop; None takes a default.
    """

    coordinators: tuple[str, ...]
    key_file: str
    home: str
    artifacts: str | None = None
    lost_after_s: float = 120.0
    drain_s: float | None = None

    @property
    def call_deadline_s(self) -> float:
        """One call to the coordinator or the gateway, with its tries; for longer it is a matter of patience."""
        return min(_CALL_DEADLINE_S, self.lost_after_s)


class Joined(Protocol):
    """A worker or scorer that has joined its run."""

    async def run(self, stop: asyncio.Event) -> None:
        """Work until ``stop``, then end what is under way."""
        ...

    def news(self) -> str:
        """What it has done, for people."""
        ...


OptionsT = TypeVar("OptionsT", bound="JoinOptions")


@dataclass(frozen=True)
class Joining(Generic[OptionsT]):
    """What somebody has who is about to join. What is opened on the way is closed by ``stack``; ``home`` is its own."""

    config: Config
    options: OptionsT
    key: str
    environment: Environment
    home: Path
    say: "Lines"
    stack: AsyncExitStack
    stop: asyncio.Event
    clock: Clock
    counters: Counters
    draw: random.Random

    @property
    def patient(self) -> RetrySettings:
        """For a first call: as long as the coordinator may be silent."""
        return RetrySettings(deadline_s=self.options.lost_after_s)

    async def look(self) -> RunDescription:
        """What the run says of itself; the coordinator is there and takes the key."""
        return await accepted(
            read_description(
                self.options.coordinators, self.key, counters=self.counters, draw=self.draw, settings=self.patient
            )
        )

    def patience(self) -> Patience:
        """What goes on through a coordinator that is silent for no longer than may be."""
        return Patience(self.options.lost_after_s, self.clock, self.say)

    def artifacts(self, run: RunDescription) -> BlobStore:
        """The run's artifacts, closed at the end."""
        store = open_artifacts(self.options.artifacts or run.artifacts_url, self.config.blobs)
        self.stack.push_async_callback(store.close)
        return store

    async def client(self) -> CoordinatorClient:
        """A client of the coordinator, closed at the end."""
        return await self.stack.enter_async_context(
            CoordinatorClient(
                self.options.coordinators,
                self.key,
                ids=RandomIds(),
                counters=self.counters,
                draw=self.draw,
                settings=ClientSettings(call_deadline_s=self.options.call_deadline_s),
            )
        )


async def join_and_work(
    role: Role,
    config: Config,
    options: OptionsT,
    join: Callable[[Joining[OptionsT]], Awaitable[Joined | None]],
) -> None:
    """Join as ``join`` does, and work until SIGTERM or Ctrl-C; None of ``join`` is a stop that came first.

    Raises:
        InputError: the key, the configuration or this machine does not fit; nothing was leased.
        RunError: the coordinator was lost for too long, or the run has failed.
    """
    stop = watch_for_stop()
    key = read_key(options.key_file, role)
    environment = make_own_environment(config)
    say = Lines(f"{role} {worker_of(key)}")
    async with own_home(options, key) as home, AsyncExitStack() as stack:
        say(f"logs to {stack.enter_context(own_log(home))}")
        joining = Joining(
            config, options, key, environment, home, say, stack, stop, SystemClock(), Counters(), random.Random()
        )
        joined = await join(joining)
        if joined is not None:
            await work_with_news(joined.run(stop), stop, say, joined.news)
    say("stopped")


class Lines:
    """Plain lines on the terminal, under the name of whoever says them."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, text: str) -> None:
        sys.stdout.write(f"{self._name}: {text}\n")
        sys.stdout.flush()


def read_key(path: str, role: Role) -> str:
    """The key in a file.

    Raises:
        InputError: the file cannot be read, or holds no key of this role. The message never holds the key.
    """
    try:
        key = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise InputError(f"--key-file must be a readable file with a key, got {path}: {reason}") from None
    try:
        worker_of(key)
        found = role_of(key)
    except InputError as error:
        raise InputError(f"--key-file {path}: {error}") from None
    if found is not role:
        raise InputError(f"--key-file must hold the key of a {role}, got that of a {found} in {path}")
    return key


def make_own_environment(config: Config) -> Environment:
    """The environment of the configuration.

    Raises:
        ConfigError: it is unknown or its options are wrong.
    """
    services = Services(run_function=run_function_calls, call_deadline_s=config.sandbox.call_deadline_s)
    return make_environment(config.environment.kind, config.environment.options, services)


async def accepted(asking: Awaitable[Value]) -> Value:
    """The answer to the first call, with which the key is tried.

    Raises:
        InputError: the key is refused.
    """
    try:
        return await asking
    except Refused as error:
        raise InputError(f"--key-file must hold a key of this run that has not expired, got: {error}") from None


@contextlib.asynccontextmanager
async def own_home(options: JoinOptions, key: str) -> AsyncIterator[Path]:
    """A folder that only this worker uses. Sandboxes that dead workers of this machine left are ended first.

    Raises:
        InputError: a process with the same key works on this machine already.
        StorageFailed: the folder cannot be made.
    """
    name = f"{role_of(key)}-{worker_of(key)}-{digest_bytes(options.coordinators[0].rstrip('/').encode())[:8]}"
    home = Path(options.home).expanduser().absolute() / name
    try:
        home.mkdir(parents=True, exist_ok=True)
        lock = (home / "lock").open("wb")
    except OSError as error:
        raise StorageFailed(f"--home must be writable, got {home}: {error.strerror}") from None
    with lock:
        try:
            # Whoever sweeps holds the locks of others for a moment. A lock of another process tells nobody of its end.
            async with asyncio.timeout(_SWEPT_WITHIN_S):
                while not _is_taken(lock):  # noqa: ASYNC110
                    await asyncio.sleep(_LOOK_AGAIN_S)
        except TimeoutError:
            raise InputError(
                f"--key-file must be used by one process at a time, but {worker_of(key)} works already in {home}"
            ) from None
        await asyncio.to_thread(_sweep, home)
        yield home


def _sweep(home: Path) -> None:
    """End what dead workers of this machine left, and what our predecessor did: its folder is locked by us."""
    for folder in home.parent.iterdir():
        with contextlib.suppress(FileNotFoundError, NotADirectoryError), (folder / "lock").open("rb") as lock:
            if folder == home or _is_taken(lock):
                end_abandoned_sandboxes(folder / "sandboxes")


def _is_taken(lock: IO[bytes]) -> bool:
    """Whether the lock is ours now; it ends with the file, or with the process."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


@contextlib.contextmanager
def own_log(home: Path) -> Iterator[Path]:
    """Everything that is logged goes into ``log.jsonl`` of the folder: the terminal is for plain lines."""
    path = home / "log.jsonl"
    with storage_errors(str(path)):
        handler = log_to_file(path)
    try:
        yield path
    finally:
        logging.getLogger().removeHandler(handler)
        handler.close()


def open_artifacts(url: str, settings: BlobsConfig) -> BlobStore:
    """The artifacts of a run, where they lie: ``file:///folder`` or ``s3://bucket/prefix``.

    Args:
        settings: how to reach an object store from here; its own ``url`` is not looked at.

    Raises:
        InputError: the URL is of another kind, or there is no such folder on this machine.
    """
    if url.startswith("file:") and not Path(urlsplit(url).path).is_dir():
        # Made here it would be an empty one that nobody else sees.
        raise InputError(f"--artifacts must be a folder that this machine shares with the run, got {url}")
    try:
        return open_blob_store(url, settings)
    except ConfigError as error:
        raise InputError(f"--artifacts: {error}") from None


def watch_for_stop() -> asyncio.Event:
    """Set by the first SIGTERM or Ctrl-C; the second one ends the process at once."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def told() -> None:
        stop.set()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, told)
    return stop


async def unless_stopped(work: Coroutine[Any, Any, Value], stop: asyncio.Event) -> Value | None:
    """What ``work`` gives; None where the stop comes first, and then the work is cancelled."""
    working, stopping = asyncio.create_task(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        await end_all((working, stopping))


async def work_with_news(
    work: Coroutine[Any, Any, None], stop: asyncio.Event, say: Callable[[str], None], news: Callable[[], str]
) -> None:
    """Work to its end; say now and then how it goes, and that it was told to stop.

    *consumes* nothing; *waits for* the work; *unblocked by* its end; *produces* lines.
    """

    async def talk() -> None:
        while True:
            await asyncio.sleep(NEWS_EVERY_S)
            say(news())

    async def tell() -> None:
        await stop.wait()
        say(f"told to stop; {news()}")
        await asyncio.get_running_loop().create_future()

    await supervise(work, talk(), tell())
