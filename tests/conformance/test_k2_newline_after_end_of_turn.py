"""K2: the newline after the end-of-turn token was never sampled."""

from pathlib import Path

import pytest

from steelyard.assembly.samples import trace_samples
from steelyard.testing.agent import Agent, extends, run_agent
from steelyard.testing.families import families
from steelyard.testing.gateway import GatewayWorld, Say


async def two_turns(agent: Agent) -> None:
    await agent.say("first")
    await agent.say("second")


def test_k2_the_newline_comes_from_the_renderer_and_is_masked_out_of_the_loss(tmp_path: Path) -> None:
    world = GatewayWorld(tmp_path, ["one", "two"])
    trace = run_agent(world, two_turns)
    one, two = trace.turns
    assert world.gateway.text_of(one.token_ids) == "one<|im_end|>", "sampled: no newline"
    assert extends(two, one)
    added = two.prompt_token_ids[len(one.prompt_token_ids) + len(one.token_ids) :]
    assert world.gateway.text_of(added) == "\n<|im_start|>user\nsecond<|im_end|>\n<|im_start|>assistant\n"
    (sample,) = trace_samples(trace, 1.0)
    trained = [token for token, mask in zip(sample.token_ids, sample.loss_mask, strict=True) if mask]
    assert world.gateway.text_of(tuple(trained)) == "one<|im_end|>two<|im_end|>"


def test_k2_an_end_of_turn_that_was_not_sampled_is_added_and_masked_too(tmp_path: Path) -> None:
    world = GatewayWorld(tmp_path, [Say(text="cut off", ends=False), "two"])
    trace = run_agent(world, two_turns)
    assert "cut off<|im_end|>\n<|im_start|>user" in world.gateway.text_of(trace.turns[1].prompt_token_ids)
    (sample,) = trace_samples(trace, 1.0)
    trained = [token for token, mask in zip(sample.token_ids, sample.loss_mask, strict=True) if mask]
    assert world.gateway.text_of(tuple(trained)) == "cut offtwo<|im_end|>"


# DeepSeek R1 writes every reply in another way later, so no turn extends another (K1).
@pytest.mark.parametrize("family", sorted(set(families()) - {"deepseek_r1"}))
def test_k2_a_reply_of_any_family_is_ended_once_and_only_what_was_sampled_is_trained(
    tmp_path: Path, family: str
) -> None:
    world = GatewayWorld(tmp_path, [Say(text="cut off", ends=False), "whole", "last"], family=family)

    async def play(agent: Agent) -> None:
        await two_turns(agent)
        await agent.say("third")

    trace = run_agent(world, play)
    one, two, three = trace.turns
    assert extends(two, one)
    assert extends(three, two)
    renderer = world.renderer
    (sample,) = trace_samples(trace, 1.0)
    ends = [token for token in sample.token_ids if token in renderer.stop_token_ids]
    plain = [token for token in one.prompt_token_ids if token in renderer.stop_token_ids]
    num_users = 2 * (renderer.codec.token_id("[INST]") is None and renderer.codec.token_id("<｜User｜>") is None)
    assert len(ends) == len(plain) + num_users + 3, "one for each reply, one for each later message of the user"
    trained = [token for token, mask in zip(sample.token_ids, sample.loss_mask, strict=True) if mask]
    assert tuple(trained) == one.token_ids + two.token_ids + three.token_ids
