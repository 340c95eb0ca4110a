"""K4: two neighbouring tool messages were merged into one."""

from pathlib import Path
from typing import Any

from steelyard.testing.agent import Agent, extends, run_agent
from steelyard.testing.gateway import GatewayWorld

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
