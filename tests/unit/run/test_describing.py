"""Whether a worker elsewhere has the environment and the grader of the run."""

from pathlib import Path

import msgspec
import pytest

from steelyard.config import Config, EnvironmentConfig
from steelyard.errors import InputError
from steelyard.run.describing import describe_run, require_fit
from steelyard.run.directory import RunDirectory
from steelyard.run.joining import make_own_environment


def test_a_run_is_fitted_by_the_same_configuration_and_by_no_other() -> None:
    config = Config()
    environment = make_own_environment(config)
    run = describe_run(config, environment, RunDirectory(Path("/there")))
    assert run.artifacts_url == "file:///there/artifacts"
    require_fit(config, environment, run)
    for field, named in (
        ("environment", "environment.kind"),
        ("environment_version", "environment's version"),
        ("options_digest", "environment.options"),
        ("verifier_version", "verifier's version"),
    ):
        with pytest.raises(InputError, match=f"{named}.* must be another as in the run, got"):
            require_fit(config, environment, msgspec.structs.replace(run, **{field: "another"}))


def test_options_of_the_environment_are_compared_whatever_their_order() -> None:
    config = Config()
    environment = make_own_environment(config)
    digests = [
        describe_run(
            msgspec.structs.replace(config, environment=EnvironmentConfig(options=chosen)), environment
        ).options_digest
        for chosen in ({"a": 1, "b": 2}, {"b": 2, "a": 1}, {"a": 1, "b": 3})
    ]
    assert digests[0] == digests[1] != digests[2]
