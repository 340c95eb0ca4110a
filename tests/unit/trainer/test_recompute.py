"""Log-probabilities of recorded turns, computed again from the weights, are those that the engine recorded."""

import pytest

from steelyard.clock import SystemClock
from steelyard.testing.tiny_model import tiny_module
from steelyard.testing.versions import request_for, run_core, tiny_core
from steelyard.trainer.recompute import recorded_logprobs
from steelyard.types import FinishReason, Sampling, Turn, VersionSpan

PROMPTS = ((1, 2, 3), (9, 8, 7, 6, 5, 4, 3, 2, 1), (5,) * 30)


def recorded_turns(temperature: float) -> list[Turn]:
    """One turn for each prompt, of unlike lengths, sampled by the engine."""
    core, _ = tiny_core(SystemClock())
    requests = [
        request_for(f"r{index}", prompt, max_tokens=5 + 7 * index, temperature=temperature, seed=index)
        for index, prompt in enumerate(PROMPTS)
    ]
    results = run_core(core, requests)
    return [
        Turn(
            request_id=request.request_id,
            attempt_id=f"att_{request.request_id}",
            turn_index=0,
            segment_index=0,
            prompt_token_ids=request.prompt_token_ids,
            token_ids=results[request.request_id].token_ids,
            logprobs=results[request.request_id].logprobs,
            kept_logmass=results[request.request_id].kept_logmass,
            version_spans=(VersionSpan(start=0, version=0),),
            sampling=Sampling(temperature=temperature),
            finish_reason=FinishReason.LENGTH,
            replica_id="rep_tiny",
            load_id="load_0",
            num_cached_tokens=0,
            started_at_s=0.0,
            ended_at_s=1.0,
        )
        for request in requests
    ]


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_recomputed_log_probabilities_are_those_that_were_recorded(temperature: float) -> None:
    turns = recorded_turns(temperature)
    found = recorded_logprobs(tiny_module(), turns)
    for turn, logprobs in zip(turns, found, strict=True):
        assert logprobs == pytest.approx(turn.logprobs, abs=1e-4)


def test_other_weights_give_other_log_probabilities() -> None:
    turns = recorded_turns(1.0)
    found = recorded_logprobs(tiny_module(1), turns)
    assert max(abs(a - b) for a, b in zip(found[0], turns[0].logprobs, strict=True)) > 1e-3
