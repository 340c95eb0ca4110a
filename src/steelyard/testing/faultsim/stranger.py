"""A client with the wrong ideas: it repeats what others said, late and altered, and renews leases of others."""

import asyncio
import random

import msgspec

from steelyard.errors import DeadlineExceeded, Refused, RemoteFailed
from steelyard.testing.faultsim.control import CONTROL
from steelyard.testing.faultsim.network import Caller, Network, Packet
from steelyard.testing.faultsim.processes import Life
from steelyard.testing.faultsim.witness import Witness
from steelyard.testing.faultsim.workers import GIVE_UP_S, RETRY_S
from steelyard.types import ArtifactReport, Score

_MAX_HEARD = 200
_WANTED = frozenset({"start", "heartbeat", "artifact_ready", "score"})


class StrangerProgram:
    """What runs in the stranger's process. Whatever of it is honoured is a contradiction."""

    def __init__(self, network: Network, witness: Witness, draw: random.Random) -> None:
        self._network = network
        self._witness = witness
        self._draw = draw
        self._heard: list[Packet] = []

    def overhear(self, packet: Packet) -> None:
        """Remember a request of somebody else."""
        if packet.method in _WANTED and packet.source != "stranger" and len(self._heard) < _MAX_HEARD:
            self._heard.append(packet)

    async def __call__(self, life: Life) -> None:
        """One life: for ever something wrong, every few seconds."""
        caller = Caller(life, self._network, CONTROL, retry_s=RETRY_S, give_up_s=GIVE_UP_S)
        while True:
            await asyncio.sleep(self._draw.expovariate(1.0))
            if not self._heard:
                continue
            try:
                await self._meddle(caller, self._draw.choice(self._heard))
            except (Refused, RemoteFailed, DeadlineExceeded):
                continue

    async def _meddle(self, caller: Caller, packet: Packet) -> None:
        match packet.method:
            case "start":
                attempt_id, number, _ = msgspec.msgpack.decode(packet.body)
                await caller.call("start", (attempt_id, number, "stranger"))
                self._honoured(f"the start of {attempt_id} by a stranger")
            case "heartbeat":
                _, attempt_ids = msgspec.msgpack.decode(packet.body)
                lost = await caller.call("heartbeat", ("stranger", attempt_ids), tuple[str, ...])
                if set(lost) != set(attempt_ids):
                    self._honoured(f"a stranger's heartbeat for {attempt_ids}")
            case "artifact_ready":
                await self._alter_report(caller, msgspec.msgpack.decode(packet.body, type=tuple[ArtifactReport])[0])
            case "score":
                await self._alter_score(caller, msgspec.msgpack.decode(packet.body, type=tuple[Score])[0])

    async def _alter_report(self, caller: Caller, report: ArtifactReport) -> None:
        if self._draw.random() < 0.5:
            await caller.call("artifact_ready", (report,))  # a late repetition: accepted again, or refused
            return
        altered = msgspec.structs.replace(report, attempt_number=report.attempt_number + 1)
        await caller.call("artifact_ready", (altered,))
        self._honoured(f"a report of {report.attempt_id} under another attempt's number")

    async def _alter_score(self, caller: Caller, score: Score) -> None:
        if not self._witness.knows(score):
            return
        altered = msgspec.structs.replace(score, value=(score.value or 0.0) + 1.0)
        await caller.call("score", (altered,))
        self._honoured(f"a second score of {score.attempt_id}")

    def _honoured(self, what: str) -> None:
        self._witness.contradictions.append(f"{what} was honoured")
