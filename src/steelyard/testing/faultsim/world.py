"""One simulated run: who takes part, what goes wrong, and what must hold in the end."""

import asyncio
import logging
import random
import traceback
from collections.abc import Callable

import msgspec

from steelyard.coordinator.audit import audit
from steelyard.coordinator.journal.base import decode
from steelyard.coordinator.records import CoordinatorSettings
from steelyard.errors import IntegrityError
from steelyard.ids import SeededIds
from steelyard.tasks.sampler import ShuffledStream
from steelyard.testing.faultsim.control import CONTROL, ControlProgram, Parts
from steelyard.testing.faultsim.disk import Blobs, Disk
from steelyard.testing.faultsim.faults import Faults
from steelyard.testing.faultsim.loop import Stuck, VirtualLoop, run
from steelyard.testing.faultsim.network import Network, Packet
from steelyard.testing.faultsim.processes import Process
from steelyard.testing.faultsim.stores import RunStores
from steelyard.testing.faultsim.stranger import StrangerProgram
from steelyard.testing.faultsim.training import Build, TrainerProgram, build_batch
from steelyard.testing.faultsim.witness import Witness
from steelyard.testing.faultsim.workers import Artifacts, ScorerProgram, WorkerProgram
from steelyard.testing.run_rig import make_settings
from steelyard.types import Record, Trace

FAULTS_END_S = 40.0
LIMIT_S = 900.0
_NUM_STEPS = 3


class Mutation(msgspec.Struct, frozen=True, kw_only=True):
    """A change to the logic that must be found out: other parts of the control process, another way to store
    artifacts or to build batches."""

    parts: Parts = Parts()
    artifacts: Callable[[Blobs[str]], Artifacts] = Artifacts
    build: Build = build_batch


class Verdict(Record, frozen=True, kw_only=True):
    """What came of one seed. ``failure`` is None where all invariants hold; ``trace`` is one line an incident.

    ``ended_at_s`` in virtual seconds; ``faults`` counts what went wrong, by kind.
    """

    seed: int
    failure: str | None
    trace: tuple[str, ...]
    num_events: int
    num_callbacks: int
    ended_at_s: float
    faults: dict[str, int]
    counters: dict[str, int]


def simulate(
    seed: int, *, is_faulty: bool = True, is_verbose: bool = False, mutation: Mutation | None = None
) -> Verdict:
    """Run one seed to its end.

    Args:
        is_faulty: whether anything goes wrong at all.
        is_verbose: whether each request of a client is in the trace.
        mutation: what is changed in the logic.
    """
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    loop = VirtualLoop(LIMIT_S)
    world: World | None = None
    failure: str | None = None

    async def main() -> None:
        nonlocal world
        world = World(seed, loop, is_verbose=is_verbose, mutation=mutation or Mutation())
        await world.run(is_faulty=is_faulty)

    try:
        run(main(), loop)
    except Stuck as stuck:
        failure = f"Stuck: {stuck}"
    except Exception as error:  # noqa: BLE001 (every failure of a seed is its verdict)
        failure = "".join(traceback.format_exception_only(error)).strip()
        if world is not None:
            world.trace.extend(line.rstrip() for line in traceback.format_exception(error))
    finally:
        logging.disable(level)
    assert world is not None
    return world.verdict(failure)


class World:
    """All processes of one run, its network and its disks."""

    def __init__(self, seed: int, loop: VirtualLoop, *, is_verbose: bool, mutation: Mutation) -> None:
        self.seed = seed
        self.loop = loop
        self.trace: list[str] = []
        self.witness = Witness()
        self._is_verbose = is_verbose
        self._draw = random.Random(f"faultsim {seed}")
        self.network = Network(loop, self._stream_of("network"))
        self.disk = Disk(loop, self._stream_of("disk"))
        self.objects = Disk(loop, self._stream_of("objects"))
        self.stores = RunStores(self.disk, self.objects)
        self.settings = drawn_settings(self._stream_of("settings"))
        self.tasks = ShuffledStream(50, seed, "task-{:04d}".format)
        self.over: asyncio.Future[None] = loop.create_future()
        self.processes: dict[str, Process] = {}
        self.faults = Faults(self, self._stream_of("faults"))
        self._add_processes(mutation)

    def _stream_of(self, name: str) -> random.Random:
        """Random numbers of one part, which do not move when another part draws more or fewer."""
        return random.Random(f"faultsim {self.seed} {name}")

    def note(self, line: str) -> None:
        """Add a line to the trace."""
        if self.loop.ended_at_s is None:
            self.trace.append(f"{self.loop.time():9.3f} s  {line}")

    def found(self, error: BaseException) -> None:
        """Something happened that must not: the run is over."""
        if not self.over.done():
            self.over.set_exception(error)

    async def run(self, *, is_faulty: bool) -> None:
        """Start everything, let things go wrong for a while, then wait for the end of the run and look at it.

        Raises:
            AssertionError: an invariant does not hold, or a client was told what is not in the journal.
        """
        for process in self.processes.values():
            process.start()
        finished = asyncio.ensure_future(self._trainer.finished.wait())
        if is_faulty:
            await self.faults.happen(FAULTS_END_S, (finished, self.over))
        await asyncio.wait((finished, self.over), return_when=asyncio.FIRST_COMPLETED)
        if self.over.done():
            self.over.result()
        self.note("the run has ended")
        for process in self.processes.values():
            if process.life is not None:
                process.life.is_dead = True
        self.check()

    def check(self) -> None:
        """Hold journal and stores to the audit, and to what clients were told.

        Raises:
            AssertionError: they do not hold; says which and the first counter-example.
        """
        stores = self.stores.audit_stores()
        report = audit(stores)
        broken = [f"{line.name}: {line.counter_example}" for line in report.invariants if line.num_broken]
        events = [decode(record.payload) for record in stores.journal.records()]
        traces: dict[str, Trace] = {}
        for attempt_id in self.stores.sealed.written:
            traces[attempt_id] = stores.traces.read(attempt_id)[0]
        broken += self.witness.broken(events, traces, self.tasks)
        assert not broken, "; ".join(broken)

    def verdict(self, failure: str | None) -> Verdict:
        """What came of it."""
        try:
            num_events = len(list(self.stores.audit_stores().journal.records()))
        except IntegrityError:
            num_events = 0
        control = self._control.coordinator
        return Verdict(
            seed=self.seed,
            failure=failure,
            trace=tuple(self.trace),
            num_events=num_events,
            num_callbacks=self.loop.num_callbacks,
            ended_at_s=round(self.loop.ended_at_s or 0.0, 3),
            faults=dict(self.faults.counts),
            counters=dict(control.counters.read()) if control is not None else {},
        )

    def _add_processes(self, mutation: Mutation) -> None:
        artifacts = mutation.artifacts(self.stores.artifacts)
        self._control = ControlProgram(
            stores=self.stores,
            network=self.network,
            settings=self.settings,
            stream=self.tasks,
            ids=SeededIds(self.seed),
            draw=self._stream_of("gateway"),
            parts=mutation.parts,
            on_request=self._on_request,
            on_finding=self.found,
            look=self.check,
        )
        self._trainer = TrainerProgram(
            self.network,
            self.stores,
            self.witness,
            self._stream_of("trainer"),
            max_steps=_NUM_STEPS,
            diverge_frac=self.faults.diverge_frac,
            build=mutation.build,
        )
        self._stranger = StrangerProgram(self.network, self.witness, self._stream_of("stranger"))
        self._add(CONTROL, self._control)
        for number in range(2):
            worker = WorkerProgram(
                self.network, artifacts, self.witness, self._stream_of(f"worker {number}"), heartbeat_s=2.0
            )
            self._add(f"worker-{number}", worker)
        fail_frac = self.faults.grader_fail_frac
        for number in range(2):
            draw = self._stream_of(f"scorer {number}")
            scorer = ScorerProgram(self.network, artifacts, self.witness, draw, fail_frac=fail_frac)
            self._add(f"scorer-{number}", scorer)
        self._add("trainer", self._trainer)
        self._add("stranger", self._stranger)

    def _add(self, name: str, program: "Program") -> None:
        self.processes[name] = Process(
            name,
            program,
            self.loop,
            self._stream_of(f"process {name}"),
            restart_s=1.0,
            max_skew_s=self.faults.max_skew_s,
            on_finding=self.found,
            note=self.note,
        )

    def _on_request(self, packet: Packet) -> None:
        self._stranger.overhear(packet)
        self.faults.at_request(packet.source, packet.method)
        if self._is_verbose:
            body = msgspec.msgpack.decode(packet.body)
            self.note(f"{packet.source} asks {packet.method} {str(body)[:160]}")


Program = ControlProgram | WorkerProgram | ScorerProgram | TrainerProgram | StrangerProgram


def drawn_settings(draw: random.Random) -> CoordinatorSettings:
    """Small settings of every kind; the budgets are such that some prompts are given up."""
    group_size = draw.choice((1, 2, 3))
    return make_settings(
        lag=draw.choice((0, 1, 2)),
        groups_per_batch=draw.choice((1, 2)),
        group_size=group_size,
        min_scored=draw.randint(1, group_size),
        max_drop_frac=1.0,
        max_steps=_NUM_STEPS,
        lease_s=8.0,
        score_lease_s=6.0,
        snapshot_every_events=draw.choice((10, 40, 1000)),
        max_attempts=draw.choice((2, 3, 6)),
        max_grader_attempts=draw.choice((2, 3, 6)),
        max_tail_wait_s=draw.choice((20.0, 60.0)),
        group_commit_s=draw.choice((0.0, 0.002, 0.05)),
    )
