"""Which harness a configuration asks for: what carries attempts through, and where."""

import os
import shutil
import sys
from pathlib import Path

import msgspec

from steelyard.config import Config, SandboxConfig
from steelyard.errors import ConfigError
from steelyard.harness.base import Agent
from steelyard.harness.command import AccessSource, CommandAgent, CommandSettings
from steelyard.sandbox.opening import open_pool
from steelyard.sandbox.pool import WarmPool

_MARGIN_S = 60.0
"""For all of an attempt but its program: a place for it, storing what came of it."""


def check_harness(config: Config) -> None:
    """Find the agent program, where attempts run here.

    Raises:
        ConfigError: it is not there.
    """
    if config.harness.kind != "command" or not config.rollout.num_workers:
        return
    program = config.harness.command[0]
    path = config.harness.environment.get("PATH", search_path())
    if "{" not in program and shutil.which(program, path=path) is None:
        raise ConfigError(
            f"harness.command must begin with a program that can be started, got {program!r}, not found in {path}"
        )


def make_agent(config: Config, access: AccessSource) -> Agent | None:
    """What carries attempts through; None: the built-in loop."""
    harness = config.harness
    if harness.kind == "chat_loop":
        return None
    settings = CommandSettings(command=harness.command, environment=harness.environment, deadline_s=harness.deadline_s)
    return CommandAgent(settings, access, search_path())


async def open_places(config: Config, directory: Path) -> WarmPool:
    """Where attempts run: sandboxes, or plain folders for agent programs.

    Raises:
        InputError: this machine does not allow it.
    """
    return await open_pool(place_settings(config), directory)


def place_settings(config: Config) -> SandboxConfig:
    """The sandbox of the harness: that of the configuration, or an ordinary process with room for a program."""
    harness = config.harness
    if harness.kind == "chat_loop":
        return config.sandbox
    return msgspec.structs.replace(
        config.sandbox,
        kind="process",
        memory_bytes=harness.memory_bytes,
        max_output_bytes=harness.max_output_bytes,
        max_file_bytes=harness.max_file_bytes,
        max_open_files=harness.max_open_files,
    )


def attempt_deadline_s(config: Config, chat_deadline_s: float) -> float:
    """A whole attempt; ``chat_deadline_s`` is that of the built-in loop."""
    return chat_deadline_s if config.harness.kind == "chat_loop" else config.harness.deadline_s + _MARGIN_S


def search_path() -> str:
    """The ``PATH`` of agent programs: beside this interpreter first, for what is installed with it."""
    return os.pathsep.join((str(Path(sys.executable).parent), os.defpath))
