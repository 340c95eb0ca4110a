"""The deep audit: stored weights are asked again, about a seeded sample, and every disagreement is named."""

import math
import random
from collections.abc import Callable, Sequence

import pytest

from steelyard.coordinator.audit import AuditReport
from steelyard.coordinator.audit_deep import INVARIANT, DeepAudit
from steelyard.errors import IntegrityError
from steelyard.testing.run_rig import RunRig, play
from steelyard.types import Turn

TOLERANCE = 1e-4
Asked = list[tuple[int, str]]


async def _train(rig: RunRig) -> None:
    for step in range(3):
        await rig.train(step)
    await rig.checkpoint(3)


async def _three_steps(rig: RunRig) -> None:
    await _train(rig)
    await rig.coordinator.finish("done")


def audited(
    answer: Callable[[Turn], Sequence[float]], *, seed: int = 0, num_attempts: int = 100, rig: RunRig | None = None
) -> tuple[AuditReport, Asked]:
    """A report, and (version, attempt) of the turns that were asked about."""
    asked: Asked = []

    def recompute(version: int, turns: Sequence[Turn]) -> Sequence[Sequence[float]]:
        asked.extend((version, turn.attempt_id) for turn in turns)
        return [answer(turn) for turn in turns]

    deep = DeepAudit(recompute=recompute, rng=random.Random(seed), num_attempts=num_attempts, tolerance=TOLERANCE)
    return (rig or play(_three_steps)).audit(deep), asked


def finding(report: AuditReport) -> tuple[int, int, str | None]:
    """Checks, broken ones and the first counter-example of the deep invariant."""
    found = next(one for one in report.invariants if one.name == INVARIANT)
    return found.num_checked, found.num_broken, found.counter_example


def test_what_the_weights_give_again_passes() -> None:
    report, asked = audited(lambda turn: turn.logprobs)
    num_checked, num_broken, _ = finding(report)
    assert report.is_passed, report.lines()
    assert num_broken == 0
    assert num_checked > 0
    assert {version for version, _ in asked} == {0, 1, 2}


def test_a_difference_within_the_tolerance_passes_and_one_beyond_it_is_named() -> None:
    passed, _ = audited(lambda turn: [value - 0.5 * TOLERANCE for value in turn.logprobs])
    assert passed.is_passed
    report, _ = audited(lambda turn: [*turn.logprobs[:-1], turn.logprobs[-1] - 2 * TOLERANCE])
    assert report.broken == (INVARIANT,)
    _, _, example = finding(report)
    assert example is not None
    assert "recorded log-probability" in example
    assert f"they may differ by {TOLERANCE}" in example


@pytest.mark.parametrize(
    "answer",
    [lambda turn: [math.nan] * len(turn.logprobs), lambda turn: turn.logprobs[1:]],
    ids=["no number", "one too few"],
)
def test_an_answer_that_proves_nothing_fails(answer: Callable[[Turn], Sequence[float]]) -> None:
    assert audited(answer)[0].broken == (INVARIANT,)


def test_a_version_that_cannot_be_loaded_is_named_and_the_others_are_still_asked() -> None:
    def answer(turn: Turn) -> Sequence[float]:
        if turn.version_spans[0].version == 1:
            raise IntegrityError("its files are damaged")
        return turn.logprobs

    report, asked = audited(answer)
    assert report.broken == (INVARIANT,)
    assert finding(report)[2] == "version 1: its files are damaged"
    assert 2 in {version for version, _ in asked}


def test_a_missing_trace_is_named_here_too() -> None:
    rig = play(_three_steps)
    _, asked = audited(lambda turn: turn.logprobs, rig=rig)
    del rig.stores.traces[asked[0][1]]
    report, _ = audited(lambda turn: turn.logprobs, rig=rig)
    assert INVARIANT in report.broken


def test_the_seed_decides_which_attempts_are_drawn() -> None:
    rig = play(_three_steps)
    draws = [audited(lambda turn: turn.logprobs, seed=seed, num_attempts=1, rig=rig)[1] for seed in (7, 7, *range(8))]
    assert draws[0] == draws[1]
    assert len({tuple(draw) for draw in draws}) > 1
    for draw in draws:
        assert len({attempt for _, attempt in draw}) == 3


def test_a_deleted_version_is_not_asked_about() -> None:
    async def scene(rig: RunRig) -> None:
        await _train(rig)
        await rig.coordinator.version_deleted(0)
        await rig.coordinator.finish("done")

    rig = play(scene)
    report, asked = audited(lambda turn: turn.logprobs, rig=rig)
    assert 0 not in {version for version, _ in asked}
    assert report.is_passed, report.lines()
