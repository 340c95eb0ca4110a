"""K2: the newline after the end-of-turn token was never sampled."""

from pathlib import Path

from steelyard.assembly.samples import trace_samples
from steelyard.testing.agent import Agent, extends, run_agent
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
