"""Continuous batching in emulated time."""

from dataclasses import dataclass

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.errors import EngineError
from steelyard.inference.emulated_core import CoreSettings, EmulatedCore, Sequence
from steelyard.inference.engine import KvRule
from steelyard.testing.versions import request_for
from steelyard.types import FinishReason, VersionSpan

STEP_S, CHUNK_S = 1.0, 10.0


@dataclass(frozen=True)
class Steady:
    """A step takes a second, whatever it holds; a chunk of a prompt ten."""

    def step_s(self, num_decoding: int, kv_tokens: int, prefill_tokens: int, context_tokens: int) -> float:
        return STEP_S * (num_decoding > 0) + CHUNK_S * (prefill_tokens > 0)

    def load_s(self) -> float:
        return 5.0


def new_core(*, max_running: int = 8, kv_tokens: int = 1000, chunk: int = 100) -> EmulatedCore:
    return EmulatedCore(
        Steady(), CoreSettings(max_running=max_running, kv_tokens=kv_tokens, prefill_chunk_tokens=chunk)
    )


def sequence(
    name: str,
    *,
    num_prompt: int = 50,
    num_tokens: int = 10,
    at_s: float = 0.0,
    deadline_s: float = 1e9,
    key: str | None = None,
    prompt: tuple[int, ...] | None = None,
    follows: bool = False,
) -> Sequence:
    request = request_for(name, prompt or range(num_prompt), key=key)
    return Sequence(
        request=msgspec.structs.replace(request, follows_updates=follows), tokens=tuple(range(num_tokens)),
        reason=FinishReason.STOP, version=0, deadline_s=deadline_s, added_s=at_s,
    )  # fmt: skip


def run(core: EmulatedCore, until_s: float = 1e8) -> list[Sequence]:
    """Go from event to event to the end."""
    ended: list[Sequence] = []
    while (next_s := core.next_event_s()) is not None and next_s <= until_s:
        ended += core.advance(next_s)
    return ended + core.advance(0.0)


def test_a_sequence_takes_its_prefill_and_a_step_for_each_further_token() -> None:
    core = new_core()
    core.add(sequence("a", num_prompt=250, num_tokens=10))
    (ended,) = run(core)
    assert ended.first_token_s == 3 * CHUNK_S, "100 + 100 + 50 prompt tokens; the last gives the first token"
    assert ended.ended_s == 3 * CHUNK_S + 9 * STEP_S
    assert (core.prefill_tokens, core.decode_tokens, core.busy_s) == (250, 10, ended.ended_s)


def test_sequences_that_decode_share_their_steps() -> None:
    core = new_core()
    core.add(sequence("a", num_tokens=100))
    core.add(sequence("b", num_tokens=100))
    ended = run(core)
    assert [one.ended_s for one in ended] == [CHUNK_S + CHUNK_S + STEP_S + 98 * STEP_S, 2 * CHUNK_S + 100 * STEP_S]


def test_one_that_comes_in_mid_step_joins_at_its_end() -> None:
    core = new_core()
    core.add(sequence("a", num_tokens=100))
    core.advance(15.5)
    late = sequence("b", at_s=15.5)
    core.add(late)
    run(core)
    assert late.admitted_s == 16.0


def test_what_does_not_fit_waits_in_order() -> None:
    core = new_core(kv_tokens=100)
    for name in ("a", "b", "c"):
        core.add(sequence(name, num_prompt=40, num_tokens=20))
    assert (core.num_running, core.num_waiting, core.kv_tokens_in_use) == (1, 2, 60)
    ended = run(core)
    assert [one.request.request_id for one in ended] == ["a", "b", "c"]
    assert ended[1].admitted_s == ended[0].ended_s


def test_what_can_never_fit_is_refused() -> None:
    with pytest.raises(EngineError, match="request a: its 120 tokens must fit into 100 tokens of KV"):
        new_core(kv_tokens=100).add(sequence("a", num_prompt=100, num_tokens=20))


def test_the_next_turn_of_a_conversation_computes_only_what_is_new() -> None:
    core = new_core()
    core.add(sequence("a", num_prompt=50, num_tokens=10, key="talk"))
    run(core)
    prompt = (*range(50), *range(10), 7, 8, 9)
    again = sequence("b", prompt=prompt, key="talk")
    core.add(again)
    run(core)
    assert again.num_cached == 59, "the last sampled token was never fed back"
    assert core.cached_tokens == 59
    changed = sequence("c", prompt=(99, *prompt[1:]), key="talk")
    core.add(changed)
    assert changed.num_cached == 0


def test_kept_kv_of_another_version_is_never_used_and_gives_way_to_others() -> None:
    core = new_core(kv_tokens=100)
    core.add(sequence("a", num_prompt=50, num_tokens=10, key="talk"))
    run(core)
    assert core.kv_tokens_in_use == 59
    newer = sequence("b", prompt=(*range(50), *range(10)), key="talk")
    newer.version = 1
    core.add(newer)
    assert newer.num_cached == 0
    run(core)
    core.add(sequence("large", num_prompt=90, num_tokens=10))
    assert core.kv_tokens_in_use == 100
    run(core)
    core.release("large")
    assert core.kv_tokens_in_use == 0


def test_deadlines_tell_waiting_from_generating() -> None:
    core = new_core(kv_tokens=60)
    core.add(sequence("runs", num_tokens=10, deadline_s=12.5))
    core.add(sequence("waits", num_tokens=10, deadline_s=5.0))
    waited, ran = run(core)
    assert (waited.reason, waited.ended_s, waited.num_sampled) == (FinishReason.QUEUE_TIMEOUT, 5.0, 0)
    assert (ran.reason, ran.ended_s, ran.num_sampled) == (FinishReason.GENERATION_TIMEOUT, 12.5, 3)


def test_an_abort_frees_the_kv_at_once_and_leaves_what_was_sampled() -> None:
    core = new_core()
    core.add(sequence("a", num_tokens=100))
    core.add(sequence("b", num_tokens=100))
    core.advance(25.0)
    core.abort("a")
    core.abort("unknown")
    (ended,) = core.advance(25.0)
    assert (ended.reason, ended.num_sampled) == (FinishReason.CANCELLED, 1 + 1 + 4)
    assert core.kv_tokens_in_use == 150
    assert len(run(core)) == 1


def test_a_pause_stops_after_the_step_and_a_resume_goes_on() -> None:
    core = new_core()
    paused = sequence("a", num_tokens=10)
    core.add(paused)
    core.advance(12.5)
    core.pause()
    assert core.advance(100.0) == [] and paused.num_sampled == 4
    core.advance(200.0)
    core.resume()
    run(core)
    assert paused.ended_s == 206.0


@pytest.mark.parametrize("kv", [KvRule.RECOMPUTE, KvRule.KEEP])
def test_an_update_changes_the_version_between_two_tokens_and_says_where(kv: KvRule) -> None:
    core = new_core()
    follows = sequence("a", num_tokens=10, follows=True)
    core.add(follows)
    core.advance(13.0)
    core.update(4, kv)
    run(core)
    keeps = kv is KvRule.KEEP
    assert follows.spans == [
        VersionSpan(start=0, version=0),
        VersionSpan(start=4, version=4, kv_version=0 if keeps else None),
    ]
    assert follows.ended_s == (13.0 + 6 * STEP_S if keeps else 13.0 + CHUNK_S + 5 * STEP_S)
    assert core.prefill_tokens == (50 if keeps else 50 + 54)


def test_an_update_of_one_that_waits_leaves_a_single_span() -> None:
    core = new_core(kv_tokens=60)
    core.add(sequence("first"))
    waits = sequence("a", follows=True)
    core.add(waits)
    core.update(4, KvRule.RECOMPUTE)
    run(core)
    assert waits.spans == [VersionSpan(start=0, version=4)]


events = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 300), st.integers(1, 60)),
        st.tuples(st.just("wait"), st.integers(0, 40), st.just(0)),
        st.tuples(st.just("abort"), st.integers(0, 20), st.just(0)),
        st.tuples(st.just("update"), st.integers(0, 1), st.just(0)),
        st.tuples(st.just("pause"), st.integers(0, 1), st.just(0)),
    ),
    max_size=40,
)


@given(events)
def test_whatever_happens_every_sequence_ends_once_and_the_kv_never_overflows(
    script: list[tuple[str, int, int]],
) -> None:
    core, now_s, version = new_core(kv_tokens=400, max_running=3), 0.0, 0
    added: list[Sequence] = []
    ended: list[Sequence] = []
    for what, number, other in script:
        ended += core.advance(now_s)
        if what == "add":
            one = sequence(f"r{len(added)}", num_prompt=number, num_tokens=other, at_s=now_s, follows=True)
            one.version = version
            core.add(one)
            added.append(one)
        elif what == "wait":
            now_s += number + 0.5
        elif what == "abort":
            core.abort(f"r{number}")
        elif what == "update":
            version += 1
            core.update(version, KvRule.KEEP if number else KvRule.RECOMPUTE)
        elif number:
            core.pause()
        else:
            core.resume()
        assert core.kv_tokens_in_use <= 400 and core.num_running <= 3
    core.resume()
    ended += run(core)
    assert sorted(map(id, ended)) == sorted(map(id, added))
    for one in ended:
        assert one.reason is FinishReason.CANCELLED or one.num_sampled == len(one.tokens)
        assert one.num_sampled <= len(one.tokens)
        starts = [span.start for span in one.spans]
        assert starts == sorted(set(starts)) and starts[:1] in ([], [0])
    assert core.num_running == core.num_waiting == 0
    assert core.decode_tokens == sum(one.num_sampled for one in ended)
