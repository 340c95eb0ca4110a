"""Finding environments by kind."""

from importlib.metadata import EntryPoint

import pytest

from steelyard.environments.base import Services
from steelyard.environments.registry import ENTRY_POINT_GROUP, make_environment
from steelyard.errors import ConfigError
from steelyard.testing.repair import run_in_process

SERVICES = Services(run_function=run_in_process)


def entry_point(value: str) -> EntryPoint:
    return EntryPoint(name="elsewhere", value=value, group=ENTRY_POINT_GROUP)


def test_repair_is_built_in() -> None:
    environment = make_environment("repair", {"edit_discount": 0.5}, SERVICES)
    assert environment.name == "repair"
    assert "0.5" in environment.grader().verifier_version


def test_an_unknown_kind_is_an_error_that_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"environment\.kind: .*'repare'; nearest: repair"):
        make_environment("repare", {}, SERVICES, installed={})


@pytest.mark.parametrize("options", [{"edit_discont": 0.1}, {"edit_discount": 1.5}, {"least_value": "low"}])
def test_a_wrong_option_is_an_error(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"environment\.options"):
        make_environment("repair", options, SERVICES)


def test_an_installed_package_can_add_a_kind() -> None:
    installed = {"elsewhere": entry_point("steelyard.environments.repair.environment:make_repair")}
    assert make_environment("elsewhere", {}, SERVICES, installed=installed).name == "repair"


def test_a_package_that_cannot_be_loaded_is_an_error_that_says_why() -> None:
    installed = {"elsewhere": entry_point("steelyard.no_such_module:make")}
    with pytest.raises(ConfigError, match="no_such_module"):
        make_environment("elsewhere", {}, SERVICES, installed=installed)
