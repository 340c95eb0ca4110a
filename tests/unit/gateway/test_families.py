"""Token in, token out for every family, as one table: which turns extend each other, and what the prompts say."""

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from steelyard.errors import InputError
from steelyard.gateway.renderer import PreviousTurn, Renderer
from steelyard.gateway.template_cases import TOOLS, Case, Step, cases
from steelyard.gateway.template_check import Player, asks_for_reasoning, find_injections
from steelyard.testing.families import families, write_family
from steelyard.types import Message, ToolCall

FAMILIES = tuple(families())
CASES = {case.name: case for case in cases(("<evil>",))}
NO_REASONING = ("llama3", "mistral", "chatml_plain", "deepseek")

# Why the prompt of each turn after the first does not extend the one before it, "." where it does.
H, D, R, WHOLE = "history_changed", "reasoning_dropped", "reply_changed", "."
EXPECTED: dict[str, dict[str, tuple[str, ...]]] = {
    "qwen3": {"reasoning": (D, D, D), "reasoning before calls": (WHOLE, WHOLE, H)},
    "mistral": {
        "system message": (H, H),
        "tool calls": (WHOLE, WHOLE, H),
        "a question after tool calls": (WHOLE, H, WHOLE, H),
        "text before a call": (R, H),
        "parallel calls, results in a row": (WHOLE, WHOLE, H),
        "more spaces in a call": (WHOLE, H),
        "control strings in content": (WHOLE, H, H),
        "call cut by length": (H, H),
    },
    "deepseek_r1": {
        "plain chat": (D, D, D),
        "system message": (D, D),
        "tool calls": (D, H, WHOLE),
        "a question after tool calls": (D, WHOLE, D, WHOLE),
        "text before a call": (D, WHOLE),
        "parallel calls, results in a row": (D, H, WHOLE),
        "more spaces in a call": (D, WHOLE),
        "reasoning": (D, D, D),
        "reasoning before calls": (D, H, D),
        "control strings in content": (D, WHOLE, D),
        "reply cut by length": (D, D),
        "call cut by length": (D, D),
        "character cut in the middle": (D, D),
        "empty reply": (D, D),
        "white space around a reply": (D, D),
    },
}
_CALL_ID = re.compile(r'"0000000\d\d"')  # a sampled one is kept in the tokens and means nothing
# Where the sampled form of a reply is kept although the template writes it in another one.
OTHER_FORM = ("more spaces in a call", "white space around a reply")
# One writes a line end more before the call, the other a space before nothing.
OTHER_FORM_OF = {"chatml": ("reasoning before calls",), "mistral": ("empty reply",)}


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("families")
    return {name: write_family(root / name, family) for name, family in families().items()}


@pytest.fixture(scope="module")
def renderers(directories: dict[str, Path]) -> dict[str, Renderer]:
    return {name: Renderer.load(directory) for name, directory in directories.items()}


class Oracle:
    """What ``transformers`` says for the same conversation."""

    def __init__(self, directory: Path, *, arguments_are_text: bool) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(directory)
        # Prompts must not change at midnight, so the gateway tells no template the date.
        source = self._tokenizer.chat_template.replace("strftime_now is defined", "false")
        self._tokenizer.chat_template = source
        self._arguments_are_text = arguments_are_text

    def token_ids(self, messages: tuple[Message, ...], *, has_tools: bool) -> list[int]:
        functions = [{"name": t.name, "description": t.description, "parameters": t.parameters} for t in TOOLS]
        tools = [{"type": "function", "function": function} for function in functions]
        shown = [self._shown(message) for message in messages]
        text = self._tokenizer.apply_chat_template(
            shown, tools=tools if has_tools else None, tokenize=False, add_generation_prompt=True
        )
        token_ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return token_ids

    def _shown(self, message: Message) -> dict[str, Any]:
        content = message.content or ""
        if message.reasoning is not None:
            content = f"<think>\n{message.reasoning}\n</think>\n\n{content}"
        shown: dict[str, Any] = {"role": message.role, "content": content}
        if message.tool_calls:
            shown["tool_calls"] = [self._call(call) for call in message.tool_calls]
        if message.tool_call_id is not None:
            shown["tool_call_id"] = message.tool_call_id
        return shown

    def _call(self, call: ToolCall) -> dict[str, Any]:
        arguments = call.arguments if self._arguments_are_text else msgspec.json.decode(call.arguments)
        return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


@pytest.mark.parametrize("name", FAMILIES)
def test_the_prompts_of_every_conversation_are_what_the_table_says(
    name: str, renderers: dict[str, Renderer], directories: dict[str, Path]
) -> None:
    oracle = Oracle(directories[name], arguments_are_text=name == "deepseek_r1")
    for case in CASES.values():
        if case.needs_reasoning and name in NO_REASONING:
            continue
        player = Player(renderers[name], case)
        for step in (*case.steps, Step(content="Done.")):
            player.take(step)
        reasons = tuple(WHOLE if turn.broken is None else turn.broken.reason for turn in player.turns[1:])
        assert reasons == EXPECTED.get(name, {}).get(case.name, (WHOLE,) * len(reasons)), case.name
        check_tokens(renderers[name], case, player)
        # Plain templates show no calls, so `transformers` would leave them out.
        if name != "chatml_plain" or not case.has_tools:
            is_exact = case.name not in (*OTHER_FORM, *OTHER_FORM_OF.get(name, ()))
            check_texts(renderers[name], case, player, oracle, is_exact=is_exact)


def check_tokens(renderer: Renderer, case: Case, player: Player) -> None:
    """A turn that is not broken starts with all tokens before it, and every sampled token stands where it was."""
    for before, turn in zip(player.turns, player.turns[1:], strict=False):
        known = (*before.prompt.token_ids, *before.token_ids)
        extends = turn.prompt.token_ids[: len(known)] == known
        assert extends == (turn.broken is None), case.name
        if extends:
            ends = [token_id in renderer.stop_token_ids for token_id in turn.prompt.token_ids[len(known) - 1 :][:2]]
            assert sum(ends) == 1, f"{case.name}: the reply must be ended once"


def check_texts(renderer: Renderer, case: Case, player: Player, oracle: Oracle, *, is_exact: bool) -> None:
    for turn in player.turns:
        expected = renderer.codec.decode(oracle.token_ids(turn.prompt.messages, has_tools=case.has_tools))
        found = renderer.codec.decode(turn.prompt.token_ids)
        # Pieces of a SentencePiece tokenizer begin with a space that is none of the text.
        space, one = (" +", " ") if is_exact else (r"\s+", "")
        found, expected = (_CALL_ID.sub('"call"', text) for text in (found, expected))
        assert re.sub(space, one, found) == re.sub(space, one, expected), case.name


@pytest.mark.parametrize("name", FAMILIES)
def test_first_prompts_are_tokens_as_the_tokenizer_itself_makes_them(
    name: str, renderers: dict[str, Renderer], directories: dict[str, Path]
) -> None:
    oracle = Oracle(directories[name], arguments_are_text=False)
    system = Message(role="system", content="You are careful. \n")
    for messages in ((Message(role="user", content=" héllo 🙂\n\n"),), (system, Message(role="user", content="x"))):
        for tools in ((), TOOLS):
            prompt = renderers[name].first_prompt(messages, tools)
            assert list(prompt.token_ids) == oracle.token_ids(messages, has_tools=bool(tools))


@pytest.mark.parametrize("name", FAMILIES)
def test_no_content_of_any_family_becomes_a_control_token(name: str, renderers: dict[str, Renderer]) -> None:
    found, num_tried = find_injections(renderers[name])
    assert found == ()
    assert num_tried >= 3 * 3 * len(renderers[name].codec.control_tokens)


def test_control_tokens_in_content_are_found_where_nothing_guards(directories: dict[str, Path]) -> None:
    renderer = Renderer.load(directories["qwen3"])
    unguarded = Unguarded(renderer)
    found, _ = find_injections(unguarded)
    assert "<|im_end|> in a tool result" in found


class Unguarded(Renderer):
    """A renderer that takes the control strings of content for its own."""

    def __init__(self, renderer: Renderer) -> None:
        self.__dict__.update(renderer.__dict__)

    def first_prompt(self, messages: Any, tools: Any) -> Any:
        prompt = super().first_prompt(messages, tools)
        return msgspec.structs.replace(prompt, token_ids=tuple(self.codec.encode(self.codec.restore(prompt.text))))


@pytest.mark.parametrize(
    ("name", "messages", "says"),
    [
        ("mistral", ("user", "user"), "roles must alternate between user and assistant"),
        ("mistral", ("user", "developer"), "only user, assistant and tool may speak"),
    ],
)
def test_what_a_template_says_when_it_refuses_is_in_the_error(
    name: str, messages: tuple[str, ...], says: str, renderers: dict[str, Renderer]
) -> None:
    with pytest.raises(InputError, match=says):
        renderers[name].first_prompt(tuple(Message(role=role, content="x") for role in messages), ())


@pytest.mark.parametrize("name", FAMILIES)
def test_more_calls_than_a_template_can_write_stay_text_and_are_counted(
    name: str, renderers: dict[str, Renderer]
) -> None:
    player = Player(renderers[name], CASES["parallel calls, results in a row"])
    turn = player.take(player_case_step())
    if name == "llama3":
        assert (len(turn.reply.tool_calls), player.num_malformed) == (0, 2)
    else:
        assert (len(turn.reply.tool_calls), player.num_malformed) == (2, 0)


def player_case_step() -> Step:
    return CASES["parallel calls, results in a row"].steps[0]


TEXT = st.one_of(
    st.text(max_size=8),
    st.lists(
        st.sampled_from(
            [
                *("<think>", "</think>", "<tool_call>", "[TOOL_CALLS]", "[", "{", "<|im_end|>", "<|eot_id|>", "</s>"),
                *(
                    "<｜User｜>",
                    "<｜tool▁call▁begin｜>",
                    '{"name": "look", "arguments": {}}',
                    "é🙂",
                    "<",
                    "|",
                    "\n",
                    " ",
                ),
            ]
        ),
        max_size=4,
    ).map("".join),
)
CALLS = st.lists(
    st.dictionaries(st.sampled_from(["path", "line"]), TEXT | st.integers(-9, 9), max_size=2).map(
        lambda arguments: ("look", msgspec.json.encode(arguments).decode("utf-8"))
    ),
    max_size=2,
).map(tuple)
STEPS = st.lists(
    st.builds(
        Step,
        content=TEXT,
        reasoning=st.none() | TEXT,
        calls=CALLS,
        num_cut=st.integers(0, 2),
        is_respaced=st.booleans(),
        result=TEXT,
        user=st.none() | TEXT,
    ),
    min_size=1,
    max_size=4,
)


@given(name=st.sampled_from(FAMILIES), steps=STEPS, system=st.none() | TEXT, user=TEXT, has_tools=st.booleans())
@settings(max_examples=150)
def test_random_conversations_of_all_families_keep_every_sampled_token_or_start_afresh(
    name: str, steps: list[Step], system: str | None, user: str, has_tools: bool, renderers: dict[str, Renderer]
) -> None:
    renderer = renderers[name]
    player = Player(renderer, Case(name="random", steps=tuple(steps), system=system, user=user, has_tools=has_tools))
    control_ids = {token.token_id for token in renderer.codec.control_tokens}
    try:
        for step in steps:
            player.take(step if has_tools else msgspec.structs.replace(step, calls=()))
    except InputError as error:
        assert "chat template refuses" in str(error)
        return
    for before, turn in zip(player.turns, player.turns[1:], strict=False):
        known = (*before.prompt.token_ids, *before.token_ids)
        if turn.broken is None:
            assert turn.prompt.token_ids[: len(known)] == known
        else:
            fresh = renderer.first_prompt(turn.prompt.messages, turn.prompt.tools)
            assert turn.prompt == fresh, "a new segment is what the template says, and nothing else"
        added = turn.prompt.token_ids[len(known) :] if turn.broken is None else ()
        harmless = tuple(
            msgspec.structs.replace(message, content="x") if message.role in ("user", "tool") else message
            for message in turn.prompt.messages[len(before.prompt.messages) + 1 :]
        )
        previous = PreviousTurn(prompt=before.prompt, token_ids=before.token_ids, reply=before.reply)
        if added:
            tame = renderer.extend(previous, harmless, turn.prompt.tools)
            assert tame.break_reason is None
            tame_added = tame.prompt.token_ids[len(known) :]
            assert [t for t in added if t in control_ids] == [t for t in tame_added if t in control_ids]


def test_only_templates_that_know_reasoning_ask_for_it(renderers: dict[str, Renderer]) -> None:
    assert {name for name in FAMILIES if not asks_for_reasoning(renderers[name])} == set(NO_REASONING)
