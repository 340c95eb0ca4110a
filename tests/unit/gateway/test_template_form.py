"""Templates that write each message by itself: found by their syntax, and what new messages add is what they add."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.errors import InputError
from steelyard.gateway.codec import TokenCodec
from steelyard.gateway.renderer import PreviousTurn, Renderer
from steelyard.gateway.template import ChatTemplate
from steelyard.testing.families import families, write_family
from steelyard.testing.tokenizer import chatml_hermes_template
from steelyard.types import Message, ToolCall, ToolSpec

LOOP = "{% for m in messages %}[{{ m.role }}]{{ m.content }}<e>{% endfor %}"
FOOT = "{% if add_generation_prompt %}[assistant]{% endif %}"
ALONE = {
    "a plain loop": LOOP + FOOT,
    "tools and the first message in the head": "{{ tools }}{{ messages[0].role }}{% if not messages %}!{% endif %}"
    + LOOP,
    "the messages after the system message": (
        "{% if messages and messages[0].role == 'system' %}{% set rest = messages[1:] %}{% endif %}" + LOOP
    ),
    "a loop of its own": "{% for m in messages %}{% for c in m.calls %}{{ loop.index }}{{ c }}{% endfor %}{% endfor %}",
    "a name of its own": "{% for m in messages %}{% set x = m.role %}{{ x }}{{ bos_token }}{% endfor %}",
    "a name that a loop of the head sets too": (
        "{% for t in tools %}{% set x = t %}{{ x }}{% endfor %}"
        "{% for m in messages %}{% set x = m %}{{ x }}{% endfor %}"
    ),
    "a refusal": "{% for m in messages %}{{ raise_exception('no') if m.role == 'x' else m.role }}{% endfor %}",
}
NOT_ALONE = {
    "the loop's counter": "{% for m in messages %}{{ loop.index }}{% endfor %}",
    "the loop's end": "{% for m in messages %}{{ m.role }}{% if loop.last %}!{% endif %}{% endfor %}",
    "the loop's counter in an inner loop's range": (
        "{% for m in messages %}{% for c in m.content[:loop.index] %}{{ c }}{% endfor %}{% endfor %}"
    ),
    "the message before": "{% for m in messages %}{{ loop.previtem.role }}{% endfor %}",
    "another message": "{% for m in messages %}{{ messages[-1].role }}{% endfor %}",
    "a namespace": "{% set n = namespace(x=0) %}{% for m in messages %}{% set n.x = n.x + 1 %}{{ n.x }}{% endfor %}",
    "how many there are": "{{ messages | length }}" + LOOP,
    "the last one in the head": "{{ messages[-1].role }}" + LOOP,
    "the messages as a value in the head": "{{ messages and messages }}" + LOOP,
    "the last one in the foot": LOOP + "{{ messages[-1].role }}",
    "a name of the head in the body": "{% set x = messages[0].role %}{% for m in messages %}{{ x }}{% endfor %}",
    "tools in the body": "{% for m in messages %}{{ tools }}{% endfor %}",
    "a name that is set late": "{% set x = 1 %}{% for m in messages %}{{ x }}{% set x = 2 %}{% endfor %}",
    "a macro": "{% macro f(m) %}{{ m.role }}{% endmacro %}{% for m in messages %}{{ f(m) }}{% endfor %}",
    "chance": "{% for m in messages %}{{ m.content | random }}{% endfor %}",
    "a filter of the loop": "{% for m in messages if m.role != 'x' %}{{ m.role }}{% endfor %}",
    "an end before the end": "{% for m in messages %}{% if m.role == 'x' %}{% break %}{% endif %}{% endfor %}",
    "two loops": LOOP + LOOP,
    "no loop": "{{ messages[0].role }}",
    "every second": "{% set rest = messages[::2] %}{% for m in rest %}{{ m.role }}{% endfor %}",
    "a rest that is set twice": (
        "{% set rest = messages %}{% set rest = messages[:1] %}{% for m in rest %}{{ m.role }}{% endfor %}"
    ),
    "what is asked for in the head": "{{ add_generation_prompt }}" + LOOP + FOOT,
    "what is asked for in the body": "{% for m in messages %}{{ add_generation_prompt }}{% endfor %}",
}


@pytest.mark.parametrize("name", ALONE)
def test_a_template_is_seen_to_write_each_message_alone(name: str) -> None:
    assert ChatTemplate(ALONE[name], {"bos_token": "<s>"}).writes_each_alone


@pytest.mark.parametrize("name", NOT_ALONE)
def test_what_might_look_elsewhere_is_not_taken_for_alone(name: str) -> None:
    assert not ChatTemplate(NOT_ALONE[name], {"bos_token": "<s>"}).writes_each_alone


def test_our_own_template_writes_each_message_alone() -> None:
    assert ChatTemplate(chatml_hermes_template()).writes_each_alone


WORDS = st.text("ab <|im_end>{}\n/tool_call", max_size=12)
CALLS = st.lists(
    st.builds(ToolCall, id=st.sampled_from(["c1", "c2"]), name=st.just("look"), arguments=st.just('{"a": 1}')),
    max_size=2,
).map(tuple)
REPLIES = st.builds(Message, role=st.just("assistant"), content=WORDS, tool_calls=CALLS)
OTHERS = st.builds(Message, role=st.sampled_from(["user", "tool"]), content=WORDS, tool_call_id=st.just("c1"))
TOOLS = (ToolSpec(name="look", description="Looks.", parameters={"properties": {"a": {"type": "integer"}}}),)


@pytest.fixture(scope="module")
def renderers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Renderer]:
    """One for each family, and one for the template that ships with the gateway."""
    folder = tmp_path_factory.mktemp("families")
    found = {name: Renderer.load(write_family(folder / name, families()[name])) for name in families()}
    codec = TokenCodec.load(folder / "chatml")
    return found | {"ours": Renderer(codec, ChatTemplate(chatml_hermes_template()))}


@settings(max_examples=60, deadline=None)
@given(
    has_system=st.booleans(),
    before=st.lists(OTHERS | REPLIES, min_size=1, max_size=4),
    reply=REPLIES,
    added=st.lists(OTHERS | REPLIES, max_size=3).map(tuple),
    tools=st.sampled_from([(), TOOLS]),
)
def test_an_extended_prompt_is_the_whole_rendering(
    renderers: dict[str, Renderer],
    has_system: bool,
    before: list[Message],
    reply: Message,
    added: tuple[Message, ...],
    tools: tuple[ToolSpec, ...],
) -> None:
    messages = (*([Message(role="system", content="S")] if has_system else []), *before)
    for name, renderer in renderers.items():
        try:
            prompt = renderer.first_prompt(messages, tools)
            whole = renderer.first_prompt((*messages, reply, *added), tools)
        except InputError:
            continue  # a family that refuses this order of roles
        previous = PreviousTurn(prompt=prompt, token_ids=(1,), reply=reply)
        assert renderer.extend(previous, added, tools).prompt.text == whole.text, name
