"""The simulated replica: its time against steps counted one by one, its memory, and that every call ends once."""

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.allocation.roofline import IDEAL, Roofline
from steelyard.allocation.serving_cost import ServingCost, StepWork
from steelyard.errors import InputError
from steelyard.sim.kernel import Kernel
from steelyard.sim.replica import SimCall, SimReplica
from steelyard.testing.toy_devices import TOY_MODEL, toy_device_for


@dataclass
class Rig:
    kernel: Kernel
    replica: SimReplica
    done: list[tuple[str, float]]

    def call(self, name: str, prompt_tokens: int, new_tokens: int) -> SimCall:
        call = SimCall(
            attempt_id=name,
            prompt_tokens=prompt_tokens,
            new_tokens=new_tokens,
            on_done=lambda: self.done.append((name, self.kernel.now_s())),
        )
        self.replica.submit(call)
        return call


def rig(kv_tokens: int = 100_000, max_running: int = 256, chunk_tokens: int = 256) -> Rig:
    kernel = Kernel()
    cost = ServingCost(TOY_MODEL, Roofline(toy_device_for(kv_tokens), IDEAL), 1)
    assert cost.kv_capacity_tokens == kv_tokens
    return Rig(kernel, SimReplica("r0", kernel, cost, max_running=max_running, chunk_tokens=chunk_tokens), [])


def test_a_lone_call_takes_the_sum_of_its_steps() -> None:
    one = rig(chunk_tokens=100)
    one.call("a", 250, 400)
    one.kernel.run()
    cost = one.replica.cost
    expected = sum(
        cost.step_s(StepWork(prefill_tokens=n, prefill_pairs=n * (at + n / 2), num_prompts=1))
        for at, n in ((0, 100), (100, 100), (200, 50))
    )
    expected += sum(cost.decode_step_s(1, 250 + sampled) for sampled in range(1, 400))
    assert one.done[0][1] == pytest.approx(expected, rel=0.01)
    assert one.replica.totals.decode_tokens == 400
    assert one.replica.totals.prefill_tokens == 250
    assert one.replica.totals.busy_s == pytest.approx(one.done[0][1])


def test_a_batch_takes_little_more_time_than_its_longest() -> None:
    alone, together = rig(), rig()
    alone.call("a", 100, 500)
    for name in "abcdefgh":
        together.call(name, 100, 500)
    alone.kernel.run()
    together.kernel.run()
    assert together.kernel.now_s() < 1.5 * alone.kernel.now_s()


def test_short_prompts_share_a_step_and_a_long_one_takes_whole_steps() -> None:
    one = rig(chunk_tokens=100)
    for name in ("a", "b", "c"):
        one.call(name, 40, 1)
    one.call("long", 300, 1)
    one.kernel.run()
    cost = one.replica.cost

    def step_s(prompts: int, *parts: tuple[int, int]) -> float:
        pairs = sum(n * at + n * (n + 1) / 2 for at, n in parts)
        return cost.step_s(StepWork(prefill_tokens=sum(n for _, n in parts), prefill_pairs=pairs, num_prompts=prompts))

    # The first came alone and began at once; the others share what a step computes, each where the last one left off.
    steps = [
        step_s(1, (0, 40)),
        step_s(2, (0, 40), (0, 40), (0, 20)),
        step_s(1, (20, 100)),
        step_s(1, (120, 100)),
        step_s(1, (220, 80)),
    ]
    ends = [0.0]
    for step in steps:
        ends.append(ends[-1] + step)
    expected = [("a", ends[1]), ("b", ends[2]), ("c", ends[2]), ("long", ends[5])]
    assert [name for name, _ in one.done] == [name for name, _ in expected]
    assert [at_s for _, at_s in one.done] == pytest.approx([at_s for _, at_s in expected])


def test_the_prefix_of_an_attempt_is_not_computed_twice_while_there_is_room() -> None:
    one = rig()
    one.call("a", 1000, 50)
    one.kernel.run()
    assert one.replica.kept_tokens("a") == 1050
    one.call("a", 1100, 10)
    one.kernel.run()
    assert one.replica.totals.cached_tokens == 1050
    assert one.replica.totals.prefill_tokens == 1050
    one.replica.release("a")
    assert one.replica.kv_tokens == 0


def test_kept_prefixes_go_first_the_least_recently_used_before_others() -> None:
    one = rig(kv_tokens=3000)
    for name in "abc":
        one.call(name, 900, 10)
        one.kernel.run()
    one.call("d", 1500, 10)
    one.kernel.run()
    assert [one.replica.kept_tokens(name) for name in "abcd"] == [0, 0, 910, 1510]


def test_a_batch_that_outgrows_the_memory_puts_back_its_newest_and_keeps_its_tokens() -> None:
    one = rig(kv_tokens=1000)
    for name in "ab":
        one.call(name, 100, 600)
    one.kernel.run()
    assert [name for name, _ in one.done] == ["a", "b"]
    totals = one.replica.totals
    # Once: it comes again when there is room for it to go on, not to be put back at once.
    assert totals.num_put_back == 1
    assert totals.decode_tokens == 1200
    assert totals.recomputed_tokens > 100


def test_a_call_that_can_never_fit_is_refused() -> None:
    with pytest.raises(InputError, match="a call of 1001 tokens must fit into the KV memory of r0: 1000 tokens"):
        rig(kv_tokens=1000).call("a", 900, 101)


def test_a_cancelled_call_never_ends_and_frees_its_memory() -> None:
    one = rig()
    first, second = one.call("a", 100, 1000), one.call("b", 100, 50)
    one.kernel.run(until_s=0.001)
    one.replica.cancel(first)
    one.replica.cancel(first)
    waiting = one.call("c", 100, 10)
    one.replica.cancel(waiting)
    one.kernel.run()
    assert [name for name, _ in one.done] == ["b"]
    assert second.is_over
    one.replica.release("b")
    assert (one.replica.kv_tokens, one.replica.num_running, one.replica.num_waiting) == (0, 0, 0)


calls = st.tuples(st.integers(1, 400), st.integers(1, 100), st.floats(0, 0.2), st.booleans())


@settings(deadline=None, max_examples=150)
@given(st.lists(calls, min_size=1, max_size=25), st.integers(500, 3000), st.integers(1, 8), st.integers(16, 512))
def test_every_call_ends_once_in_at_least_its_own_time_and_memory_is_never_exceeded(
    wanted: list[tuple[int, int, float, bool]], kv_tokens: int, max_running: int, chunk_tokens: int
) -> None:
    one = rig(kv_tokens, max_running, chunk_tokens)
    cancelled, started = set[str](), dict[str, float]()

    def begin(index: int) -> None:
        prompt, new, at_s, cancels = wanted[index]
        started[str(index)] = one.kernel.now_s()
        call = one.call(str(index), prompt, new)

        def cancel() -> None:
            if not call.is_over:
                cancelled.add(str(index))
                one.replica.cancel(call)

        if cancels:
            one.kernel.after(at_s / 3, cancel)

    for index, (_, _, at_s, _) in enumerate(wanted):
        one.kernel.at(at_s, lambda index=index: begin(index))  # type: ignore[misc]
    while one.kernel.step():
        assert one.replica.kv_tokens <= kv_tokens
        assert one.replica.num_running <= max_running
    assert sorted(name for name, _ in one.done) == sorted({str(i) for i in range(len(wanted))} - cancelled)
    for name, ended_s in one.done:
        prompt, new, _, _ = wanted[int(name)]
        least_s = sum(one.replica.cost.decode_step_s(1, prompt + n) for n in range(1, new))
        assert ended_s - started[name] >= least_s * 0.97
    for index in range(len(wanted)):
        one.replica.release(str(index))
    assert one.replica.kv_tokens == 0


def test_sequences_of_mixed_lengths_decode_slower_where_they_are_read_together() -> None:
    took_s = []
    for range_tokens in (0, 1_000_000):
        one = rig()
        one.replica.range_tokens = range_tokens
        one.call("long", 20_000, 100)
        for index in range(31):
            one.call(str(index), 10, 100)
        one.kernel.run()
        took_s.append(one.kernel.now_s())
    assert took_s[1] > 1.5 * took_s[0]
