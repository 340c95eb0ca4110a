"""Reads a configuration: YAML file, then dotted overrides, then every rule.

An unknown key is an error that names the nearest valid one; a value of the wrong type or one that
breaks a rule is an error that starts with the field's dotted name.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import yaml

from steelyard.config import Config
from steelyard.config_rules import check
from steelyard.errors import ConfigError, InputError
from steelyard.keys import in_our_words, refuse_unknown_keys


def load(path: Path | None, overrides: Sequence[str] = ()) -> Config:
    """The checked configuration of a file (None: all defaults) with ``key.path=value`` overrides.

    Raises:
        InputError: the file cannot be read or is not YAML.
        ConfigError: a key is unknown, a value has the wrong type, or a rule is broken.
    """
    tree = {} if path is None else read_yaml(path)
    for override in overrides:
        apply_override(tree, override)
    return from_tree(tree)


def from_tree(tree: dict[str, Any], *, is_live: bool = True) -> Config:
    """The checked configuration of plain nested dicts.

    Args:
        is_live: it is to be run; else only simulated, where devices and models need not be there.

    Raises:
        ConfigError: as :func:`load`.
    """
    if isinstance(tree.get("runtime"), str):
        tree = {**tree, "runtime": {"kind": tree["runtime"]}}
    refuse_unknown_keys(tree, Config)
    try:
        # Not strict: YAML 1.1 reads 1e-4 as text, and an override is always text.
        config = msgspec.convert(tree, Config, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(in_our_words(str(error))) from None
    check(config, is_live=is_live)
    return config


def to_yaml(config: Config) -> str:
    """The whole resolved configuration; :func:`load` reads it back to an equal one."""
    return str(yaml.safe_dump(msgspec.to_builtins(config), sort_keys=False, allow_unicode=True))


def read_yaml(path: Path, what: str = "configuration file") -> dict[str, Any]:
    """The mapping in a YAML file, empty for an empty file. ``what`` names it in messages.

    Raises:
        InputError: the file cannot be read, is not YAML, or holds something else.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"the {what} {path} must be readable, got: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"the {what} {path} must be UTF-8 text, got: {error}") from None
    try:
        tree = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise InputError(f"the {what} {path} must be YAML, got: {_on_one_line(error)}") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise InputError(f"the {what} {path} must be a mapping of keys, got a {type(tree).__name__}")
    return tree


def _on_one_line(error: yaml.YAMLError) -> str:
    """What is wrong and where; the parser's own message also draws it."""
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return " ".join(str(error).split())
    mark = error.problem_mark
    return f"{error.problem} in line {mark.line + 1}, column {mark.column + 1}"


def apply_override(tree: dict[str, Any], override: str) -> None:
    """Put the value of ``key.path=value`` into ``tree``.

    Raises:
        ConfigError: it does not look like that, or leads through a value.
    """
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
