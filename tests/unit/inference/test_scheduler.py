"""Admission, chunks, deadlines and ends, without a model and without a clock."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.errors import EngineError
from steelyard.inference.kv_blocks import BlockTable
from steelyard.inference.scheduler import Batch, Sampled, Scheduler, result_of, seed_of
from steelyard.testing.versions import request_for
from steelyard.types import FinishReason, GenerateRequest, GenerateResult

STOP = 99


def scheduler(
    *, max_running: int = 4, chunk: int = 16, num_rows: int = 8, row_tokens: int = 64, capacity: int = 512
) -> Scheduler:
    blocks = BlockTable(num_rows=num_rows, row_tokens=row_tokens, capacity_tokens=capacity, block_tokens=4)
    return Scheduler(blocks, max_running=max_running, prefill_chunk_tokens=chunk)


def answer(batch: Batch, token_id: int = 7, logprob: float = -1.0) -> Sampled:
    num_sampled = sum(item.is_sampled for item in batch.items)
    return Sampled([token_id] * num_sampled, [logprob] * num_sampled, [0.0] * num_sampled)


def step(one: Scheduler, now_s: float = 0.0, token_id: int = 7) -> list[Batch]:
    batches = one.plan(now_s)
    for batch in batches:
        one.commit(batch, answer(batch, token_id), now_s)
    return batches


def ended(one: Scheduler) -> dict[str, GenerateResult]:
    results = [result_of(finished, replica_id="rep", load_id="load") for finished in one.take_finished()]
    return {result.request_id: result for result in results}


def test_a_long_prompt_is_computed_in_chunks_and_sampled_after_the_last() -> None:
    one = scheduler(chunk=16)
    one.add(request_for("a", range(40), max_tokens=2), 0.0)
    sizes = [[(item.start, len(item.token_ids), item.is_sampled) for item in step(one)[0].items] for _ in range(4)]
    assert sizes == [[(0, 16, False)], [(16, 16, False)], [(32, 8, True)], [(40, 1, True)]]
    assert ended(one)["a"].finish_reason is FinishReason.LENGTH


def test_the_chunk_is_shared_and_decoding_goes_on_beside_it() -> None:
    one = scheduler(chunk=16)
    one.add(request_for("a", range(4)), 0.0)
    step(one)
    one.add(request_for("b", range(100, 112)), 0.0)
    one.add(request_for("c", range(200, 212)), 0.0)
    (batch,) = step(one)
    assert [(item.sequence_id, len(item.token_ids)) for item in batch.items] == [("a", 1), ("b", 12), ("c", 4)]


def test_each_version_gets_its_own_batch() -> None:
    one = scheduler()
    for name, version in (("a", 2), ("b", 1), ("c", 2)):
        one.add(request_for(name, (1, 2, version), version=version), 0.0)
    batches = step(one)
    assert [(batch.version, [item.sequence_id for item in batch.items]) for batch in batches] == [
        (1, ["b"]),
        (2, ["a", "c"]),
    ]


def test_the_stop_token_is_kept_and_ends_the_request() -> None:
    one = scheduler()
    one.add(request_for("a", (1, 2), stop=(STOP,)), 0.0)
    step(one)
    step(one, token_id=STOP)
    result = ended(one)["a"]
    assert (result.token_ids, result.finish_reason) == ((7, STOP), FinishReason.STOP)


def test_a_request_that_never_ran_ends_by_queue_timeout_and_one_that_ran_by_generation_timeout() -> None:
    one = scheduler(max_running=1)
    one.add(request_for("runs", (1, 2), deadline_at_s=10.0), 0.0)
    one.add(request_for("waits", (3, 4), deadline_at_s=10.0), 0.0)
    step(one, 1.0)
    assert ended(one) == {}
    assert one.plan(10.0) == []
    results = ended(one)
    assert results["runs"].finish_reason is FinishReason.GENERATION_TIMEOUT
    assert results["runs"].token_ids == (7,)
    assert results["waits"].finish_reason is FinishReason.QUEUE_TIMEOUT
    assert (results["waits"].queued_s, results["waits"].token_ids) == (10.0, ())


def test_the_next_deadline_is_the_earliest_one_open() -> None:
    one = scheduler()
    assert one.next_deadline_s == math.inf
    one.add(request_for("a", (1, 2), deadline_at_s=20.0), 0.0)
    one.add(request_for("b", (1, 2), deadline_at_s=10.0), 0.0)
    assert one.next_deadline_s == 10.0
    one.expire(10.0)
    assert one.next_deadline_s == 20.0


def test_an_aborted_request_frees_its_place_for_the_next() -> None:
    one = scheduler(max_running=1)
    one.add(request_for("a", (1, 2)), 0.0)
    one.add(request_for("b", (3, 4)), 0.0)
    step(one)
    one.abort("a", 1.0)
    one.abort("unknown", 1.0)
    (batch,) = step(one)
    assert [item.sequence_id for item in batch.items] == ["b"]
    assert ended(one)["a"].finish_reason is FinishReason.CANCELLED


def test_admission_goes_by_projected_tokens_not_by_requests() -> None:
    one = scheduler(max_running=8, capacity=64)
    for name in "abc":
        one.add(request_for(name, range(ord(name), ord(name) + 8), max_tokens=24), 0.0)
    step(one)
    assert (one.num_running, one.num_waiting) == (2, 1)


def taught(one: Scheduler) -> Scheduler:
    """After many requests that asked for 16 tokens and stopped at the first."""
    for index in range(16):
        one.add(request_for(f"short{index}", (1,), max_tokens=16, stop=(STOP,)), 0.0)
        step(one, token_id=STOP)
        one.release(f"short{index}")
    one.take_finished()
    return one


def test_admission_learns_what_requests_really_use() -> None:
    one = scheduler(max_running=8, capacity=64)
    for name in "abcd":
        one.add(request_for(name, range(ord(name), ord(name) + 8), max_tokens=40), 0.0)
    step(one)
    assert (one.num_running, one.num_waiting) == (1, 3)
    one = taught(scheduler(max_running=8, capacity=64))
    for name in "abcd":
        one.add(request_for(name, range(ord(name), ord(name) + 8), max_tokens=40), 0.0)
    step(one)
    assert (one.num_running, one.num_waiting) == (4, 0)


def test_where_projections_were_wrong_the_youngest_is_evicted_whole_and_keeps_its_tokens() -> None:
    one = taught(scheduler(max_running=8, chunk=64, capacity=64))
    for name in "abcd":
        one.add(request_for(name, range(ord(name), ord(name) + 8), max_tokens=40), 0.0)
    # Each starts with 8 tokens, and 64 are there: with 8 more each, they are used up.
    for _ in range(9):
        step(one)
    assert (one.num_running, one.num_evicted) == (4, 0)
    step(one)
    assert (one.num_running, one.num_waiting, one.num_evicted) == (3, 1, 1)
    assert one.evicted_tokens == 16
    results: dict[str, GenerateResult] = {}
    while one.num_running + one.num_waiting:
        step(one)
        results.update(ended(one))
    assert list(results) == ["a", "b", "c", "d"], "older ones end first"
    assert {len(result.token_ids) for result in results.values()} == {40}
    assert all(len(result.version_spans) == 1 for result in results.values())


def test_an_evicted_request_computes_all_it_has_again_and_samples_the_next_token_at_its_place() -> None:
    one = taught(scheduler(max_running=8, chunk=64, capacity=24))
    one.add(request_for("old", range(8), max_tokens=16), 0.0)
    one.add(request_for("young", range(50, 58), max_tokens=8), 0.0)
    seen = []
    while one.num_running + one.num_waiting:
        seen += [item for batch in step(one) for item in batch.items if item.sequence_id == "young"]
    first, *later = [item for item in seen if len(item.token_ids) > 1]
    assert (first.start, len(first.token_ids)) == (0, 8)
    (again,) = later
    assert (again.start, again.token_ids) == (0, (*range(50, 58), *(7,) * (len(again.token_ids) - 8)))
    ends = [item.start + len(item.token_ids) for item in seen]
    assert ends == list(range(8, 16)), "each place is sampled once"


def test_an_evicted_request_that_runs_out_of_time_has_a_generation_timeout() -> None:
    one = taught(scheduler(max_running=8, capacity=24))
    one.add(request_for("old", range(8), max_tokens=16), 0.0)
    one.add(request_for("young", range(50, 58), max_tokens=8, deadline_at_s=10.0), 0.0)
    one.add(request_for("never", range(70, 78), max_tokens=8, deadline_at_s=10.0), 0.0)
    while not one.num_evicted:
        step(one)
    one.plan(10.0)
    results = ended(one)
    assert results["young"].finish_reason is FinishReason.GENERATION_TIMEOUT
    assert len(results["young"].token_ids) > 0
    assert results["never"].finish_reason is FinishReason.QUEUE_TIMEOUT


def test_an_evicted_request_can_be_aborted() -> None:
    one = taught(scheduler(max_running=8, capacity=24))
    one.add(request_for("old", range(8), max_tokens=16), 0.0)
    one.add(request_for("young", range(50, 58), max_tokens=8), 0.0)
    while not one.num_evicted:
        step(one)
    one.abort("young", 1.0)
    assert ended(one)["young"].finish_reason is FinishReason.CANCELLED
    assert one.num_waiting == 0


def test_what_is_kept_between_turns_goes_before_a_running_request_does() -> None:
    one = taught(scheduler(max_running=8, capacity=32))
    one.add(request_for("t1", range(11), max_tokens=1, key="talk"), 0.0)
    step(one)
    one.add(request_for("long", range(50, 58), max_tokens=24), 0.0)
    while one.num_running + one.num_waiting:
        step(one)
    assert one.num_evicted == 0
    one.add(request_for("t2", (*range(11), 7, 8), max_tokens=1, key="talk"), 0.0)
    step(one)
    assert ended(one)["t2"].num_cached_tokens == 0


def test_a_new_conversation_waits_for_what_older_ones_keep_while_something_runs() -> None:
    one = scheduler(max_running=8, capacity=64)
    one.add(request_for("t1", range(30), max_tokens=1, key="talk"), 0.0)
    step(one)
    step(one)
    one.add(request_for("runs", range(50, 54), max_tokens=12), 0.0)
    step(one)
    one.add(request_for("new", range(80, 110), max_tokens=1), 0.0)
    step(one)
    assert (one.num_running, one.num_waiting) == (1, 1)
    one.add(request_for("t2", (*range(30), 7, 8), max_tokens=1, key="talk"), 0.0)
    step(one)
    assert ended(one)["t2"].num_cached_tokens == 30
    while one.num_running + one.num_waiting:
        step(one)
    assert ended(one)["new"].finish_reason is FinishReason.LENGTH, "nothing else ran, so it pushed the older one out"


def test_a_conversation_that_comes_back_is_admitted_before_new_ones() -> None:
    one = scheduler(max_running=1)
    one.add(request_for("t1", (1, 2, 3, 4, 5), max_tokens=1, key="talk"), 0.0)
    step(one)
    one.add(request_for("new", (8, 8), max_tokens=1), 0.0)
    one.add(request_for("t2", (1, 2, 3, 4, 5, 7, 6), max_tokens=1, key="talk"), 0.0)
    order = [item.sequence_id for _ in range(2) for item in step(one)[0].items]
    assert order == ["t2", "new"]
    assert ended(one)["t2"].num_cached_tokens == 5


def test_a_long_request_at_the_head_is_not_passed_for_ever() -> None:
    one = scheduler(max_running=8, capacity=64)
    one.add(request_for("a", (1,) * 8, max_tokens=24), 0.0)
    one.add(request_for("long", (2,) * 40, max_tokens=24), 0.0)
    one.add(request_for("short", (3,) * 4, max_tokens=4), 0.0)
    step(one)
    assert (one.num_running, one.num_waiting) == (1, 2)


def test_a_non_finite_log_probability_is_an_engine_error_that_names_it() -> None:
    one = scheduler()
    one.add(request_for("a", (1, 2)), 0.0)
    (batch,) = one.plan(0.0)
    one.commit(batch, answer(batch, logprob=math.nan), 0.0)
    result = ended(one)["a"]
    assert (result.finish_reason, result.token_ids) == (FinishReason.ENGINE_ERROR, ())
    assert "must be finite, got nan" in result.detail


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (request_for("a", (), max_tokens=4), "must be >= 1, got 0 and 4"),
        (request_for("a", (1,), max_tokens=0), "must be >= 1, got 1 and 0"),
        (request_for("a", range(60), max_tokens=5), "must be <= 64, got 60 \\+ 5"),
        (request_for("a", (1,), temperature=-1.0), "temperature must be finite and >= 0, got -1.0"),
        (request_for("a", (1,), temperature=math.nan), "temperature must be finite and >= 0, got nan"),
        (request_for("a", (1,), top_p=0.0), "top_p must be > 0 and <= 1, got 0.0"),
    ],
)
def test_a_request_that_can_never_be_served_is_refused_by_name(request_: GenerateRequest, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        scheduler().add(request_, 0.0)


def test_an_open_request_id_is_refused() -> None:
    one = scheduler()
    one.add(request_for("a", (1, 2)), 0.0)
    with pytest.raises(EngineError, match="request a: request_id must be new"):
        one.add(request_for("a", (1, 2)), 0.0)


def test_the_seed_is_the_requests_own_or_comes_from_its_id() -> None:
    assert seed_of(request_for("a", (1,), seed=5)) == seed_of(request_for("b", (1,), seed=5)) == 5
    assert seed_of(request_for("a", (1,))) == seed_of(request_for("a", (1, 2)))
    assert seed_of(request_for("a", (1,))) != seed_of(request_for("b", (1,)))
    assert 0 <= seed_of(request_for("a", (1,), seed=-1)) < 1 << 64


@st.composite
def workloads(draw: st.DrawFn) -> list[tuple[int, GenerateRequest, str]]:
    """(step of arrival, request, what happens to it) for up to 12 requests."""
    jobs = []
    for number in range(draw(st.integers(1, 12))):
        stem = draw(st.integers(0, 2))
        length = draw(st.integers(1, 30))
        request = request_for(
            f"r{number}",
            (*([stem] * 8), *range(length)),
            version=draw(st.integers(0, 1)),
            max_tokens=draw(st.integers(1, 10)),
            key=f"key{draw(st.integers(0, 4))}",
            deadline_at_s=float(draw(st.integers(3, 200))),
        )
        jobs.append((draw(st.integers(0, 10)), request, draw(st.sampled_from(["", "", "abort", "release"]))))
    return jobs


@settings(max_examples=80, deadline=None)
@given(
    jobs=workloads(), seed=st.integers(0, 1000), is_misled=st.booleans(), capacity_tokens=st.sampled_from([48, 64, 160])
)
def test_every_request_ends_once_and_nothing_is_left(
    jobs: list[tuple[int, GenerateRequest, str]], seed: int, is_misled: bool, capacity_tokens: int
) -> None:
    blocks = BlockTable(num_rows=5, row_tokens=64, capacity_tokens=capacity_tokens, block_tokens=4)
    one = Scheduler(blocks, max_running=3, prefill_chunk_tokens=8)
    if is_misled:
        taught(one)
    results: list[GenerateResult] = []
    for now in range(600):
        for arrival, request, fate in jobs:
            if arrival == now:
                one.add(request, float(now))
            if arrival + 3 == now and fate == "abort":
                one.abort(request.request_id, float(now))
            if arrival + 3 == now and fate == "release":
                one.release(request.attempt_id)
        batches = one.plan(float(now))
        prompts = {request.request_id: len(request.prompt_token_ids) for _, request, _ in jobs}
        prefill = [item for batch in batches for item in batch.items if item.start < prompts[item.sequence_id]]
        assert sum(len(item.token_ids) for item in prefill) <= 8, "the chunk bounds a step over all versions"
        for batch in batches:
            one.commit(batch, answer(batch, token_id=(seed * now) % 5), float(now))
        assert one.num_running <= 3
        assert list(blocks.check()) == []
        results.extend(result_of(finished, replica_id="rep", load_id="load") for finished in one.take_finished())
        if now > 10 and one.num_running + one.num_waiting == 0:
            break
    assert sorted(result.request_id for result in results) == sorted(request.request_id for _, request, _ in jobs)
    for result in results:
        assert len(result.token_ids) == len(result.logprobs) == len(result.kept_logmass)
    assert one.num_using(0) == one.num_using(1) == 0
    for version in (0, 1):
        blocks.drop_version(version)
    assert blocks.tokens_in_use == 0
