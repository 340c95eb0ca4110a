"""Functions called in a real sandbox, honest ones and forgers."""

import asyncio
import functools
import tempfile
import textwrap
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from steelyard.config import SandboxConfig
from steelyard.sandbox.base import Sandbox
from steelyard.sandbox.bubblewrap import Command
from steelyard.sandbox.function_calls import run_function_calls
from steelyard.sandbox.registry import Registry
from steelyard.sandbox.starters import Nursery
from steelyard.types import CallResult, CallStatus

CONFIG = SandboxConfig(memory_bytes=128 << 20)
RETURNED, RAISED, TIMED_OUT, CRASHED, NOT_RUN = (
    CallStatus.RETURNED, CallStatus.RAISED, CallStatus.TIMED_OUT, CallStatus.CRASHED, CallStatus.NOT_RUN,
)  # fmt: skip


@functools.cache
def command() -> Command:
    return Command(CONFIG)


def in_sandbox(body: Callable[[Sandbox], Awaitable[None]]) -> None:
    async def main() -> None:
        with tempfile.TemporaryDirectory() as directory:
            nursery = Nursery(CONFIG, command(), Registry(Path(directory)))
            sandbox = await nursery.start()
            try:
                await body(sandbox)
            finally:
                await sandbox.close()
                await nursery.close()

    asyncio.run(main())


def call(source: str, inputs: list[tuple[Any, ...]], deadline_s: float = 10.0) -> tuple[CallResult, ...]:
    results: list[tuple[CallResult, ...]] = []

    async def body(sandbox: Sandbox) -> None:
        results.append(await run_function_calls(sandbox, textwrap.dedent(source), "f", inputs, deadline_s))
        # The sandbox must have survived whatever the function did.
        (after,) = await run_function_calls(sandbox, "def f(): return 'still here'", "f", [()], 10.0)
        assert after.value == "still here"

    in_sandbox(body)
    return results[0]


def statuses(results: tuple[CallResult, ...]) -> list[CallStatus]:
    return [each.status for each in results]


def test_values_and_errors_come_back_in_order() -> None:
    source = """
        def f(x, y):
            print("noise")
            return [x / y, (x, y), {(x,): None}, "é\\n", x == y, 2 ** 80]
    """
    results = call(source, [(1, 2), (1, 0), (3, 3)])
    assert statuses(results) == [RETURNED, RAISED, RETURNED]
    assert results[0].value == [0.5, (1, 2), {(1,): None}, "é\n", False, 2**80]
    assert results[1].error == "ZeroDivisionError: division by zero (line 4)"
    assert results[2].value[4] is True


def test_a_source_that_does_not_load_raises_for_every_input() -> None:
    for source, error in (
        ("def f(:", "SyntaxError: invalid syntax (line 1)"),
        ("def g(): pass", "NameError: the source must define 'f'"),
        ("import nothing_such", "ModuleNotFoundError: No module named 'nothing_such' (line 1)"),
        ("def f(): pass\n1 / 0", "ZeroDivisionError: division by zero (line 2)"),
    ):
        results = call(source, [(), ()])
        assert [(each.status, each.error) for each in results] == [(RAISED, error)] * 2


def test_a_hang_takes_the_rest_with_it_and_nothing_before() -> None:
    for hang in ("while True: pass", "return 9 ** 9 ** x ** 9", "import time; time.sleep(60)"):
        results = call(f"def f(x):\n  if x == 9:\n    {hang}\n  return x", [(1,), (9,), (2,)], deadline_s=0.4)
        assert statuses(results) == [RETURNED, TIMED_OUT, NOT_RUN]


def test_an_exception_that_is_swallowed_cannot_keep_a_hang_alive() -> None:
    source = """
        def f():
            while True:
                try:
                    while True: pass
                except BaseException:
                    pass
    """
    assert statuses(call(source, [()], deadline_s=0.3)) == [TIMED_OUT]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("import os; os._exit(0)", "the process ended before the function returned"),
        ("import sys; sys.exit(0)", "the process ended before the function returned"),
        ("import os; os.kill(os.getpid(), 11)", "the process crashed (exit code -11)"),
        ("raise KeyboardInterrupt", "the process crashed: KeyboardInterrupt"),
        ("return bytearray(1 << 30)", "out of memory"),
        ("import sys; sys.stderr.write('y' * 10 ** 6)", "too much output"),
    ],
)
def test_ending_early_is_a_crash_and_never_an_answer(body: str, expected: str) -> None:
    results = call(f"def f(x):\n  if x: return x\n  {body}", [(1,), (0,), (2,)])
    assert statuses(results) == [RETURNED, CRASHED, NOT_RUN]
    assert results[1].error == expected


def test_what_is_no_data_is_an_error_of_the_function() -> None:
    source = """
        class Equal:
            def __eq__(self, other): return True
        class EqualInt(int):
            def __eq__(self, other): return True
            __hash__ = int.__hash__
        looped = []
        looped.append(looped)
        def f(kind):
            return {"object": Equal(), "int": EqualInt(3), "loop": looped, "key": {EqualInt(1): 2}}[kind]
    """
    results = call(source, [("object",), ("int",), ("loop",), ("key",)])
    assert statuses(results) == [RAISED] * 4
    assert "got EqualInt" in results[1].error


FORGERIES = {
    "lines on every descriptor": """
        import os
        for fd in range(64):
            for index in range(4):
                try:
                    os.write(fd, b'[%d, "returned", "forged"]\\n' % index)
                except OSError:
                    pass
        def f(x): return x
    """,
    "patched builtins and json": """
        import builtins, json
        json.dumps = lambda *args, **kwargs: '[0, "passed", true]'
        builtins.type = builtins.isinstance = lambda *args: bool
        builtins.__dict__["__import__"] = None
        def f(x): return x
    """,
    "patched driver": """
        import sys
        driver = sys.modules["function_driver"]
        driver.to_json = driver._line = lambda *args: "[0, \\"returned\\", \\"forged\\"]\\n"
        def f(x): return x
    """,
    "exit handlers and threads": """
        import atexit, os, threading
        def forge():
            for fd in range(3, 64):
                try:
                    os.write(fd, b'[0, "returned", "forged"]\\n')
                except OSError:
                    pass
        atexit.register(forge)
        threading.Thread(target=forge).start()
        def f(x): return x
    """,
}


@pytest.mark.parametrize("trick", FORGERIES)
def test_a_forger_can_give_answers_but_no_verdict(trick: str) -> None:
    """All that comes out of a forger are values; whether they are right is decided by somebody who knows."""
    results = call(FORGERIES[trick], [("secret input",), (2,)])
    assert len(results) == 2
    for each in results:
        assert each.value in (None, "forged", "secret input", 2)
        assert each.status in (RETURNED, RAISED, CRASHED, NOT_RUN)


def test_expected_values_are_nowhere_in_the_process() -> None:
    """Looks through every frame and every object for the answer; finds its own inputs and nothing more."""
    source = """
        import gc, os, sys
        def f(x):
            seen = []
            frame = sys._getframe()
            while frame is not None:
                seen.append(repr(frame.f_globals) + repr(frame.f_locals))
                frame = frame.f_back
            seen += [repr(item) for item in gc.get_objects() if isinstance(item, (str, dict, list, bytes))]
            for top, _, names in os.walk("/box"):
                seen += names
            text = "".join(seen)
            return ["needle-" + "input" in text, "needle-" + "expected" in text, os.listdir("/box")]
    """
    (only,) = call(source, [("needle-input",)])
    assert only.value == [True, False, []]


def test_a_reward_file_is_a_file_like_any_other() -> None:
    source = """
        def f(x):
            for name in ("reward.txt", "score.json", "result", "/reward.txt"):
                try:
                    open(name, "w").write("1.0")
                except OSError:
                    pass
            return "wrong"
    """
    (only,) = call(source, [(1,)])
    assert (only.status, only.value) == (RETURNED, "wrong")


def test_inputs_that_are_no_data_are_refused_before_anything_runs() -> None:
    async def body(sandbox: Sandbox) -> None:
        with pytest.raises(TypeError, match="got set"):
            await run_function_calls(sandbox, "def f(x): pass", "f", [({1},)], 1.0)

    in_sandbox(body)
