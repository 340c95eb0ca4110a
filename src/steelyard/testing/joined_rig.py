"""A coordinator and a gateway on the loopback for a worker or scorer that runs in the same event loop as its test."""

import asyncio
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec

from steelyard.config import Config, SandboxConfig
from steelyard.coordinator.capability import Role
from steelyard.coordinator.description import RunDescription
from steelyard.coordinator.effects import Effect
from steelyard.coordinator.server import CoordinatorServer
from steelyard.metrics import Counters
from steelyard.run.describing import describe_run
from steelyard.run.directory import RunDirectory
from steelyard.run.joining import make_own_environment
from steelyard.testing.gateway import GatewayWorld
from steelyard.testing.run_rig import RunRig, make_settings

CONFIG = Config(sandbox=SandboxConfig(kind="process", num_warm=0))
_TICK_S = 0.05
_SCENE_DEADLINE_S = 60.0


class JoinedRig:
    """Listens while it is entered. ``description`` may be replaced before that.

    Args:
        folder: an empty one; ``home`` is for the worker's own notes.
    """

    def __init__(self, folder: Path) -> None:
        directory = RunDirectory(folder / "run")
        directory.make_folders()
        self.folder = folder
        self.home = folder / "home"
        self.description: RunDescription = describe_run(CONFIG, make_own_environment(CONFIG), directory)
        self.rig = RunRig(make_settings())
        self.gateway = GatewayWorld(folder / "gateway", bindings={})
        self.coordinator_url = ""
        self.gateway_url = ""
        self._server: CoordinatorServer
        self._time: asyncio.Task[None]

    async def __aenter__(self) -> "JoinedRig":
        await self.rig.start()
        self._time = asyncio.create_task(self._let_time_pass(), name="time")
        self._server = CoordinatorServer(
            self.rig.coordinator,
            self.gateway.workers,
            clock=self.gateway.clock,
            counters=Counters(),
            description=self.description,
        )
        self.coordinator_url = await self._server.start()
        self.gateway_url = await self.gateway.server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._time.cancel()
        await asyncio.gather(self._time, return_exceptions=True)
        await self.gateway.close()
        await self._server.stop()
        await self.rig.coordinator.close()

    async def _let_time_pass(self) -> None:
        """The rig's clock goes on by itself, for polls that find nothing."""
        clock, loop = self.rig.clock, asyncio.get_running_loop()
        before_s = loop.time()
        while True:
            await asyncio.sleep(_TICK_S)
            now_s = loop.time()
            clock.advance(now_s - before_s)
            before_s = now_s

    def describe(self, **changes: Any) -> None:
        """Let the run say otherwise of itself."""
        self.description = msgspec.structs.replace(self.description, **changes)

    def heard(self, kind: type[Effect]) -> asyncio.Event:
        """Set by the next effect of the coordinator of this kind."""
        event = asyncio.Event()

        def listen(effect: Effect) -> None:
            if isinstance(effect, kind):
                event.set()

        self.rig.coordinator.listen(listen)
        return event

    def key_file(self, role: Role, name: str = "one", valid_s: float = 3600.0) -> str:
        """A file with a key of this run."""
        path = self.folder / f"{name}-{role}.key"
        path.write_text(self.gateway.worker_key(name, role, valid_s), encoding="ascii")
        return str(path)


def play_joined(joined: JoinedRig, scene: Callable[[], Awaitable[None]]) -> None:
    """Run a scene beside a rig that listens, in at most a minute; handlers of signals are afterwards as before."""

    async def run() -> None:
        async with joined, asyncio.timeout(_SCENE_DEADLINE_S):
            await scene()

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        asyncio.run(run())
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
