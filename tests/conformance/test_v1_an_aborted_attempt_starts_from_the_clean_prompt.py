"""V1: an aborted sample went back to the queue with its old tokens, and held tokens of three versions in the loss.

An attempt that is aborted is thrown away whole. The next one starts from the clean prompt, and every token that is
trained carries the version that sampled it.
"""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import openai
import pytest
from openai import AsyncOpenAI

from steelyard.assembly.samples import trace_samples
from steelyard.coordinator.records import BatchPlan
from steelyard.coordinator.service import Coordinator
from steelyard.errors import Refused
from steelyard.gateway.app import GatewayServer
from steelyard.gateway.capability import KeyRing
from steelyard.gateway.recorder import Recorder
from steelyard.gateway.renderer import Renderer
from steelyard.gateway.service import Gateway
from steelyard.ids import SeededIds
from steelyard.inference.router import Router
from steelyard.metrics import Counters
from steelyard.run.adapters import LiveAttempts
from steelyard.testing.agent import Agent
from steelyard.testing.engine import FakeEngine
from steelyard.testing.run_rig import SCORER, WORKER, RunRig, make_score, make_settings, refusal_of
from steelyard.testing.tokenizer import write_tokenizer
from steelyard.traces.ledger import TokenLedger
from steelyard.traces.store import TraceStore
from steelyard.types import ArtifactReport, AttemptFailure, EndReason, GenerateRequest, Lease, Outcome

QUESTION = "What is the answer?"


class World(RunRig):
    """A coordinator, a gateway over HTTP, its recorder and trace store; only engine, scorer and trainer are fakes."""

    def __init__(self, directory: Path) -> None:
        settings = make_settings(lag=2, groups_per_batch=1, group_size=2, lease_s=60.0)
        super().__init__(settings)
        self.counters = Counters()
        self.renderer = Renderer.load(write_tokenizer(directory / "tokenizer"))
        self.engine = FakeEngine(self.clock, script=self.answer)
        self.router = Router({"rep_fake": self.engine}, self.clock)
        self.ledger = TokenLedger(directory / "ledger")
        self.store = TraceStore(directory / "traces", before_seal=self.ledger.sync)
        self.recorder = Recorder(self.store, self.ledger, self.counters, self.clock)
        self.keys = KeyRing(b"k" * 32)
        self.url = ""

    def answer(self, request: GenerateRequest) -> tuple[int, ...]:
        """What the policy of a version says."""
        said = self.renderer.codec.encode(f"version {request.policy_version} says so")
        return (*said, self.renderer.end_of_turn_id)

    async def open(self) -> "World":
        self.coordinator = await Coordinator.open(
            journal=self.journal, settings=self.settings, clock=self.clock, ids=self.ids, run_id="run", seed=0,
            config_digest="c", open_traces=self.recorder, stream=self.stream, sleep=self.clock.sleep,
        )  # fmt: skip
        attempts = LiveAttempts(self.coordinator, max_context_tokens=2048, attempt_deadline_s=600.0)
        gateway = Gateway(
            self.renderer, self.router, self.recorder, attempts, ids=SeededIds(1), clock=self.clock,
            counters=self.counters,
        )  # fmt: skip
        self.server = GatewayServer(gateway, self.keys, ids=SeededIds(2), clock=self.clock, counters=self.counters)
        self.url = await self.server.start()
        return self

    async def load(self, number: int) -> None:
        await self.router.replicas["rep_fake"].load(f"v{number}", number)
        await super().load(number)

    async def close(self) -> None:
        await self.server.stop()
        await self.coordinator.close()
        await self.store.close()
        self.ledger.close()

    async def talk(self, lease: Lease, num_turns: int) -> None:
        """What a harness does that knows nothing of training: base URL, key, messages."""
        key = self.keys.issue(lease.attempt_id, self.clock.now_s() + 3600)
        async with AsyncOpenAI(base_url=self.url, api_key=key, max_retries=0, timeout=30) as client:
            agent = Agent(client)
            for _ in range(num_turns):
                await agent.say(QUESTION)

    async def hand_in(self, lease: Lease, num_turns: int = 1) -> ArtifactReport:
        await self.talk(lease, num_turns)
        trace = await self.recorder.seal(lease.attempt_id, EndReason.SUBMITTED, (), lease.policy_version)
        report = ArtifactReport(
            attempt_id=lease.attempt_id, attempt_number=lease.attempt_number, trace=trace, artifact_digest="a" * 32
        )
        await self.coordinator.artifact_ready(report)
        return report

    async def step(self, step: int) -> BatchPlan:
        """Score what is there; take the step and publish its version."""
        for job in await self.coordinator.lease_scores(SCORER, 10, 0.0):
            await self.coordinator.score(make_score(job, float(self.random.randrange(2))))
        plan = await self.coordinator.next_batch(step, 1.0)
        for member in plan.members:
            self.stores.traces[member.attempt_id] = await self.store.read(member.attempt_id)
        samples = tuple(f"{s.attempt_id}/{s.segment_index}" for s in self.assemble(plan).samples)
        await self.coordinator.begin_step(
            step=step, parent_version=plan.parent_version, group_ids=plan.group_ids, sample_ids=samples,
            batch_digest=f"b{step}",
        )  # fmt: skip
        await self.publish(step + 1)
        return plan


def in_world(directory: Path, scene: Callable[[World], Awaitable[None]]) -> None:
    async def main() -> None:
        world = World(directory)
        await world.start()
        try:
            await scene(world)
        finally:
            await world.close()

    asyncio.run(main())


async def aborted_twice(world: World) -> list[Lease]:
    """One rollout: aborted at version 0, its lease lost at version 1, done at version 2. Its three leases."""
    *others, first = await world.coordinator.lease(WORKER, 6, 0.0)
    for lease in others:
        await world.hand_in(lease)
    await world.talk(first, 2)
    await world.coordinator.attempt_failed(
        AttemptFailure(attempt_id=first.attempt_id, attempt_number=1, outcome=Outcome.CANCELLED, reason="aborted")
    )
    await world.step(0)
    world.clock.advance(world.settings.max_backoff_s)
    (second,) = await world.coordinator.lease(WORKER, 1, 0.0)
    await world.talk(second, 1)
    world.clock.advance(world.settings.lease_s + 1)
    await world.coordinator.heartbeat(WORKER, (second.attempt_id,))
    await world.step(1)
    world.clock.advance(world.settings.max_backoff_s)
    leases = await world.coordinator.lease(WORKER, 10, 0.0)
    (third,) = [lease for lease in leases if lease.rollout_id == first.rollout_id]
    return [first, second, third]


def test_v1_a_sample_aborted_twice_across_two_publishes_holds_tokens_of_one_version(tmp_path: Path) -> None:
    async def scene(world: World) -> None:
        leases = await aborted_twice(world)
        assert {lease.rollout_id for lease in leases} == {leases[0].rollout_id}
        assert [(lease.attempt_number, lease.policy_version) for lease in leases] == [(1, 0), (2, 1), (3, 2)]
        assert len({lease.attempt_id for lease in leases}) == 3
        await world.hand_in(leases[2], 2)
        trace, _ = await world.store.read(leases[2].attempt_id)
        assert world.renderer.codec.decode(trace.turns[0].prompt_token_ids).count(QUESTION) == 1, "the clean prompt"
        assert [turn.turn_index for turn in trace.turns] == [0, 1]
        (sample,) = trace_samples(trace, 1.0)
        pairs = zip(sample.versions, sample.loss_mask, strict=True)
        assert {version for version, mask in pairs if mask} == {2}
        assert "version 0" not in (text := world.renderer.codec.decode(sample.token_ids))
        assert "version 1" not in text
        plan = await world.step(2)
        assert leases[2].attempt_id in {member.attempt_id for member in plan.members}
        assert not {lease.attempt_id for lease in leases[:2]} & {member.attempt_id for member in plan.members}

    in_world(tmp_path, scene)


def test_v1_the_tokens_of_aborted_attempts_are_booked_as_lost(tmp_path: Path) -> None:
    async def scene(world: World) -> None:
        leases = await aborted_twice(world)
        await world.hand_in(leases[2], 2)
        await world.step(2)
        recorded = world.ledger.by_attempt
        books = await world.coordinator.books(recorded)
        assert books.are_closed, books
        assert sum(books.tokens.lost.values()) == sum(recorded[lease.attempt_id] for lease in leases[:2]) > 0

    in_world(tmp_path, scene)


def test_v1_an_aborted_attempt_can_neither_sample_nor_hand_in_any_more(tmp_path: Path) -> None:
    async def scene(world: World) -> None:
        first, second, _ = await aborted_twice(world)
        for lease in (first, second):
            with pytest.raises(openai.APIStatusError) as caught:
                await world.talk(lease, 1)
            assert caught.value.status_code in (401, 403, 409, 410)
            with pytest.raises(Refused):
                await world.recorder.seal(lease.attempt_id, EndReason.SUBMITTED, (), lease.policy_version)

    in_world(tmp_path, scene)


def test_v1_a_trace_that_was_spliced_from_two_versions_is_refused_and_its_rollout_tried_again(tmp_path: Path) -> None:
    async def scene(world: World) -> None:
        (lease,) = await world.coordinator.lease(WORKER, 1, 0.0)
        await world.talk(lease, 1)
        trace = await world.recorder.seal(lease.attempt_id, EndReason.SUBMITTED, (), lease.policy_version)
        spliced = ArtifactReport(
            attempt_id=lease.attempt_id,
            attempt_number=lease.attempt_number,
            trace=msgspec.structs.replace(trace, newest_version=2, mean_version=1.0),
            artifact_digest="a" * 32,
        )
        assert await refusal_of(world.coordinator.artifact_ready(spliced)) == "foreign"
        world.clock.advance(world.settings.max_backoff_s)
        leases = await world.coordinator.lease(WORKER, 10, 0.0)
        assert (lease.rollout_id, 2) in {(again.rollout_id, again.attempt_number) for again in leases}

    in_world(tmp_path, scene)
