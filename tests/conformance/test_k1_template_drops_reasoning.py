"""K1: the template dropped old reasoning, so turn n+1 did not extend turn n."""

from pathlib import Path

import pytest

from steelyard.testing.agent import Agent, extends, run_agent
from steelyard.testing.gateway import GatewayWorld

STRIPS_EARLIER_THINKING = """{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content.split('</think>')[-1] if m.role == 'assistant' and not loop.last else m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
KEEPS_THINKING_OF_THE_LAST_ANSWER = """{%- set ns = namespace(last=0) %}
{%- for m in messages %}{% if m.role == 'assistant' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content.split('</think>')[-1] if m.role == 'assistant' and loop.index0 < ns.last else m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
THOUGHTS = [f"<think>step {i}</think>answer {i}" for i in range(3)]


async def three_turns(agent: Agent) -> None:
    for number in range(3):
        await agent.say(f"question {number}")


def test_k1_earlier_reasoning_dropped_by_the_template_starts_a_new_segment(tmp_path: Path) -> None:
    world = GatewayWorld(tmp_path, THOUGHTS, template=STRIPS_EARLIER_THINKING)
    trace = run_agent(world, three_turns)
    assert [turn.segment_index for turn in trace.turns] == [0, 1, 2]
    counts = world.counters.read()
    assert (counts["gateway.segments.first"], counts["gateway.segments.reasoning_dropped"]) == (1, 2)
    for turn in trace.turns[1:]:
        assert "step" not in world.gateway.text_of(turn.prompt_token_ids), "the prompt is what the template says"


def test_k1_reasoning_that_goes_one_turn_later_is_noticed_then(tmp_path: Path) -> None:
    world = GatewayWorld(tmp_path, THOUGHTS, template=KEEPS_THINKING_OF_THE_LAST_ANSWER)
    trace = run_agent(world, three_turns)
    assert [turn.segment_index for turn in trace.turns] == [0, 0, 1]
    assert extends(trace.turns[1], trace.turns[0])
    assert world.counters.read()["gateway.segments.history_changed"] == 1
    last = world.gateway.text_of(trace.turns[2].prompt_token_ids)
    assert ("step 0" in last, "step 1" in last) == (False, True)


def test_k1_a_template_that_keeps_reasoning_makes_one_segment(tmp_path: Path) -> None:
    world = GatewayWorld(tmp_path, THOUGHTS)
    trace = run_agent(world, three_turns)
    assert [turn.segment_index for turn in trace.turns] == [0, 0, 0]
    assert extends(trace.turns[1], trace.turns[0])
    assert extends(trace.turns[2], trace.turns[1])


@pytest.mark.parametrize(
    ("family", "segments", "reasons"),
    [
        ("chatml", [0, 0, 0], {}),
        ("qwen3", [0, 1, 2], {"reasoning_dropped": 2}),
        ("qwen3_kept", [0, 0, 0], {}),
        ("deepseek_r1", [0, 1, 2], {"reasoning_dropped": 2}),
    ],
)
def test_k1_reasoning_is_kept_or_dropped_as_the_template_of_the_family_says(
    tmp_path: Path, family: str, segments: list[int], reasons: dict[str, int]
) -> None:
    opening = "" if family == "deepseek_r1" else "<think>\n"  # there the prompt has it
    world = GatewayWorld(tmp_path, [f"{opening}step {i}\n</think>\n\nanswer {i}" for i in range(3)], family=family)

    async def play(agent: Agent) -> None:
        for number in range(3):
            message = await agent.say(f"question {number}")
            assert (message.content, message.reasoning_content) == (f"answer {number}", f"step {number}")

    trace = run_agent(world, play)
    assert [turn.segment_index for turn in trace.turns] == segments
    counts = world.counters.read()
    found = {name.removeprefix("gateway.segments."): n for name, n in counts.items() if "gateway.segments." in name}
    assert found == {"first": 1, **reasons}
    for turn in trace.turns[1:]:
        assert ("step" in world.gateway.text_of(turn.prompt_token_ids)) == (not reasons)


def test_k1_an_agent_that_does_not_send_reasoning_back_goes_on_from_the_sampled_tokens(tmp_path: Path) -> None:
    world = GatewayWorld(tmp_path, ["<think>\nso\n</think>\n\nyes", "no"], family="qwen3_kept")

    async def play(agent: Agent) -> None:
        message = await agent.say("question")
        agent.messages[-1] = {"role": "assistant", "content": message.content}
        await agent.say("on")

    one, two = run_agent(world, play).turns
    assert extends(two, one)
