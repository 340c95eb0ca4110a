import asyncio
import random
from collections.abc import Awaitable, Callable

import pytest

from steelyard.errors import RunError
from steelyard.testing.faultsim.loop import VirtualLoop, run
from steelyard.testing.faultsim.processes import EPOCH_S, Life, Process


class Stage:
    """One process and what is said of it."""

    def __init__(self, program: Callable[[Life], Awaitable[None]], max_skew_s: float = 0.0) -> None:
        self.loop = VirtualLoop(1000.0)
        self.notes: list[str] = []
        self.findings: list[BaseException] = []
        self.process = Process(
            "worker",
            program,
            self.loop,
            random.Random(0),
            restart_s=1.0,
            max_skew_s=max_skew_s,
            on_finding=self.findings.append,
            note=self.notes.append,
        )

    def play(self, seconds: float) -> None:
        async def main() -> None:
            self.process.start()
            await asyncio.sleep(seconds)

        run(main(), self.loop)


def test_a_program_that_fails_as_programs_do_is_started_again_and_again() -> None:
    async def program(life: Life) -> None:
        await asyncio.sleep(2.0)
        raise RunError("the coordinator is gone")

    stage = Stage(program)
    stage.play(20.0)
    assert stage.process.num_lives > 4
    assert stage.notes[:2] == [
        "worker starts, life 1, clock +0.000 s",
        "worker dies: RunError: the coordinator is gone",
    ]
    assert stage.findings == []


def test_any_other_error_of_a_program_is_a_finding() -> None:
    async def program(life: Life) -> None:
        raise KeyError("nobody expects this")

    stage = Stage(program)
    stage.play(5.0)
    assert [type(finding) for finding in stage.findings] == [KeyError]


def test_a_killed_program_does_nothing_more_and_its_next_life_begins_anew() -> None:
    seen: list[tuple[int, float]] = []

    async def program(life: Life) -> None:
        for _ in range(3):
            await asyncio.sleep(1.0)
            seen.append((life.number, life.loop.time()))
        await asyncio.Event().wait()

    stage = Stage(program)

    async def main() -> None:
        stage.process.start()
        await asyncio.sleep(1.5)
        stage.process.kill("killed")
        stage.process.kill("killed twice")
        await asyncio.sleep(30.0)

    run(main(), stage.loop)
    assert [number for number, _ in seen] == [1, 2, 2, 2]
    assert stage.process.num_lives == 2


def test_clocks_are_wrong_by_life_and_jump_when_told() -> None:
    shown: list[float] = []

    async def program(life: Life) -> None:
        shown.append(life.clock.now_s() - life.loop.time() - EPOCH_S)
        await asyncio.sleep(1.0)
        shown.append(life.clock.now_s() - life.loop.time() - EPOCH_S)
        await asyncio.Event().wait()

    stage = Stage(program, max_skew_s=10.0)

    async def main() -> None:
        stage.process.start()
        await asyncio.sleep(0.5)
        stage.process.jump_clock(30.0)
        await asyncio.sleep(1.0)

    run(main(), stage.loop)
    assert 0.0 < abs(shown[0]) <= 10.0
    assert shown[1] - shown[0] == pytest.approx(30.0)


def test_a_stopped_process_that_is_killed_does_not_go_on() -> None:
    seen: list[int] = []

    async def program(life: Life) -> None:
        await asyncio.sleep(1.0)
        seen.append(life.number)
        await asyncio.Event().wait()

    stage = Stage(program)

    async def main() -> None:
        stage.process.start()
        await asyncio.sleep(0.5)
        stage.process.stop_for(3.0)
        await asyncio.sleep(1.0)
        stage.process.kill("killed")
        await asyncio.sleep(30.0)

    run(main(), stage.loop)
    assert seen == [2]
