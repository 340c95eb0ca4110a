"""Every wall and every limit is tested by running into it, in both ways to start a bubblewrap.

``test_plain_user.py`` runs this file once more as a user without privileges.
"""

import ast
import asyncio
import functools
import hashlib
import tempfile
import textwrap
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from steelyard.config import SandboxConfig
from steelyard.errors import SandboxLost
from steelyard.sandbox.base import OwnedSandbox
from steelyard.sandbox.bubblewrap import Command
from steelyard.sandbox.registry import Registry
from steelyard.sandbox.starters import Nursery, SingleStarter
from steelyard.types import SandboxCall, SandboxResult, SandboxStatus

CONFIG = SandboxConfig(
    memory_bytes=128 << 20, max_processes=8, max_output_bytes=10_000, max_file_bytes=1 << 20, max_disk_bytes=2 << 20
)
STARTERS: dict[str, type[Nursery] | type[SingleStarter]] = {"nursery": Nursery, "single": SingleStarter}
Body = Callable[[OwnedSandbox], Awaitable[None]]
both = pytest.mark.parametrize("kind", STARTERS)


@functools.cache
def command() -> Command:
    return Command(CONFIG)


def in_sandboxes(kind: str, body: Callable[..., Awaitable[None]], num: int = 1) -> None:
    async def main() -> None:
        with tempfile.TemporaryDirectory() as directory:
            starter = STARTERS[kind](CONFIG, command(), Registry(Path(directory)))
            sandboxes = [await starter.start() for _ in range(num)]
            try:
                await body(*sandboxes)
            finally:
                await asyncio.gather(*(sandbox.close() for sandbox in sandboxes))
                await starter.close()

    asyncio.run(main())


async def run(sandbox: OwnedSandbox, program: str, deadline_s: float = 10.0, stdin: bytes = b"") -> SandboxResult:
    source = textwrap.dedent(program).encode()
    return await sandbox.run(SandboxCall(program=source, stdin=stdin, deadline_s=deadline_s))


def check(kind: str, program: str) -> str:
    """Run a program that must end well, and then another one, so that the sandbox must have survived; its output."""
    output: list[bytes] = []

    async def body(sandbox: OwnedSandbox) -> None:
        result = await run(sandbox, program)
        assert result.status is SandboxStatus.OK, result
        output.append(result.stdout)
        assert (await run(sandbox, "print('still here')")).stdout == b"still here\n"

    in_sandboxes(kind, body)
    return output[0].decode()


# --- what works -----------------------------------------------------------------------------------


@both
def test_a_program_gets_its_input_and_its_output_and_exit_code_come_back(kind: str) -> None:
    data = bytes(range(256)) * 2000

    async def body(sandbox: OwnedSandbox) -> None:
        program = """
            import hashlib, sys
            print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())
            sys.exit(int(sys.stderr.write("four")))
        """
        result = await run(sandbox, program, stdin=data)
        assert result.stdout.decode() == hashlib.sha256(data).hexdigest() + "\n"
        assert (result.status, result.returncode, result.stderr) == (SandboxStatus.CRASHED, 4, b"four")
        assert (await run(sandbox, "pass", stdin=data)).status is SandboxStatus.OK

    in_sandboxes(kind, body)


@both
def test_an_error_shows_the_program_and_not_the_supervisor(kind: str) -> None:
    async def body(sandbox: OwnedSandbox) -> None:
        result = await run(sandbox, "def f():\n    return 1 / 0\nf()")
        assert result.returncode == 1
        assert b'File "<program>", line 2, in f' in result.stderr
        assert b"inside.py" not in result.stderr
        assert (await run(sandbox, "x = (")).stderr.endswith(b"SyntaxError: '(' was never closed\n")

    in_sandboxes(kind, body)


@both
def test_files_pass_between_runs_and_host_and_nothing_else_does(kind: str) -> None:
    async def body(sandbox: OwnedSandbox) -> None:
        await sandbox.write_file("in.bin", b"\0\1")
        await run(sandbox, "open('out.bin', 'wb').write(open('in.bin', 'rb').read() * 2); leftover = 1")
        assert await sandbox.read_file("out.bin") == b"\0\1\0\1"
        assert b"NameError" in (await run(sandbox, "print(leftover)")).stderr
        with pytest.raises(FileNotFoundError, match="nothing"):
            await sandbox.read_file("nothing")
        with pytest.raises(ValueError, match="plain"):
            await sandbox.read_file("../etc/passwd")

    in_sandboxes(kind, body)


# --- limits ---------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize(
    "program",
    [
        "while True: pass",
        "9 ** 9 ** 9 ** 9",
        "import time; time.sleep(60)",
        "import signal, time\nsignal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\ntime.sleep(60)",
    ],
)
def test_time_is_bounded(kind: str, program: str) -> None:
    async def body(sandbox: OwnedSandbox) -> None:
        result = await run(sandbox, f"print('begun', flush=True)\n{program}", deadline_s=0.3)
        assert (result.status, result.stdout) == (SandboxStatus.TIMED_OUT, b"begun\n")
        assert result.duration_s >= 0.3
        assert (await run(sandbox, "print('still here')")).stdout == b"still here\n"

    in_sandboxes(kind, body)


@both
def test_memory_is_bounded(kind: str) -> None:
    async def body(sandbox: OwnedSandbox) -> None:
        result = await run(sandbox, "x = bytearray(200 << 20)")
        assert result.status is SandboxStatus.MEMORY_LIMIT
        assert (await run(sandbox, "x = bytearray(50 << 20); print(len(x))")).stdout == b"52428800\n"

    in_sandboxes(kind, body)


@both
def test_memory_that_no_resource_limit_counts_cannot_be_had(kind: str) -> None:
    program = """
        import ctypes, os, platform
        libc = ctypes.CDLL(None, use_errno=True)
        try:
            os.memfd_create("x")
        except PermissionError:
            print("memfd refused")
        assert libc.shmget(0, 1 << 20, 0o1600) == -1 and ctypes.get_errno() == 1
    """
    assert check(kind, program) == "memfd refused\n"


@both
def test_processes_are_bounded(kind: str) -> None:
    program = """
        import os, time
        num = 0
        try:
            while num < 1000:
                if os.fork() == 0:
                    time.sleep(60)
                num += 1
        except BlockingIOError:
            print(num)
    """
    assert 1 <= int(check(kind, program)) <= CONFIG.max_processes


@both
def test_a_fork_bomb_ends_with_its_run(kind: str) -> None:
    async def body(sandbox: OwnedSandbox) -> None:
        bomb = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
        assert (await run(sandbox, bomb, deadline_s=0.5)).status is SandboxStatus.TIMED_OUT
        assert (await run(sandbox, LIST_PROCESSES)).stdout == b"1 me\n"

    in_sandboxes(kind, body)


LIST_PROCESSES = """
import os
def exists(pid):
    try:
        os.kill(pid, 0)
        return True
    except ProcessLookupError:
        return False
print(*("me" if pid == os.getpid() else pid for pid in range(1, 70_000) if exists(pid)))
"""


@both
def test_a_daemon_does_not_outlive_its_run(kind: str) -> None:
    async def body(sandbox: OwnedSandbox) -> None:
        program = """
            import os, time
            reading, writing = os.pipe()
            if os.fork() == 0:
                os.setsid()
                if os.fork() == 0:
                    os.write(writing, b"x")
                    while True:
                        open("alive", "w").close()
                        time.sleep(0.001)
                os._exit(0)
            os.read(reading, 1)
        """
        result = await run(sandbox, program)
        assert result.status is SandboxStatus.OK
        assert (await run(sandbox, LIST_PROCESSES)).stdout == b"1 me\n"
        counted = await run(
            sandbox, "import os, time\nif os.path.exists('alive'): os.remove('alive')\ntime.sleep(0.05)"
        )
        assert counted.status is SandboxStatus.OK
        with pytest.raises(FileNotFoundError):
            await sandbox.read_file("alive")

    in_sandboxes(kind, body)


@both
@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_output_is_bounded(kind: str, stream: str) -> None:
    async def body(sandbox: OwnedSandbox) -> None:
        result = await run(sandbox, f"import sys\nwhile True: sys.{stream}.write('y' * 1000)")
        assert result.status is SandboxStatus.OUTPUT_LIMIT
        assert len(result.stdout) + len(result.stderr) == CONFIG.max_output_bytes
        exactly = await run(sandbox, f"print('y' * {CONFIG.max_output_bytes - 1})")
        assert (exactly.status, len(exactly.stdout)) == (SandboxStatus.OK, CONFIG.max_output_bytes)

    in_sandboxes(kind, body)


@both
def test_a_file_and_the_disk_are_bounded(kind: str) -> None:
    program = f"""
        import errno
        def fill(name, num_bytes):
            with open(name, "wb", buffering=0) as file:
                while num_bytes > 0:
                    num_bytes -= file.write(bytes(min(num_bytes, 65536)))
        for names, num_bytes in (["big"], {CONFIG.max_file_bytes + 1}), ("abcd", {CONFIG.max_file_bytes}):
            try:
                for name in names:
                    fill(name, num_bytes)
            except OSError as error:
                print(errno.errorcode[error.errno])
    """
    assert check(kind, program).split() == ["EFBIG", "ENOSPC"]


@both
def test_reading_and_writing_files_from_outside_keeps_the_limits(kind: str) -> None:
    async def body(sandbox: OwnedSandbox) -> None:
        with pytest.raises(SandboxLost, match="<= 1048576 bytes"):
            await sandbox.write_file("big", bytes(CONFIG.max_file_bytes + 1))
        await sandbox.write_file("big", bytes(CONFIG.max_file_bytes))
        await sandbox.write_file("more", bytes(CONFIG.max_file_bytes // 2))
        with pytest.raises(SandboxLost, match="No space left") as caught:
            await sandbox.write_file("most", bytes(CONFIG.max_file_bytes))
        assert caught.value.is_by_program
        assert len(await sandbox.read_file("big")) == CONFIG.max_file_bytes

    in_sandboxes(kind, body)


# --- walls ----------------------------------------------------------------------------------------


@both
def test_there_is_no_network(kind: str) -> None:
    program = """
        import errno, socket
        for family in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX, socket.AF_NETLINK):
            for make in (socket.socket, socket.socketpair):
                try:
                    make(family, socket.SOCK_DGRAM)
                except OSError as error:
                    print(errno.errorcode[error.errno])
    """
    assert set(check(kind, program).split()) == {"EPERM"}


@both
def test_nothing_of_the_host_is_mounted(kind: str) -> None:
    program = """
        import os
        for top, directories, files in os.walk("/"):
            if top.startswith("/python/lib/"):
                continue
            for name in files:
                print(os.path.join(top, name))
        assert not os.path.exists("/etc/passwd") and not os.path.exists("/proc/self")
    """
    found = [line for line in check(kind, program).split() if not line.startswith(("/dev/", "/python/so/"))]
    linker = [line for line in found if line.startswith("/lib")]
    assert len(linker) == 1
    assert "/ld-" in linker[0]
    own = {
        "/python/bin/python3",
        *(f"/steelyard/{name}.py" for name in ("inside", "function_driver", "syscall_filter")),
    }
    assert set(found) - set(linker) == own


@both
def test_installed_packages_and_the_environment_are_absent(kind: str) -> None:
    program = """
        import os, sys
        assert not any("site-packages" in path or "dist-packages" in path for path in sys.path)
        for top, directories, files in os.walk("/python"):
            assert not (top.endswith("-packages") and (directories or files)), top
        try:
            import msgspec
        except ModuleNotFoundError:
            print(sorted(os.environ))
    """
    expected = ["HOME", "LD_LIBRARY_PATH", "PATH", "PYTHONHASHSEED", "PYTHONHOME", "PYTHONUTF8"]
    assert set(ast.literal_eval(check(kind, program))) - {"PWD", "LC_CTYPE"} == set(expected)


@both
def test_only_the_own_directory_can_be_written(kind: str) -> None:
    program = """
        import os
        for top, directories, files in os.walk("/"):
            for path in (os.path.join(top, "new"), *(os.path.join(top, name) for name in files[:3])):
                if path.startswith(("/box", "/dev/")) and path != "/dev/new":
                    continue
                try:
                    os.close(os.open(path, os.O_WRONLY | os.O_CREAT))
                    print("wrote", path)
                except OSError:
                    pass
        for name in os.listdir("/dev"):
            if os.path.isdir(f"/dev/{name}"):
                try:
                    open(f"/dev/{name}/new", "w")
                    print("wrote", name)
                except OSError:
                    pass
        os.mkdir("sub")
        open("sub/mine", "w").write("x")
    """
    assert check(kind, program) == ""


@both
def test_no_other_process_is_in_sight_and_the_parent_cannot_be_killed(kind: str) -> None:
    program = """
        import os, signal
        assert os.getppid() == 1
        for number in set(signal.valid_signals()) - {0}:
            os.kill(1, number)
    """
    assert check(kind, program + textwrap.indent(LIST_PROCESSES, " " * 8)) == "1 me\n"


@both
def test_the_parent_cannot_be_traced_read_or_limited(kind: str) -> None:
    program = """
        import ctypes, errno, resource
        libc = ctypes.CDLL(None, use_errno=True)
        def refused(result):
            return result == -1 and errno.errorcode[ctypes.get_errno()]
        print(refused(libc.ptrace(16, 1, 0, 0)))
        print(refused(libc.process_vm_readv(1, 0, 0, 0, 0, 0)))
        try:
            resource.prlimit(1, resource.RLIMIT_CPU, (0, 0))
        except PermissionError:
            print("EPERM")
    """
    assert check(kind, program).split() == ["EPERM", "EPERM", "EPERM"]


@both
def test_no_privilege_can_be_gained(kind: str) -> None:
    program = """
        import ctypes, os, struct
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.unshare(0x10000000) == -1, "a user namespace by unshare"
        number = {"x86_64": 56, "aarch64": 220}[os.uname().machine]
        assert libc.syscall(number, 0x10000000 | 17, 0, 0, 0, 0) == -1, "a user namespace by clone"
        assert libc.mount(b"none", b"/box", b"tmpfs", 0, None) == -1, "mount"
        assert libc.umount2(b"/proc", 2) == -1, "umount"
        assert libc.chroot(b"/box") == -1, "chroot"
        assert libc.sethostname(b"x", 1) == -1, "sethostname"
        data = ctypes.create_string_buffer(24)
        assert libc.capget(struct.pack("=Ii", 0x20080522, 0), data) == 0
        assert bytes(data) == bytes(24), "capabilities"
        try:
            os.setuid(0)
        except OSError:
            print(os.getuid() != 0)
    """
    assert check(kind, program) == "True\n"


@both
def test_a_program_holds_no_descriptor_but_three_pipes(kind: str) -> None:
    program = """
        import os, stat
        for fd in range(4096):
            try:
                print(fd, stat.S_ISFIFO(os.fstat(fd).st_mode))
            except OSError:
                pass
    """
    assert check(kind, program).split() == ["0", "True", "1", "True", "2", "True"]


@both
def test_a_program_that_breaks_its_interpreter_breaks_only_itself(kind: str) -> None:
    async def body(sandbox: OwnedSandbox) -> None:
        program = """
            import gc, os, sys
            frame = sys._getframe()
            while frame is not None:
                for name in list(frame.f_globals):
                    if name.startswith(("_pack", "_status", "end_all", "OK", "REPLY")):
                        frame.f_globals[name] = None
                frame = frame.f_back
            os._exit = lambda code: None
            os.write(1, b"\\0" * 100)
            sys.exit(0)
        """
        result = await run(sandbox, program)
        assert result.stdout == b"\0" * 100
        assert result.status is SandboxStatus.CRASHED
        again = await run(sandbox, "print('still here')")
        assert (again.status, again.stdout) == (SandboxStatus.OK, b"still here\n")

    in_sandboxes(kind, body)


@both
def test_a_program_that_kills_itself_is_told_from_one_that_fails(kind: str) -> None:
    async def body(sandbox: OwnedSandbox) -> None:
        killed = await run(sandbox, "import os; os.kill(os.getpid(), 9)")
        assert (killed.status, killed.returncode) == (SandboxStatus.KILLED, -9)
        crashed = await run(sandbox, "import os; os.kill(os.getpid(), 11)")
        assert (crashed.status, crashed.returncode) == (SandboxStatus.CRASHED, -11)

    in_sandboxes(kind, body)


@both
def test_sandboxes_do_not_see_each_other(kind: str) -> None:
    async def body(one: OwnedSandbox, other: OwnedSandbox) -> None:
        await run(one, "open('mine', 'w').write('secret')")
        waiting = asyncio.create_task(run(one, "import time; time.sleep(60)", deadline_s=3.0))
        result = await run(other, "import os\nprint(os.listdir('/box'))\n" + LIST_PROCESSES)
        assert result.stdout == b"[]\n1 me\n"
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)

    in_sandboxes(kind, body, num=2)


@both
def test_links_and_pipes_left_by_a_program_lead_nowhere(kind: str) -> None:
    async def body(sandbox: OwnedSandbox) -> None:
        program = "import os\nos.symlink('/steelyard/inside.py', 'link')\nos.mkfifo('pipe')\nos.mkdir('directory')"
        assert (await run(sandbox, program)).status is SandboxStatus.OK
        for name in ("link", "pipe", "directory"):
            with pytest.raises(FileNotFoundError):
                await sandbox.read_file(name)
        for name in ("link", "pipe"):
            await sandbox.write_file(name, b"new")
            assert await sandbox.read_file(name) == b"new"

    in_sandboxes(kind, body)


@both
def test_a_set_lists_its_items_alike_in_every_sandbox(kind: str) -> None:
    async def body(one: OwnedSandbox, other: OwnedSandbox) -> None:
        program = "print([*{str(number) for number in range(100)}])"
        assert (await run(one, program)).stdout == (await run(other, program)).stdout

    in_sandboxes(kind, body, num=2)
