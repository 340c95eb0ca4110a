"""The fake engine keeps the contract of a real one."""

import asyncio

from steelyard.testing.engine import FakeEngine, fake_logprob
from steelyard.testing.manual_clock import ManualClock
from steelyard.testing.versions import request_for
from steelyard.types import FinishReason, GenerateRequest, GenerateResult


def answer(fake: FakeEngine, request: GenerateRequest) -> GenerateResult:
    async def main() -> GenerateResult:
        await fake.load("somewhere", request.policy_version)
        return await fake.generate(request)

    return asyncio.run(main())


def test_tokens_follow_the_seed_and_log_probabilities_the_version() -> None:
    fake = FakeEngine(ManualClock())
    old = answer(fake, request_for("a", (1, 2), version=1, seed=4))
    new = answer(fake, request_for("b", (1, 2), version=2, seed=4))
    other = answer(fake, request_for("c", (1, 2), version=2, seed=5))
    assert old.token_ids == new.token_ids != other.token_ids
    assert old.logprobs != new.logprobs
    assert new.logprobs == tuple(fake_logprob(2, 2 + index, token) for index, token in enumerate(new.token_ids))
    assert all(-2.0 <= logprob < 0.0 for logprob in new.logprobs)


def test_a_script_is_cut_at_the_stop_token_and_at_max_tokens() -> None:
    fake = FakeEngine(ManualClock(), script=lambda _request: (5, 6, 7, 8))
    stopped = answer(fake, request_for("a", (1,), stop=(7,)))
    assert (stopped.token_ids, stopped.finish_reason) == ((5, 6, 7), FinishReason.STOP)
    cut = answer(fake, request_for("b", (1,), max_tokens=2))
    assert (cut.token_ids, cut.finish_reason) == ((5, 6), FinishReason.LENGTH)


def test_a_request_past_its_deadline_is_a_queue_timeout() -> None:
    fake = FakeEngine(ManualClock(now_s=100.0))
    late = answer(fake, request_for("a", (1,), deadline_at_s=100.0))
    assert (late.finish_reason, late.token_ids) == (FinishReason.QUEUE_TIMEOUT, ())
