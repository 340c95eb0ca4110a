"""What a dry run says beside the configuration."""

import pytest

from steelyard import config_file
from steelyard.config import Config
from steelyard.config_notes import notes, versions_needed
from steelyard.errors import ConfigError


def config(*overrides: str) -> Config:
    return config_file.load(None, list(overrides))


def test_one_replica_with_room_for_one_version_is_told_that_it_drains_and_what_would_help() -> None:
    (note,) = notes(config("inference.engine=vllm", "admission.max_policy_lag=2"))
    assert "needs 3 versions resident, and 1 vllm replicas hold one each" in note
    assert "weights.mode segmented, admission.max_policy_lag 0 or resources.rollout_gpus 3" in note


@pytest.mark.parametrize(
    "overrides",
    [
        ["inference.engine=vllm", "admission.max_policy_lag=0"],
        ["inference.engine=vllm", "weights.mode=segmented"],
        ["inference.engine=vllm", "resources.rollout_gpus=2"],
        ["inference.engine=local", "admission.max_policy_lag=3"],
    ],
)
def test_nothing_is_said_where_all_versions_find_room(overrides: list[str]) -> None:
    assert notes(config(*overrides)) == ()


def test_the_lag_bound_limits_how_many_versions_trajectories_hold() -> None:
    assert versions_needed(config("admission.max_policy_lag=0")) == 1
    assert versions_needed(config("admission.max_policy_lag=2")) == 3


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["weights.kv=keep"], "weights.kv must be recompute where weights.mode is pinned"),
        (["weights.kv=keep", "weights.mode=segmented"], "algorithm.kind grpo does not declare"),
        (["weights.publication=blue_green"], "resources.rollout_gpus must be >= 2"),
        (["runtime.max_restarts=-1"], "runtime.max_restarts must be >= 0, got -1"),
    ],
)
def test_what_cannot_work_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(*overrides)
