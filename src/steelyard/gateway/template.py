"""The chat template of a Hugging Face directory, rendered in a sandbox and without ``transformers``."""

import datetime
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2
import msgspec
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from steelyard.errors import InputError
from steelyard.gateway.template_form import writes_each_alone

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_PLAIN_JSON = json.JSONEncoder(ensure_ascii=False).encode
# What a template can raise by itself; templates come from elsewhere, so it is bad input and not our bug.
_FAILURES = (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RuntimeError)
_DICT_ATTRIBUTES = frozenset(dir(dict))


class ChatTemplate:
    """Renders messages to text exactly as the directory's template says.

    Args:
        source: Jinja text.
        special_tokens: what the template may name, such as ``bos_token``.
        today: what ``strftime_now`` tells the template. Without it the function is not defined, and templates
            that ask for it fall back to their fixed date: a prompt that changes at midnight would break
            the token prefix of every conversation.

    Raises:
        InputError: the source is no template.
    """

    def __init__(
        self, source: str, special_tokens: Mapping[str, str] | None = None, today: datetime.date | None = None
    ) -> None:
        environment = _TemplateEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        if today is not None:
            environment.globals["strftime_now"] = today.strftime
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise InputError(f"the chat template cannot be compiled: {error}") from error
        self.source = source
        self.special_tokens = dict(special_tokens or {})
        self._environment = environment
        self._fixed = {**environment.globals, **self.special_tokens, "documents": None}
        self.writes_each_alone = writes_each_alone(environment.parse(source), self.special_tokens)

    @classmethod
    def load(cls, directory: Path, today: datetime.date | None = None) -> "ChatTemplate":
        """Read ``chat_template.jinja``, or else ``chat_template`` in ``tokenizer_config.json``.

        Raises:
            InputError: neither holds a template, or the files cannot be read.
        """
        path = directory / "tokenizer_config.json"
        try:
            settings = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        except FileNotFoundError:
            settings = {}
        except msgspec.DecodeError as error:
            raise InputError(f"{path} is not a JSON object: {error}") from error
        own_file = directory / "chat_template.jinja"
        source = own_file.read_text("utf-8") if own_file.exists() else _default_template(settings.get("chat_template"))
        if source is None:
            raise InputError(f"{directory} must hold chat_template.jinja, or chat_template in tokenizer_config.json")
        return cls(source, _special_tokens(settings), today)

    def render(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, *, add_generation_prompt: bool
    ) -> str:
        """The text of ``messages``, in the form that ``apply_chat_template`` of ``transformers`` takes them.

        Raises:
            InputError: the template refuses these messages, or fails on them.
        """
        try:
            given = {"messages": messages, "tools": tools, "add_generation_prompt": add_generation_prompt}
            # What Template.render does, without what serves blocks and inheritance.
            context = Context(self._environment, {**self._fixed, **given}, None, {})
            return "".join(self._template.root_render_func(context))
        except _FAILURES as error:
            raise InputError(f"the chat template refuses these messages: {error}") from error


class FixedDict(dict[str, Any]):
    """What many renderings show and nobody changes, such as a tool: its JSON is made once."""

    __slots__ = ("plain_json",)
    plain_json: str


_LOOP_NUMBERS = frozenset(("index", "index0", "first", "last", "length", "previtem", "nextitem"))
_PLAIN_DICTS = (dict, FixedDict)


class _TemplateEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox, with a short way for what templates do most: reading entries of dictionaries, and ``loop``."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        if type(obj) in _PLAIN_DICTS and attribute not in _DICT_ATTRIBUTES:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        if type(obj) is LoopContext and attribute in _LOOP_NUMBERS:
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)


class _GenerationBlock(Extension):
    """``{% generation %}`` marks assistant text in some templates; here it only shows its body."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it as an instance attribute)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Without the HTML escapes of jinja2's own filter, which no chat template expects."""
    if not (ensure_ascii or indent or separators or sort_keys):
        return _fixed_json(value) if type(value) is FixedDict else _PLAIN_JSON(value)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _fixed_json(value: FixedDict) -> str:
    if not hasattr(value, "plain_json"):
        value.plain_json = _PLAIN_JSON(value)
    return value.plain_json


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _default_template(entry: Any) -> str | None:
    """A template is a string, or a list of named ones; agents have tools, so ``tool_use`` goes before ``default``."""
    if isinstance(entry, str):
        return entry
    named = {item["name"]: item["template"] for item in entry or ()}
    return named.get("tool_use", named.get("default"))


def _special_tokens(settings: dict[str, Any]) -> dict[str, str]:
    tokens = {}
    for name in _SPECIAL_NAMES:
        value = settings.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            tokens[name] = text
    return tokens
