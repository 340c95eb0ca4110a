"""K4: two neighbouring tool messages were merged into one."""

from pathlib import Path
from typing import Any

import pytest

from steelyard.testing.agent import Agent, extends, run_agent
from steelyard.testing.gateway import GatewayWorld
from steelyard.types import ToolCall

TOOLS: Any = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
TWO_CALLS = '<tool_call>{"name": "look", "arguments": {}}</tool_call>\n' * 2
MERGING = """{%- for m in messages %}
{%- set opens = m.role != 'tool' or messages[loop.index0 - 1].role != 'tool' %}
{%- set closes = m.role != 'tool' or loop.last or messages[loop.index0 + 1].role != 'tool' %}
{%- if opens %}{{ '<|im_start|>' + ('user' if m.role == 'tool' else m.role) }}{% endif %}
{{- '\\n<result>' + m.content + '</result>' if m.role == 'tool' else '\\n' + m.content }}
{%- if closes %}{{ '<|im_end|>\\n' }}{% endif %}
{%- endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


async def two_results(agent: Agent) -> None:
    message = await agent.say("go")
    assert len(message.tool_calls) == 2
    await agent.answer(message, "first result", "second result")


def test_k4_two_results_in_a_row_are_two_messages_where_the_template_says_so(tmp_path: Path) -> None:
    world = GatewayWorld(tmp_path, [TWO_CALLS, "done"])
    one, two = run_agent(world, two_results, TOOLS).turns
    assert extends(two, one)
    assert world.gateway.text_of(two.prompt_token_ids).endswith(
        "<|im_start|>tool\nfirst result<|im_end|>\n<|im_start|>tool\nsecond result<|im_end|>\n<|im_start|>assistant\n"
    )


def test_k4_two_results_in_a_row_are_one_turn_where_the_template_says_so(tmp_path: Path) -> None:
    world = GatewayWorld(tmp_path, [TWO_CALLS, "done"], template=MERGING)
    one, two = run_agent(world, two_results, TOOLS).turns
    assert extends(two, one)
    assert (one.segment_index, two.segment_index) == (0, 0)
    assert world.gateway.text_of(two.prompt_token_ids).endswith(
        "<|im_start|>user\n<result>first result</result>\n<result>second result</result><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_k4_a_second_result_that_comes_a_turn_later_cannot_be_merged_unnoticed(tmp_path: Path) -> None:
    world = GatewayWorld(tmp_path, [TWO_CALLS, "", "done"], template=MERGING)

    async def play(agent: Agent) -> None:
        message = await agent.say("go")
        await agent.answer(message, "first result", "second result")
        del agent.messages[-1]
        agent.messages.append({"role": "tool", "tool_call_id": message.tool_calls[1].id, "content": "third result"})
        await agent.ask()

    _, two, three = run_agent(world, play, TOOLS).turns
    assert not extends(three, two)
    assert two.segment_index != three.segment_index


def call_text(tmp_path: Path, family: str, num_calls: int) -> str:
    """So many calls as the models of the family write them."""
    parser = GatewayWorld(tmp_path / "draft", family=family).renderer.reader.parser
    assert parser is not None
    return parser.write([ToolCall(id=f"abcdefgh{i}", name="look", arguments="{}") for i in range(num_calls)])


@pytest.mark.parametrize(
    ("family", "between"),
    [
        ("chatml", "<|im_end|>\n<|im_start|>tool\n"),
        ("chatml_plain", "<|im_end|>\n<|im_start|>tool\n"),
        ("qwen3", "\n</tool_response>\n<tool_response>\n"),
        ("qwen3_kept", "\n</tool_response>\n<tool_response>\n"),
        ("deepseek", "<｜tool▁output▁end｜><｜tool▁output▁begin｜>"),
        ("deepseek_r1", "<｜tool▁output▁end｜>\n<｜tool▁output▁begin｜>"),
    ],
)
def test_k4_two_results_in_a_row_are_written_as_the_family_does_it(tmp_path: Path, family: str, between: str) -> None:
    thought = "hm\n</think>\n\n" if family == "deepseek_r1" else ""
    world = GatewayWorld(tmp_path, [thought + call_text(tmp_path, family, 2), "done"], family=family)
    one, two = run_agent(world, two_results, TOOLS).turns
    assert f"first result{between}second result" in world.gateway.text_of(two.prompt_token_ids)
    assert extends(two, one) == (family != "deepseek_r1")


def test_k4_results_of_mistral_carry_the_ids_of_their_calls(tmp_path: Path) -> None:
    world = GatewayWorld(tmp_path, [call_text(tmp_path, "mistral", 2), "done"], family="mistral")
    ids: list[str] = []

    async def play(agent: Agent) -> None:
        message = await agent.say("go")
        ids.extend(call.id for call in message.tool_calls)
        await agent.answer(message, "first result", "second result")

    one, two = run_agent(world, play, TOOLS).turns
    assert extends(two, one)
    text = world.gateway.text_of(two.prompt_token_ids)
    assert [len(call_id) for call_id in ids] == [9, 9]
    for content, call_id in zip(("first result", "second result"), ids, strict=True):
        assert f'{{"content": "{content}", "call_id": "{call_id}"}}[/TOOL_RESULTS]' in text


def test_k4_two_calls_where_the_template_writes_one_a_message_stay_text(tmp_path: Path) -> None:
    world = GatewayWorld(tmp_path, [call_text(tmp_path, "llama3", 2), "done"], family="llama3")

    async def play(agent: Agent) -> None:
        message = await agent.say("go")
        assert message.tool_calls is None
        assert message.content == call_text(tmp_path / "again", "llama3", 2)
        await agent.say("one at a time")

    one, two = run_agent(world, play, TOOLS).turns
    assert extends(two, one)
    assert world.counters.read()["gateway.malformed_calls"] == 2
