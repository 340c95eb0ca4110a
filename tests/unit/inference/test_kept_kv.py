"""What is worth keeping: the same as a sum over all, whatever is asked when."""

from hypothesis import given
from hypothesis import strategies as st

from steelyard.inference.kept_kv import KeptKv

KEYS = st.sampled_from("abcdefgh")
STEPS = st.tuples(
    KEYS,
    st.integers(0, 4000),
    st.floats(0.0, 5.0),
    st.floats(1e-5, 1e-2),
)


@given(st.lists(STEPS, max_size=60))
def test_the_sum_is_that_over_all_that_are_idle(steps: list[tuple[str, int, float, float]]) -> None:
    kept, idle, now_s = KeptKv(), dict[str, tuple[int, float]](), 0.0
    for key, num_tokens, pause_s, rate in steps:
        now_s += pause_s
        if key in idle:
            kept.remove(key)
            del idle[key]
        else:
            kept.add(key, num_tokens, now_s)
            idle[key] = num_tokens, now_s
        for asked_at_s in (now_s, now_s + rate * 100):
            worth = {name: tokens for name, (tokens, since_s) in idle.items() if asked_at_s - since_s < tokens * rate}
            assert kept.worth_keeping(rate, asked_at_s) == sum(worth.values())
            assert all(kept.worth_keeping_of(name, rate, asked_at_s) == worth.get(name, 0) for name in idle)
        assert kept.total == sum(tokens for tokens, _ in idle.values())
        assert len(kept) == len(idle)


def test_a_small_change_of_rate_or_time_is_seen_at_once() -> None:
    kept = KeptKv()
    kept.add("a", 1000, 0.0)
    kept.add("b", 2000, 0.0)
    assert kept.worth_keeping(0.01, 9.999) == 3000
    assert kept.worth_keeping(0.01, 10.0) == 2000
    assert kept.worth_keeping(0.0101, 10.0) == 3000
    kept.remove("b")
    assert kept.worth_keeping(0.0101, 10.0) == 1000
    assert kept.worth_keeping(0.0099, 10.0) == 0
