"""Finding an environment by ``environment.kind``: built in, or from an installed package."""

import difflib
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from steelyard.environments.base import Environment, Services
from steelyard.environments.repair.environment import make_repair
from steelyard.errors import ConfigError

ENTRY_POINT_GROUP = "steelyard.environments"
"""An installed package adds a kind with an entry point that names an :data:`EnvironmentFactory`."""

EnvironmentFactory = Callable[[Mapping[str, Any], Services], Environment]

BUILT_IN: Mapping[str, EnvironmentFactory] = {"repair": make_repair}


def make_environment(
    kind: str,
    options: Mapping[str, Any],
    services: Services,
    installed: Mapping[str, EntryPoint] | None = None,
) -> Environment:
    """The environment of a kind, its options checked.

    Args:
        installed: kinds of other packages; looked up among the installed ones where it is None.

    Raises:
        ConfigError: an unknown kind (names the nearest), one that cannot be imported, or a wrong option.
    """
    if kind in BUILT_IN:
        return BUILT_IN[kind](options, services)
    others = installed_kinds() if installed is None else installed
    if kind not in others:
        known = sorted({*BUILT_IN, *others})
        nearest = difflib.get_close_matches(kind, known, n=1, cutoff=0.0)
        raise ConfigError(f"environment.kind: must be one of {', '.join(known)}, got {kind!r}; nearest: {nearest[0]}")
    try:
        factory: EnvironmentFactory = others[kind].load()
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"environment.kind: {kind!r} is installed but cannot be loaded: {error}") from error
    return factory(options, services)


def installed_kinds() -> dict[str, EntryPoint]:
    """Kinds that installed packages offer."""
    return {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}
