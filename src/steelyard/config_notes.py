"""What a configuration does that its user may not expect: nothing that is wrong, so it is said and not refused."""

from steelyard.config import Config

_ONE_VERSION = ("vllm",)
"""Engines that hold one version at a time."""


def notes(config: Config) -> tuple[str, ...]:
    """For people, before the start; each names the keys that would change it."""
    return tuple(note for note in (_residence_note(config),) if note is not None)


def versions_needed(config: Config) -> int:
    """How many versions must be resident so that no trajectory keeps a replica from going over.

    While a trajectory runs, ``1 + ceil(trajectory time / publish interval)`` versions have attempts. Neither time is
    known before a run, but the lag bound limits their ratio: the step that is ``max_policy_lag`` after a group's
    version waits for it, so no more than so many versions are published while one of its trajectories runs.
    """
    return 1 if config.weights.mode == "segmented" else config.admission.max_policy_lag + 1


def _residence_note(config: Config) -> str | None:
    if config.inference.engine not in _ONE_VERSION:
        return None  # the others hold max_policy_lag + 2 versions each
    needed, resident = versions_needed(config), config.resources.rollout_gpus
    if needed <= resident:
        return None
    return (
        f"weights.mode pinned with admission.max_policy_lag {needed - 1} needs {needed} versions resident, and "
        f"{resident} {config.inference.engine} replicas hold one each: a replica that goes over first waits until its "
        f"attempts have ended. weights.mode segmented, admission.max_policy_lag 0 or resources.rollout_gpus {needed} "
        "would avoid that"
    )
