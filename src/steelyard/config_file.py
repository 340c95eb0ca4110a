"""Reads a configuration: YAML file, then dotted overrides, then every rule.

An unknown key is an error that names the nearest valid one; a value of the wrong type or one that
breaks a rule is an error that starts with the field's dotted name.
"""

import difflib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import yaml

from steelyard.config import Config, Section
from steelyard.config_rules import check
from steelyard.errors import ConfigError, InputError

_FREE_FORM = {"environment.options"}


def load(path: Path | None, overrides: Sequence[str] = ()) -> Config:
    """The checked configuration of a file (None: all defaults) with ``key.path=value`` overrides.

    Raises:
        InputError: the file cannot be read or is not YAML.
        ConfigError: a key is unknown, a value has the wrong type, or a rule is broken.
    """
    tree = {} if path is None else _read_yaml(path)
    for override in overrides:
        _apply_override(tree, override)
    return from_tree(tree)


def from_tree(tree: dict[str, Any]) -> Config:
    """The checked configuration of plain nested dicts.

    Raises:
        ConfigError: as :func:`load`.
    """
    if isinstance(tree.get("runtime"), str):
        tree = {**tree, "runtime": {"kind": tree["runtime"]}}
    _refuse_unknown_keys(tree, Config, "")
    try:
        # Not strict: YAML 1.1 reads 1e-4 as text, and an override is always text.
        config = msgspec.convert(tree, Config, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(_in_our_words(str(error))) from None
    check(config)
    return config


def to_yaml(config: Config) -> str:
    """The whole resolved configuration; :func:`load` reads it back to an equal one."""
    return str(yaml.safe_dump(msgspec.to_builtins(config), sort_keys=False, allow_unicode=True))


def known_keys(section: type[Section] = Config, prefix: str = "") -> Iterator[str]:
    """All dotted keys, sections included."""
    for field in msgspec.structs.fields(section):
        name = prefix + field.encode_name
        yield name
        if isinstance(field.type, type) and issubclass(field.type, Section):
            yield from known_keys(field.type, name + ".")


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"the configuration file {path} must be readable, got: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"the configuration file {path} must be UTF-8 text, got: {error}") from None
    try:
        tree = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise InputError(f"the configuration file {path} must be YAML, got: {_on_one_line(error)}") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise InputError(f"the configuration file {path} must be a mapping of keys, got a {type(tree).__name__}")
    return tree


def _on_one_line(error: yaml.YAMLError) -> str:
    """What is wrong and where; the parser's own message also draws it."""
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return " ".join(str(error).split())
    mark = error.problem_mark
    return f"{error.problem} in line {mark.line + 1}, column {mark.column + 1}"


def _apply_override(tree: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"an override must look like train.max_steps=10, got {override!r}")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise ConfigError(f"{key} must be a YAML value, got {text!r}") from None
    node = tree
    *parents, last = key.split(".")
    for depth, parent in enumerate(parents):
        child = node.setdefault(parent, {})
        if isinstance(child, str) and parent == "runtime" and depth == 0:
            child = node[parent] = {"kind": child}
        if not isinstance(child, dict):
            raise ConfigError(f"{key} must name a key inside a section, got {parent} which is a value")
        node = child
    node[last] = value


def _refuse_unknown_keys(tree: dict[str, Any], section: type[Section], prefix: str) -> None:
    fields = {field.encode_name: field for field in msgspec.structs.fields(section)}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if key not in fields:
            raise ConfigError(_unknown_key(name, value))
        kind = fields[key].type
        if isinstance(kind, type) and issubclass(kind, Section):
            if not isinstance(value, dict):
                raise ConfigError(f"{name} must be a section of keys, got {value!r}")
            _refuse_unknown_keys(value, kind, name + ".")


def _unknown_key(name: str, value: Any) -> str:
    # Where a whole section is misspelt, its first key makes the guess better and the message more useful.
    if isinstance(value, dict) and value:
        name = f"{name}.{next(iter(value))}"
    return f"{name} is not a configuration key; the nearest is {_nearest(name)}"


def _nearest(name: str) -> str:
    """The key that was meant: one of the same section where there is such a section, else any that takes a value."""
    keys = list(known_keys())
    sections = {key.rpartition(".")[0] for key in keys} - {""}
    section, _, last = name.rpartition(".")
    if section in sections:
        siblings = [key.rpartition(".")[2] for key in keys if key.rpartition(".")[0] == section]
        return f"{section}.{_closest(last, siblings)}"
    leaves = [key for key in keys if key not in sections]
    return _closest(name, leaves if section else [*leaves, *sections])


def _closest(name: str, candidates: Sequence[str]) -> str:
    return difflib.get_close_matches(name, candidates, n=1, cutoff=0.0)[0]


def _in_our_words(message: str) -> str:
    found = re.match(r"(?P<rule>.*?)(?: - at `\$\.?(?P<path>[^`]*)`)?$", message, re.DOTALL)
    if found is None or not found["path"]:
        return message
    rule = found["rule"]
    wanted = re.match(r"Expected `(?P<want>[^`]*)`, got `(?P<got>[^`]*)`$", rule)
    if wanted is not None:
        rule = f"must be of type {wanted['want']}, got {wanted['got']}"
    return f"{found['path']} {rule[0].lower()}{rule[1:]}"
