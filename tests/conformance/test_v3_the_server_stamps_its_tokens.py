"""V3: a trajectory was stamped with a counter of the feed, or with its newest version, and looked younger than it was.

The server that produced a token stamps it. A trajectory is as old as its oldest token; its mean version is weighted by
tokens.
"""

import asyncio
from pathlib import Path

import msgspec
import openai
import pytest

from steelyard.coordinator.records import BatchPlan
from steelyard.testing.agent import Agent, run_agent
from steelyard.testing.gateway import ATTEMPT, GatewayWorld, Say, binding
from steelyard.testing.run_rig import RunRig, make_settings
from steelyard.testing.training_data import make_turn
from steelyard.traces.store import TraceStore
from steelyard.types import EndReason, Lease, SealedTrace, Trace, VersionSpan

BOUND = 3
LAST_STEP = 7


async def sealed_over_4_and_6(directory: Path, lease: Lease) -> tuple[Trace, SealedTrace]:
    """An attempt whose server changed weights twice: 6 tokens of version 4, then 2 of version 6."""
    store = TraceStore(directory)
    first = make_turn([1, 2], [3, 4, 5, 6], attempt_id=lease.attempt_id, spans=((0, 4),))
    prompt = [*first.prompt_token_ids, *first.token_ids, 7]
    spans = ((0, 4), (2, 6))
    second = make_turn(prompt, [8, 9, 10, 11], attempt_id=lease.attempt_id, turn_index=1, spans=spans)
    for turn in (first, second):
        store.append(turn)
    sealed = await store.seal(lease.attempt_id, EndReason.SUBMITTED, (), lease.policy_version)
    trace, _ = await store.read(lease.attempt_id)
    await store.close()
    return trace, sealed


async def consumed_at_7(directory: Path) -> tuple[BatchPlan, Lease]:
    """Version 4 begins it, version 6 ends it, step 7 consumes it."""
    settings = make_settings(
        lag=BOUND, groups_per_batch=1, group_size=2, max_retained_versions=20, follows_updates=True
    )
    rig = await RunRig(settings).start()
    slow: Lease | None = None
    for step in range(LAST_STEP):
        if step == 4:
            (slow,) = await rig.coordinator.lease("wrk_slow", 1, 0.0)
            assert slow.policy_version == 4
        await rig.rollouts()
        if step == 6:
            assert slow is not None
            report = rig.seal(slow)
            trace, sealed = await sealed_over_4_and_6(directory, slow)
            rig.stores.traces[slow.attempt_id] = (trace, sealed.digest)
            await rig.coordinator.artifact_ready(msgspec.structs.replace(report, trace=sealed))
            await rig.score_all()
        await rig.begin(step)
        await rig.publish(step + 1)
    assert slow is not None
    plan = await rig.begin(LAST_STEP)
    await rig.coordinator.close()
    return plan, slow


def test_v3_a_trajectory_over_versions_4_and_6_consumed_at_7_has_lag_3(tmp_path: Path) -> None:
    plan, slow = asyncio.run(consumed_at_7(tmp_path))
    (member,) = [member for member in plan.members if member.attempt_id == slow.attempt_id]
    assert (plan.step, plan.max_lag) == (LAST_STEP, 3)
    assert (member.trace.oldest_version, member.trace.newest_version) == (4, 6)
    assert member.trace.mean_version == (6 * 4 + 2 * 6) / 8, "weighted by tokens, not by turns"


@pytest.mark.parametrize("stamp", [(VersionSpan(start=0, version=4),), (VersionSpan(start=0, version=7),)])
def test_v3_tokens_stamped_with_another_version_than_asked_for_are_refused_and_never_relabelled(
    tmp_path: Path, stamp: tuple[VersionSpan, ...]
) -> None:
    bindings = {ATTEMPT: binding(policy_version=6)}
    world = GatewayWorld(tmp_path, [Say(text="Hello", changes={"version_spans": stamp})], bindings=bindings)

    async def play(agent: Agent) -> None:
        with pytest.raises(openai.APIError, match=f"must come from version 6, but come from .{stamp[0].version}"):
            await agent.say("hi")

    assert run_agent(world, play).turns == ()
    assert world.ledger.total == 0


def test_v3_the_stamp_of_the_server_is_what_is_recorded(tmp_path: Path) -> None:
    world = GatewayWorld(tmp_path, ["one", "two"], bindings={ATTEMPT: binding(policy_version=6)})

    async def play(agent: Agent) -> None:
        await agent.say("first")
        await agent.say("second")

    trace = run_agent(world, play)
    assert [turn.version_spans for turn in trace.turns] == [(VersionSpan(start=0, version=6),)] * 2
    assert {turn.load_id for turn in trace.turns} == {"load_script"}
