"""K3: parsed tool calls were rendered back in another form than was sampled."""

from pathlib import Path
from typing import Any

import pytest

from steelyard.gateway.tool_calls.choice import PARSERS
from steelyard.testing.agent import Agent, extends, run_agent
from steelyard.testing.families import families
from steelyard.testing.gateway import GatewayWorld
from steelyard.types import ToolCall

TOOLS: Any = [{"type": "function", "function": {"name": "edit", "parameters": {"type": "object", "properties": {}}}}]
ODD_CALLS = [
    '<tool_call>{"name":  "edit" , "arguments": { "line":3,"text" : "a"}}</tool_call>',
    '<tool_call>\n{"arguments": {"b": 1, "a": 2.50}, "name": "edit"}\n</tool_call>',
    ' I see.\n\n<tool_call>{"name": "edit", "arguments": {"text": "\\u00e9\\/"}}</tool_call>\n',
    '<tool_call>{"name": "edit", "arguments": {}}</tool_call> <tool_call>{"name": "edit", "arguments": {}}</tool_call>',
]


@pytest.mark.parametrize("call", ODD_CALLS)
def test_k3_a_call_in_an_unusual_form_is_kept_as_sampled(tmp_path: Path, call: str) -> None:
    world = GatewayWorld(tmp_path, [call, "done"])

    async def play(agent: Agent) -> None:
        message = await agent.say("go")
        for parsed in message.tool_calls:
            assert parsed.function.arguments in call, "arguments come exactly as sampled"
        await agent.answer(message, *["ok"] * len(message.tool_calls))

    one, two = run_agent(world, play, TOOLS).turns
    assert extends(two, one)
    assert f"assistant\n{call}<|im_end|>\n<|im_start|>tool\nok" in world.gateway.text_of(two.prompt_token_ids)
    assert (one.segment_index, two.segment_index) == (0, 0)


def test_k3_tokens_are_kept_where_their_text_would_be_encoded_in_another_way(tmp_path: Path) -> None:
    world = GatewayWorld(tmp_path, [])
    unusual = tuple(world.renderer.codec.encode(letter)[0] for letter in "return")
    usual = world.renderer.codec.encode("return")
    assert unusual != tuple(usual), "the case needs a text with two encodings"
    world = GatewayWorld(tmp_path, ["x", "done"])
    world.generator.say_tokens(0, (*unusual, world.renderer.end_of_turn_id))

    async def play(agent: Agent) -> None:
        assert (await agent.say("go")).content == "return"
        await agent.say("on")

    one, two = run_agent(world, play).turns
    assert one.token_ids[:-1] == unusual
    assert extends(two, one)


@pytest.mark.parametrize("family", sorted(families()))
def test_k3_a_call_of_any_family_with_more_spaces_is_kept_as_sampled(tmp_path: Path, family: str) -> None:
    plain = ToolCall(id="abcdefghi", name="edit", arguments='{"line": 3, "text": "a"}')
    own = {"llama3": "llama3", "mistral": "mistral", "deepseek": "deepseek", "deepseek_r1": "deepseek"}
    call = PARSERS[own.get(family, "hermes")].write([plain]).replace('": ', '" :   ')
    thought = "hm\n</think>\n\n" if family == "deepseek_r1" else ""
    world = GatewayWorld(tmp_path, [thought + call, "done"], family=family)

    async def play(agent: Agent) -> None:
        message = await agent.say("go")
        (parsed,) = message.tool_calls
        assert parsed.function.arguments == plain.arguments.replace('": ', '" :   ')
        await agent.answer(message, "ok")

    one, two = run_agent(world, play, TOOLS).turns
    assert "gateway.malformed_calls" not in world.counters.read()
    if family == "deepseek_r1":
        assert world.counters.read()["gateway.segments.reasoning_dropped"] == 1
    else:
        assert extends(two, one)
