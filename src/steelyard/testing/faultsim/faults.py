"""What goes wrong, and when: drawn from the seed, each kind in some seeds and not in others.

That not every kind happens in every seed finds more than all of them always: one fault can hide another (Groce et
al., "Swarm Testing", 2012).
"""

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from steelyard.testing.faultsim.control import CONTROL
from steelyard.testing.faultsim.network import FAIR, Weather
from steelyard.testing.faultsim.processes import outside

if TYPE_CHECKING:
    from steelyard.testing.faultsim.world import World

KINDS = ("kill", "stop", "power", "partition", "weather", "disk", "objects", "clock", "grader", "diverge", "moment")
_MEAN_PAUSE_S = 2.0
_MOMENT_FRAC, _SEAL_FRAC = 0.01, 0.2
_COMMIT_S = 0.02


class Faults:
    """The faults of one seed. ``counts`` says how many happened, by kind.

    ``max_skew_s`` is how wrong clocks are, ``diverge_frac`` the fraction of trainer lives with other weights,
    ``grader_fail_frac`` the fraction of gradings without a verdict.
    """

    def __init__(self, world: "World", draw: random.Random) -> None:
        self.counts: Counter[str] = Counter()
        self.kinds = [kind for kind in KINDS if draw.random() < 0.4]
        self.max_skew_s = draw.choice((1.0, 20.0, 3600.0)) if "clock" in self.kinds else 0.0
        self.diverge_frac = 0.5 if "diverge" in self.kinds else 0.0
        self.grader_fail_frac = 0.2 if "grader" in self.kinds else 0.0
        self._world = world
        self._draw = draw
        self._draw_moment = random.Random(draw.random())
        self._is_on = False
        self._acts: dict[str, Callable[[], None]] = {
            "kill": self._kill,
            "stop": self._stop,
            "power": self._power,
            "partition": self._partition,
            "weather": self._weather,
            "disk": lambda: self._spoil("disk"),
            "objects": lambda: self._spoil("objects"),
            "clock": self._clock,
        }

    def at_request(self, source: str, method: str) -> None:
        """A request of ``source`` is about to be carried out: a moment at which something may go wrong.

        A worker that sleeps between the sealing of its trace and its report goes on after its lease; a coordinator
        that dies a little later dies while it commits.
        """
        draw = self._draw_moment
        frac = _SEAL_FRAC if method == "seal" else _MOMENT_FRAC
        if not self._is_on or "moment" not in self.kinds or draw.random() >= frac:
            return
        self.counts["moment"] += 1
        if draw.random() < 0.5:
            self._world.processes[source].stop_for(draw.uniform(5.0, 20.0))
            return
        victim = self._world.processes[draw.choice((source, CONTROL))]
        why = f"killed during {method} of {source}"
        self._world.loop.call_later(draw.uniform(0.0, _COMMIT_S), victim.kill, why, context=outside())

    async def happen(self, end_s: float, ends: Sequence["asyncio.Future[Any]"]) -> None:
        """Do harm until ``end_s`` or until one of ``ends`` is done; then everything heals."""
        world, kinds = self._world, [kind for kind in self.kinds if kind in self._acts]
        world.note(f"faults of this seed: {', '.join(self.kinds) or 'none'}")
        self._is_on = True
        while world.loop.time() < end_s:
            pause_s = self._draw.expovariate(1.0 / _MEAN_PAUSE_S)
            done, _ = await asyncio.wait(ends, timeout=pause_s, return_when=asyncio.FIRST_COMPLETED)
            if done:
                break
            if not kinds:
                continue
            kind = self._draw.choice(kinds)
            self.counts[kind] += 1
            self._acts[kind]()
        self._heal()

    def _heal(self) -> None:
        world = self._world
        self._is_on = False
        world.note("all faults end")
        self._calm()
        world.network.cut.clear()
        for disk in (world.disk, world.objects):
            disk.sync_fail_frac, disk.mean_sync_s = 0.0, 0.002

    def _kill(self) -> None:
        self._any_process().kill("killed")

    def _stop(self) -> None:
        self._any_process().stop_for(self._draw.choice((0.5, 5.0, 15.0)) * self._draw.uniform(0.5, 1.5))

    def _power(self) -> None:
        """The machine of the coordinator, or the object store, loses power."""
        world = self._world
        if self._draw.random() < 0.5:
            world.processes[CONTROL].kill("its machine loses power")
            world.disk.cut_power()
        else:
            world.note("the object store loses power")
            world.objects.cut_power()

    def _partition(self) -> None:
        world = self._world
        name = self._draw.choice([name for name in world.processes if name != CONTROL])
        pair, seconds = frozenset((name, CONTROL)), self._draw.uniform(1.0, 15.0)
        world.note(f"{name} and {CONTROL} are cut off for {seconds:.1f} s")
        world.network.cut.add(pair)
        world.loop.call_later(seconds, world.network.cut.discard, pair)

    def _weather(self) -> None:
        draw, world = self._draw, self._world
        world.network.weather = Weather(
            loss_frac=draw.choice((0.0, 0.1, 0.5)),
            double_frac=draw.choice((0.0, 0.2)),
            mean_delay_s=draw.choice((0.002, 0.1, 0.5)),
            slow_frac=draw.choice((0.0, 0.1)),
            slow_s=draw.choice((3.0, 10.0)),
        )
        world.note(f"the network is {world.network.weather}")
        world.loop.call_later(draw.uniform(2.0, 15.0), self._calm)

    def _calm(self) -> None:
        self._world.network.weather = FAIR

    def _spoil(self, which: str) -> None:
        world, draw = self._world, self._draw
        disk = world.disk if which == "disk" else world.objects
        disk.sync_fail_frac, disk.mean_sync_s = draw.choice((0.0, 0.02, 0.2)), draw.choice((0.002, 0.2, 1.0))
        world.note(f"{which}: {disk.sync_fail_frac:.0%} of syncs fail, they take {disk.mean_sync_s} s")

    def _clock(self) -> None:
        self._any_process().jump_clock(self._draw.choice((0.5, 5.0, 30.0)))

    def _any_process(self) -> Any:
        return self._draw.choice(list(self._world.processes.values()))
