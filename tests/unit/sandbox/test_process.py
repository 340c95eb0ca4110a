"""The limits that ``kind: process`` keeps. It has no walls, and its tests claim none."""

import asyncio
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

from steelyard.config import SandboxConfig
from steelyard.sandbox.base import OwnedSandbox
from steelyard.sandbox.function_calls import run_function_calls
from steelyard.sandbox.process import ProcessStarter
from steelyard.sandbox.registry import Registry
from steelyard.types import SandboxCall, SandboxResult, SandboxStatus

CONFIG = SandboxConfig(kind="process", memory_bytes=128 << 20, max_output_bytes=10_000, max_file_bytes=1 << 20)


def in_sandbox(body: Callable[[OwnedSandbox], Awaitable[None]]) -> None:
    async def main() -> None:
        with tempfile.TemporaryDirectory() as directory:
            sandbox = await ProcessStarter(CONFIG, Registry(Path(directory))).start()
            try:
                await body(sandbox)
                # It must have survived whatever the body did.
                assert (await run(sandbox, b"print('still here')")).stdout == b"still here\n"
            finally:
                await sandbox.close()

    asyncio.run(main())


async def run(sandbox: OwnedSandbox, program: bytes, deadline_s: float = 10.0) -> SandboxResult:
    return await sandbox.run(SandboxCall(program=program, deadline_s=deadline_s))


def test_time_memory_output_and_file_size_are_bounded() -> None:
    async def body(sandbox: OwnedSandbox) -> None:
        assert (await run(sandbox, b"while True: pass", 0.3)).status is SandboxStatus.TIMED_OUT
        assert (await run(sandbox, b"x = bytearray(200 << 20)")).status is SandboxStatus.MEMORY_LIMIT
        flood = await run(sandbox, b"while True: print('y' * 1000)")
        assert (flood.status, len(flood.stdout)) == (SandboxStatus.OUTPUT_LIMIT, CONFIG.max_output_bytes)
        big = await run(sandbox, b"open('big', 'wb').write(bytes(2 << 20))")
        assert (big.status, b"OSError" in big.stderr) == (SandboxStatus.CRASHED, True)

    in_sandbox(body)


def test_what_a_run_started_ends_with_it_as_long_as_it_does_not_hide() -> None:
    async def body(sandbox: OwnedSandbox) -> None:
        program = (
            b"import os, time\nif os.fork() == 0:\n    os.setsid()\n    os.fork()\n    time.sleep(600)\ntime.sleep(0.1)"
        )
        assert (await run(sandbox, program)).status is SandboxStatus.OK
        children = b"import os\nprint(open(f'/proc/{os.getppid()}/task/{os.getppid()}/children').read().split())"
        result = await run(sandbox, children)
        assert result.stdout.count(b"'") == 2, result

    in_sandbox(body)


def test_its_directory_is_its_own_and_goes_with_it() -> None:
    places: list[Path] = []

    async def body(sandbox: OwnedSandbox) -> None:
        await sandbox.write_file("mine", b"x")
        result = await run(sandbox, b"import os\nprint(os.getcwd(), os.listdir())")
        place, names = result.stdout.decode().split(" ", 1)
        assert names == "['mine']\n"
        places.append(Path(place))
        assert places[0].is_dir()

    in_sandbox(body)
    assert not places[0].exists()


def test_functions_are_called_as_in_the_real_sandbox() -> None:
    async def body(sandbox: OwnedSandbox) -> None:
        results = await run_function_calls(sandbox, "def f(x): return (x, 1 / x)", "f", [(2,), (0,)], 10.0)
        assert results[0].value == (2, 0.5)
        assert results[1].error == "ZeroDivisionError: division by zero (line 1)"

    in_sandbox(body)
