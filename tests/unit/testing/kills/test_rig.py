from collections import Counter

from steelyard.testing.kills.rig import draw_faults

NAMES = ("coordinator-0", "worker-0", "worker-1", "scorer-0", "trainer")


def test_a_seed_draws_the_same_faults_again_and_another_seed_others() -> None:
    assert draw_faults(1, 20, NAMES) == draw_faults(1, 20, NAMES) != draw_faults(2, 20, NAMES)


def test_faults_meet_everybody_and_kill_more_often_than_they_stop() -> None:
    faults = draw_faults(0, 500, NAMES)
    assert {fault.name for fault in faults} == set(NAMES)
    kinds = Counter(fault.kind for fault in faults)
    assert set(kinds) == {f"{who} {how}" for who in ("coordinator", "worker", "scorer", "trainer") for how in HOW}
    assert 0.6 < sum(fault.stop_s is None for fault in faults) / len(faults) < 0.8


HOW = ("killed", "stopped")
