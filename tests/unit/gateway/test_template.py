import datetime
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from steelyard.errors import InputError
from steelyard.gateway.template import ChatTemplate, FixedDict
from steelyard.testing.tokenizer import write_tokenizer

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "replace_line",
            "description": "Replace a line.",
            "parameters": {"type": "object", "properties": {"line": {"type": "integer"}, "text": {"type": "string"}}},
        },
    },
    {"type": "function", "function": {"name": "submit", "description": "", "parameters": {}}},
]
CALL = {"id": "c", "type": "function", "function": {"name": "submit", "arguments": {"α": ["<b>", 1]}}}
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Repair it."},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]},
    {"role": "tool", "content": "ok"},
]


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_a_template_renders_as_transformers_renders_it(
    tmp_path: Path, tools: list[dict[str, Any]] | None, add_generation_prompt: bool
) -> None:
    directory = write_tokenizer(tmp_path)
    reference = AutoTokenizer.from_pretrained(directory)
    for count in range(1, len(MESSAGES) + 1):
        expected = reference.apply_chat_template(
            MESSAGES[:count], tools=tools, tokenize=False, add_generation_prompt=add_generation_prompt
        )
        template = ChatTemplate.load(directory)
        assert template.render(MESSAGES[:count], tools, add_generation_prompt=add_generation_prompt) == expected


def test_the_shipped_template_is_short_and_in_the_hermes_form(tmp_path: Path) -> None:
    text = ChatTemplate.load(write_tokenizer(tmp_path)).render(MESSAGES, TOOLS, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nRepair it.\n"
        'Tools, called as <tool_call>{"name": ..., "arguments": {...}}</tool_call>:\n'
        "replace_line(line: integer, text: string) Replace a line.\n"
        "submit()<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n"
        "<|im_start|>assistant\n"
        '<tool_call>{"name": "submit", "arguments": {"α": ["<b>", 1]}}</tool_call>\n'
        '<tool_call>{"name": "submit", "arguments": {"α": ["<b>", 1]}}</tool_call><|im_end|>\n'
        "<|im_start|>tool\nok<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_a_template_may_stand_in_the_tokenizer_config(tmp_path: Path) -> None:
    config = {"chat_template": "{{ bos_token }}{{ messages[0].content }}", "bos_token": {"content": "<s>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert ChatTemplate.load(tmp_path).render(MESSAGES, None, add_generation_prompt=False) == "<s>Repair it."
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert ChatTemplate.load(tmp_path).render(MESSAGES, None, add_generation_prompt=False) == "tools"


def test_today_is_told_only_on_purpose() -> None:
    source = "{{ strftime_now('%d %b %Y') if strftime_now is defined else 'some day' }}"
    assert ChatTemplate(source).render([], None, add_generation_prompt=False) == "some day"
    dated = ChatTemplate(source, today=datetime.date(2026, 3, 1))
    assert dated.render([], None, add_generation_prompt=False) == "01 Mar 2026"


def test_a_generation_block_shows_its_body() -> None:
    source = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% break %}{% endfor %}"
    assert ChatTemplate(source).render(MESSAGES, None, add_generation_prompt=False) == "Repair it."


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].content + 1 }}",
        "{{ messages.append(1) }}",
        "{{ messages.__class__.__mro__ }}",
        "{{ 1 / 0 }}",
        "{{ messages[9].content.x }}",
    ],
)
def test_what_a_template_refuses_or_may_not_do_is_bad_input(source: str) -> None:
    with pytest.raises(InputError, match="chat template refuses"):
        ChatTemplate(source).render(MESSAGES, None, add_generation_prompt=False)


def test_dictionary_methods_and_missing_entries_work_in_templates() -> None:
    source = "{% set m = messages[0] %}{{ m.items() | list | length }}{{ m.nothing is defined }}{{ m.role }}"
    assert ChatTemplate(source).render(MESSAGES, None, add_generation_prompt=False) == "2Falsesystem"


def test_a_directory_without_a_template_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"must hold chat_template\.jinja"):
        ChatTemplate.load(tmp_path)


def test_a_template_that_is_no_jinja_is_bad_input() -> None:
    with pytest.raises(InputError, match="cannot be compiled"):
        ChatTemplate("{% if %}")


def test_the_json_of_a_fixed_dictionary_is_that_of_a_plain_one() -> None:
    template = ChatTemplate("{% for tool in tools %}{{ tool | tojson }} {{ tool | tojson(indent=1) }}{% endfor %}")
    plain = {"name": "f", "parameters": {"a": ["<", "\u00e9"]}}
    fixed = FixedDict(plain)
    shown = [template.render([], [tool], add_generation_prompt=False) for tool in (plain, fixed, fixed)]
    assert shown == [shown[0]] * 3


def test_a_template_cannot_reach_beyond_the_numbers_of_its_loop() -> None:
    source = "{% for message in messages %}{{ loop._iterator is defined }}{% endfor %}"
    assert ChatTemplate(source).render([{}], None, add_generation_prompt=False) == "False"
    source = "{% for message in messages %}{{ loop.index }}{{ loop.first }}{{ loop.nextitem is defined }};{% endfor %}"
    messages = [{"role": "user"}, {"role": "tool"}]
    assert ChatTemplate(source).render(messages, None, add_generation_prompt=False) == "1TrueTrue;2FalseFalse;"
