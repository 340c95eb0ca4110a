"""Settings follow from the configuration; records say what they are."""

import pytest

from steelyard.config import AdmissionConfig, Config, RolloutConfig, RunConfig, ScoringConfig, TrainConfig
from steelyard.coordinator.events import Budgets
from steelyard.coordinator.records import CoordinatorSettings, is_finite
from steelyard.types import Sampling


def test_settings_follow_from_the_configuration() -> None:
    config = Config(
        run=RunConfig(seed=5),
        admission=AdmissionConfig(max_policy_lag=2, max_stale_retries=4),
        rollout=RolloutConfig(
            group_size=4, temperature=0.7, max_tokens=33, lease_s=2.0, budget_tokens=900, budget_s=60.0
        ),
        train=TrainConfig(batch_size=24, max_steps=9),
        scoring=ScoringConfig(deadline_s=10.0),
    )
    settings = CoordinatorSettings.from_config(config)
    assert (settings.rules.max_policy_lag, settings.rules.groups_per_batch, settings.rules.group_size) == (2, 6, 4)
    assert settings.sampling == Sampling(temperature=0.7, top_p=1.0, max_tokens=33, seed=5)
    assert (settings.max_steps, settings.max_stale_retries) == (9, 4)
    assert settings.budgets == Budgets(num_attempts=3, num_tokens=900, time_s=60.0)
    assert settings.priority_ageing_s == config.admission.priority_ageing_s
    assert settings.score_lease_s > 10.0, "a scorer that uses its whole deadline must still be in time"
    assert settings.tick_s <= settings.lease_s / 4


@pytest.mark.parametrize(
    ("value", "expected"), [(0.0, True), (-1.5, True), (None, False), (float("nan"), False), (float("inf"), False)]
)
def test_only_numbers_are_finite(value: float | None, expected: bool) -> None:
    assert is_finite(value) is expected
