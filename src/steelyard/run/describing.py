"""What a run says of itself, and whether a worker or scorer elsewhere has the same environment and grader."""

import msgspec

from steelyard.config import Config
from steelyard.coordinator.description import RunDescription
from steelyard.digests import digest_bytes
from steelyard.environments.base import Environment
from steelyard.errors import InputError
from steelyard.run.directory import RunDirectory
from steelyard.run.stores import artifacts_url


def describe_run(config: Config, environment: Environment, directory: RunDirectory | None = None) -> RunDescription:
    """What the run of this configuration says of itself; ``directory`` None has no artifacts."""
    return RunDescription(
        environment=config.environment.kind,
        environment_version=environment.version,
        options_digest=digest_bytes(msgspec.json.encode(config.environment.options, order="deterministic")),
        verifier_version=environment.grader().verifier_version,
        artifacts_url="" if directory is None else artifacts_url(directory, config.blobs),
        lease_s=config.rollout.lease_s,
    )


def require_fit(config: Config, environment: Environment, run: RunDescription) -> None:
    """Refuse to work for a run with another environment or grader.

    Raises:
        InputError: names what must be alike and what came instead.
    """
    own = describe_run(config, environment)
    alike = (
        ("environment.kind", run.environment, own.environment),
        ("the environment's version", run.environment_version, own.environment_version),
        ("environment.options (digest)", run.options_digest, own.options_digest),
        ("the verifier's version", run.verifier_version, own.verifier_version),
    )
    for name, wanted, got in alike:
        if wanted != got:
            raise InputError(f"{name} must be {wanted} as in the run, got {got} here")
