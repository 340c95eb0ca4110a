"""The speed of an engine from its calls: found again where it is known."""

import random

import pytest

from steelyard.allocation.observed_speeds import EngineSpeed, ObservedTurn, fit_engine, predicted_calls_s
from steelyard.errors import InputError


def calls(number: int, seed: int, step_s: float, sequence_s: float, call_s: float) -> list[ObservedTurn]:
    """Waves of equal calls that begin and end together, so that how many are open at once is exact."""
    rng, at_s, made = random.Random(seed), 0.0, list[ObservedTurn]()
    while len(made) < number:
        together, tokens = rng.randrange(1, 20), rng.randrange(2, 60)
        took_s = call_s + tokens * (step_s + together * sequence_s)
        made += [
            ObservedTurn(
                replica_id="r",
                started_at_s=at_s,
                ended_at_s=at_s + took_s,
                joined_tokens=1,
                computed_tokens=0,
                sampled_tokens=tokens,
            )
        ] * together
        at_s += took_s + 1.0
    return made


@pytest.mark.parametrize("seed", range(5))
def test_known_speeds_are_found_again(seed: int) -> None:
    found = fit_engine(calls(2000, seed, step_s=0.004, sequence_s=0.0005, call_s=0.01))
    assert found.step_s == pytest.approx(0.004, rel=0.02)
    assert found.sequence_s == pytest.approx(0.0005, rel=0.02)
    assert found.call_s == pytest.approx(0.01, rel=0.1)
    assert found.error_frac < 0.01


def test_what_costs_nothing_is_never_below_zero() -> None:
    found = fit_engine(calls(2000, 3, step_s=0.004, sequence_s=0.0, call_s=0.0))
    assert found.step_s == pytest.approx(0.004, rel=0.02)
    assert min(found.sequence_s, found.prompt_token_s, found.call_s) >= 0.0


def test_calls_are_predicted_at_a_speed_in_their_own_order() -> None:
    made = calls(100, 1, step_s=0.004, sequence_s=0.0005, call_s=0.01)
    random.Random(0).shuffle(made)
    speed = EngineSpeed(step_s=0.004, sequence_s=0.0005, prompt_token_s=0.0, call_s=0.01, error_frac=0.0)
    taken = [turn.ended_at_s - turn.started_at_s for turn in made]
    assert predicted_calls_s(made, speed) == pytest.approx(taken)


def test_too_few_calls_are_refused() -> None:
    with pytest.raises(InputError, match="at least 8 model calls to learn its speed from, got 3"):
        fit_engine(calls(3, 0, 0.004, 0.0005, 0.01)[:3])
